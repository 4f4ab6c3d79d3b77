// The inner product at the heart of every projection and of attention's scores: rows
// times panels.
//
//   sums[r][n] = sum_k x[r][k] * w[n][k]
//
// Each sum is one lane of one accumulator, to which the products are added one after
// the other in the order of k; where bf16 is multiplied by pairs, the odd element of a
// pair before the even one; by tiles of AMX in the order of `amx.h`. Tiles of rows and
// panels are only a matter of speed: they decide which sums share registers, never the
// order within one.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx.h"
#include "interleave.h"
#include "panels.h"
#include "simd.h"

namespace spec_jax {

// Rows of a tile of registers, at most, and panels beside each other for R of them: as many
// sums as leave registers for weights and a row, of 32 with AVX-512 and 16 otherwise, and
// not so few that one waits for another. R is 0 for tiles of AMX.
#if defined(SPEC_JAX_AVX512)
constexpr int kGroup = 8;
constexpr int panels_beside(int R) { return R <= 6 ? 4 : 2; }
#else
constexpr int kGroup = 5;
constexpr int panels_beside(int R) { return R == 1 ? 4 : R == 2 ? 2 : 1; }
#endif
// Rows of a group for weights of type T, at most.
template <typename T>
constexpr int64_t kMostRows = kByTiles<T> ? kTileRows : kGroup;

// Adds the products of one word of k: R rows, whose words lie side by side, by P panels.
#if defined(SPEC_JAX_AVX512BF16)
template <int R, int P>
inline void step(const bf16* x, const bf16* const (&w)[P], int64_t at,
                 Vec (&acc)[R][P]) {
  Pairs weights[P];
#pragma GCC unroll 16
  for (int j = 0; j < P; ++j) {
    weights[j] = load_pairs(w[j] + at);
    // Loaded once for all rows: left alone, compilers load it for each.
    if (R > 1) keep_in_register(weights[j]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Pairs row = broadcast_pair(x + 2 * r);
#pragma GCC unroll 16
    for (int j = 0; j < P; ++j) acc[r][j] = dot(weights[j], row, acc[r][j]);
  }
}
#endif

template <int R, int V>
inline void add_products(const float* x, int64_t stride, const Vec (&w)[V],
                         Vec (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Vec row = broadcast(x[r * stride]);
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) acc[r][j] = fma(w[j], row, acc[r][j]);
  }
}

template <int R, int P, int V>
inline void step(const float* x, const float* const (&w)[P], int64_t at,
                 Vec (&acc)[R][V]) {
  Vec weights[V];
#pragma GCC unroll 16
  for (int j = 0; j < V; ++j) {
    weights[j] = load(w[j / kVectors] + at + j % kVectors * kLanes);
  }
  add_products<R, V>(x, 1, weights, acc);
}

template <int R, int P, int V>
inline void step(const float* x, const bf16* const (&w)[P], int64_t at,
                 Vec (&acc)[R][V]) {
  Vec weights[V];
#pragma GCC unroll 16
  for (int j = 0; j < V; ++j) {
    weights[j] = load_even(w[j / kVectors] + at + j % kVectors * 2 * kLanes);
  }
  add_products<R, V>(x, 2, weights, acc);
#pragma GCC unroll 16
  for (int j = 0; j < V; ++j) {
    weights[j] = load_odd(w[j / kVectors] + at + j % kVectors * 2 * kLanes);
  }
  add_products<R, V>(x + 1, 2, weights, acc);
}

// R rows by the P panels at `w` over `words` words of k, into sums [R, stride]. `skipped`
// is the number of bytes between these panels and the next ones, which are prefetched
// if `kAsks`.
template <int R, int P, bool kAsks, typename X, typename W>
void tile(const X* x, const W* w, int64_t words, float* sums, int64_t stride,
          int64_t skipped) {
  constexpr int V = P * kVectors;
  constexpr int64_t kWide = kPanel * kWord<W>;
  const W* panel[P];
  Vec acc[R][V];
#pragma GCC unroll 16
  for (int j = 0; j < P; ++j) panel[j] = w + j * words * kWide;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) acc[r][j] = zero();
  }
  // Past the end of a panel, what has its place in the next tile is asked for: the panels
  // between are those of this one.
  constexpr int64_t kWideBytes = kWide * int64_t{sizeof(W)};
  int64_t begin = 0, ahead = kAheadBytes;
  for (int64_t end : {std::max<int64_t>(words - kAheadBytes / kWideBytes, 0), words}) {
    for (int64_t k = begin; k < end; ++k) {
#pragma GCC unroll 16
      for (int j = 0; j < P; ++j) {
        if (kAsks) prefetch(panel[j] + k * kWide, ahead);
      }
      step(x + k * R * kWord<W>, panel, k * kWide, acc);
    }
    begin = end;
    ahead += (P - 1) * words * kWideBytes + skipped;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) store(sums + r * stride + j * kLanes, acc[r][j]);
  }
}

