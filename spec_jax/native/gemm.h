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

template <int R, int P, int V, typename W>
inline void step(const float* x, const W* const (&w)[P], int64_t at, Vec (&acc)[R][V]) {
#pragma GCC unroll 2
  for (int part = 0; part < kWord<W>; ++part) {
    Vec weights[V];
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      const W* from = w[j / kVectors] + at + j % kVectors * kWord<W> * kLanes;
      weights[j] = load_part(from, part);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec row = broadcast(x[r * kWord<W> + part]);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) acc[r][j] = fma(weights[j], row, acc[r][j]);
    }
  }
}

// The sums of R rows by P panels, into sums [R, stride]. `add(begin, end, ahead, acc)` adds
// the products of some of the `steps` along k, for each of which a panel has `step_bytes`,
// and asks for weights so many bytes ahead; `skipped` is the number of bytes between these
// panels and the next ones.
template <int R, int P, typename Add>
[[gnu::always_inline]] inline void tile(int64_t steps, int64_t step_bytes, float* sums,
                                        int64_t stride, int64_t skipped, const Add& add) {
  constexpr int V = P * kVectors;
  Vec acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) acc[r][j] = zero();
  }
  // Past the end of a panel, what has its place in the next tile is asked for: the panels
  // between are those of this one.
  int64_t begin = 0, ahead = kAheadBytes;
  for (int64_t end : {std::max<int64_t>(steps - kAheadBytes / step_bytes, 0), steps}) {
    add(begin, end, ahead, acc);
    begin = end;
    ahead += (P - 1) * steps * step_bytes + skipped;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) store(sums + r * stride + j * kLanes, acc[r][j]);
  }
}

// R rows by the P panels at `w` over `words` words of k; asks for weights if `kAsks`.
template <int R, int P, bool kAsks, typename X, typename W>
[[gnu::noinline]] void multiply_tile(const X* x, const W* w, int64_t words, float* sums,
                                     int64_t stride, int64_t skipped) {
  constexpr int64_t kWide = kPanel * kWord<W>;
  const W* panel[P];
#pragma GCC unroll 16
  for (int j = 0; j < P; ++j) panel[j] = w + j * words * kWide;
  constexpr int64_t kWideBytes = kWide * int64_t{sizeof(W)};
  tile<R, P>(words, kWideBytes, sums, stride, skipped,
             [&](int64_t begin, int64_t end, int64_t ahead,
                 auto& acc) __attribute__((always_inline)) {
    for (int64_t k = begin; k < end; ++k) {
#pragma GCC unroll 16
      for (int j = 0; j < P; ++j) {
        if (kAsks) prefetch(panel[j] + k * kWide, ahead);
      }
      step(x + k * R * kWord<W>, panel, k * kWide, acc);
    }
  });
}

// Calls `body` with the constant `size`, one of kLeast to kMost.
template <int kMost, int kLeast = 1, typename Body>
inline void with_constant(int64_t size, const Body& body) {
  if constexpr (kLeast < kMost) {
    if (size > kLeast) return with_constant<kMost, kLeast + 1>(size, body);
  }
  body(std::integral_constant<int, kLeast>{});
}

// Calls `body(P, at, is_last)` for panels from `at` on, up to `count`: with constants P, and
// with less of them, or half as many, where fewer panels are left.
template <int P, bool kHalves = false, typename Body>
inline void by_panels(int64_t count, const Body& body, int64_t at = 0) {
  for (; at + P <= count; at += P) {
    body(std::integral_constant<int, P>{}, at, at + P == count);
  }
  if constexpr (P > 1) by_panels<kHalves ? P / 2 : P - 1, kHalves>(count, body, at);
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
  auto by_rows = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    by_panels<panels_beside(R)>(count, [&](auto panels, int64_t at, bool is_last) {
      constexpr int P = decltype(panels)::value;
      const T* from = w + at * words * kPanel * kWord<T>;
      float* to = sums + at * kPanel;
      int64_t then = is_last ? skipped : 0;
      if constexpr (R == 0) {
        multiply_tiles<P, kAsks>(x, from, words, to, stride, then);
      } else {
        multiply_tile<R, P, kAsks>(x.at(0), from, words, to, stride, then);
      }
    });
  };
  if constexpr (kByTiles<T>) {
    by_rows(std::integral_constant<int, 0>{});
  } else {
    with_constant<kGroup>(x.size, by_rows);
  }
}

}  // namespace spec_jax