// R rows by `count` panels at `w`.
template <int R, bool kAsks, typename T>
void multiply_rows(const RowGroup<T>& x, const T* w, int64_t count, int64_t words,
                   float* sums, int64_t stride, int64_t skipped) {
  constexpr int P = panels_beside(R);
  int64_t size = words * kPanel * kWord<T>;
  auto multiply = [&](auto panels, int64_t skipped) {
    if constexpr (R == 0) {
      multiply_tiles<panels(), kAsks>(x, w, words, sums, stride, skipped);
    } else {
      tile<R, panels(), kAsks>(x.at(0), w, words, sums, stride, skipped);
    }
  };
  for (; count >= P; count -= P, w += P * size, sums += P * kPanel) {
    multiply(std::integral_constant<int, P>{}, count == P ? skipped : 0);
  }
  if constexpr (P > 3) {
    if (count == 3) multiply(std::integral_constant<int, 3>{}, skipped);
  }
  if constexpr (P > 2) {
    if (count == 2) multiply(std::integral_constant<int, 2>{}, skipped);
  }
  if (count == 1) multiply(std::integral_constant<int, 1>{}, skipped);
}

// A group of rows by `count` panels at `w`, into sums [rows, stride]. `next`, unless it is
// null, is what will be read after these panels if not what lies behind them. Nothing is
// asked for unless `kAsks`: behind what a worker has just written may lie what another one
// writes.
template <bool kAsks = true, typename T>
void multiply(const RowGroup<T>& x, const T* w, int64_t count, int64_t words, float* sums,
              int64_t stride, const T* next = nullptr) {
  int64_t skipped = 0;
  if (next != nullptr) {
    auto address = [](const T* p) { return reinterpret_cast<intptr_t>(p); };
    skipped = address(next) - address(w + count * words * kPanel * kWord<T>);
  }
  if constexpr (kByTiles<T>) {
    return multiply_rows<0, kAsks>(x, w, count, words, sums, stride, skipped);
  }
  switch (x.size) {
    case 1: return multiply_rows<1, kAsks>(x, w, count, words, sums, stride, skipped);
    case 2: return multiply_rows<2, kAsks>(x, w, count, words, sums, stride, skipped);
    case 3: return multiply_rows<3, kAsks>(x, w, count, words, sums, stride, skipped);
    case 4: return multiply_rows<4, kAsks>(x, w, count, words, sums, stride, skipped);
    case 5: return multiply_rows<5, kAsks>(x, w, count, words, sums, stride, skipped);
#if defined(SPEC_JAX_AVX512)
    case 6: return multiply_rows<6, kAsks>(x, w, count, words, sums, stride, skipped);
    case 7: return multiply_rows<7, kAsks>(x, w, count, words, sums, stride, skipped);
    case 8: return multiply_rows<8, kAsks>(x, w, count, words, sums, stride, skipped);
#endif
  }
}

}  // namespace spec_jax
