// The inner product at the heart of every projection: rows times weight rows.
//
//   acc[r][n] = sum_k x[r][k] * w[n][k]
//
// Each (r, n) has one vector accumulator, walked over k in order, a step of two vectors
// (or one of pairs) after the other, and one order of summing its lanes. Tiles of rows
// and of weight rows and blocks of k are only a matter of speed: they decide which
// accumulators share registers and caches, never the order within one. The weight
// stream is outermost, so each weight is read from memory once for all rows; the next
// panel of it is fetched while one is multiplied.

#pragma once

#include <algorithm>
#include <cstdint>

#include "packed_rows.h"
#include "simd.h"
#include "tile_avx2.h"

namespace spec_jax {

// Weight rows of a tile, by its number of rows: as many accumulators as leave registers
// for the weights and one row. (32 registers with AVX-512, 16 otherwise, all of which
// only assembly uses: see tile_avx2.h.)
constexpr int tile_width(int R) {
#if defined(SPEC_JAX_AVX512)
  constexpr int widths[] = {8, 8, 8, 6, 4, 4, 3, 3};
#elif defined(SPEC_JAX_AVX2)
  constexpr int widths[] = {4, 4, 3, 3, 2};
#else
  constexpr int widths[] = {4, 4, 3, 2, 2};
#endif
  return widths[R - 1];
}
// Of a block of k: its rows stay in the first cache.
constexpr int64_t kDepth = 1024;
// Weight rows of a block: a multiple of every tile width and of the lanes.
constexpr int64_t kPanel = kLanes == 16 ? 48 : 24;

inline Vec load_row(const float* x) { return load(x); }
inline Vec multiply_add(Vec w, Vec x, Vec acc) { return fma(w, x, acc); }
#if defined(SPEC_JAX_AVX512BF16)
inline Pairs load_row(const bf16* x) { return load_pairs(x); }
inline Vec multiply_add(Pairs w, Pairs x, Vec acc) { return dot(w, x, acc); }
#endif

// A vector of each of R rows by one of each of NT weight rows.
template <int R, int NT, typename X, typename V>
inline void multiply_rows(const X* x, const V (&weights)[NT], Vec (&acc)[R][NT]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    V row = load_row(x + r * kStep);
    // Loaded once for all weight rows: left alone, compilers load it for each.
    if (NT > 1) keep_in_register(row);
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) acc[r][j] = multiply_add(weights[j], row, acc[r][j]);
  }
}

// One step of k for R rows by NT weight rows, `stride` elements apart: its first vector
// before its second.
template <int R, int NT, typename W>
inline void step(const float* x, const W* w, int64_t stride, int64_t& k,
                 Vec (&acc)[R][NT]) {
  Vec weights[NT];
#pragma GCC unroll 16
  for (int j = 0; j < NT; ++j) weights[j] = load_first(w + j * stride + k);
  multiply_rows<R, NT>(x + k * R, weights, acc);
  // Few rows leave the compiler tempted to keep the first half's loads for the second,
  // in registers that the accumulators need.
  if (R <= 3) asm("" : "+r"(k));
#pragma GCC unroll 16
  for (int j = 0; j < NT; ++j) weights[j] = load_second(w + j * stride + k);
  multiply_rows<R, NT>(x + k * R + kLanes, weights, acc);
}
#if defined(SPEC_JAX_AVX512BF16)
// As above, in one vector of pairs.
template <int R, int NT>
inline void step(const bf16* x, const bf16* w, int64_t stride, int64_t& k,
                 Vec (&acc)[R][NT]) {
  Pairs weights[NT];
#pragma GCC unroll 16
  for (int j = 0; j < NT; ++j) weights[j] = load_pairs(w + j * stride + k);
  multiply_rows<R, NT>(x + k * R, weights, acc);
}
#endif

// What is asked of memory while a product goes on: a share for each step, so that the
// stream of weights never pauses, and each line once.
struct Ahead {
  uintptr_t next;    // address that is asked for next
  uintptr_t until;   // and how far the steps taken allow
  int64_t per_step;  // bytes, for each weight row of a tile

  // With one step of NT weight rows of type W. (A loop that ends by the addresses alone
  // would be a jump away.)
  template <int NT, typename W>
  void advance() {
    constexpr int kLines = (NT * kStep * sizeof(W) + 63) / 64;
    until += NT * per_step;
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) {
      if (__builtin_expect(next < until, true)) {
        prefetch_address(next);
        next += 64;
      }
    }
  }
};

// R rows by NT weight rows, `stride` elements apart, over k in [k0, k1); accumulators
// wait in `waiting` [R, kPanel] between blocks of k.
template <int R, int NT, typename X, typename W>
inline void tile(const X* x, const W* w, int64_t stride, int64_t k0, int64_t k1,
                 Ahead& ahead, Vec* waiting) {
  Vec acc[R][NT];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) acc[r][j] = k0 == 0 ? zero() : waiting[r * kPanel + j];
  }
  int64_t k = k0;
  for (; k + kStep <= k1; k += kStep) {
    ahead.template advance<NT, W>();
    step(x, w, stride, k, acc);
  }
  if (k < k1) {
    W ends[NT][kStep];
    for (int j = 0; j < NT; ++j) copy_tail(w + j * stride + k, k1 - k, ends[j]);
    int64_t start = 0;
    step(x + k * R, ends[0], kStep, start, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) waiting[r * kPanel + j] = acc[r][j];
  }
}

// R rows by a panel of weight rows: `out[r * kPanel + j]`.
template <int R, typename X, typename W>
void panel(const X* x, const W* w, int64_t stride, int64_t K, int64_t width,
           Ahead ahead, float* out) {
  constexpr int NT = tile_width(R);
  Vec acc[R * kPanel];
  for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += kDepth) {
    int64_t k1 = std::min(k0 + kDepth, K), n = 0;
    for (; n + NT <= width; n += NT) {
      tile<R, NT>(x, w + n * stride, stride, k0, k1, ahead, acc + n);
    }
    for (; n < width; ++n) {
      tile<R, 1>(x, w + n * stride, stride, k0, k1, ahead, acc + n);
    }
  }
  for (int r = 0; r < R; ++r) {
    const Vec* from = acc + r * kPanel;
    float* to = out + r * kPanel;
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) store(to + j, sums(from + j));
    for (; j < width; ++j) to[j] = sum(from[j]);
  }
}

// The panel of `width` weight rows at `w`, `stride` elements apart, for the group of
// rows at `first`: `out[r * kPanel + j]`. With `more`, as much follows in memory, and
// every group of rows asks for its share of that.
template <typename X, typename W>
void multiply(const PackedRows<X>& rows, int64_t first, const W* w, int64_t stride,
              int64_t width, bool more, float* out) {
  const X* x = rows.group(first);
  int64_t K = rows.K, size = rows.group_size(first), bytes = width * stride * sizeof(W);
  Ahead ahead{};
  if (more) {
    ahead.next = ahead.until =
        reinterpret_cast<uintptr_t>(w) + bytes + bytes * first / rows.rows;
    ahead.per_step = kStep * sizeof(W) * size / rows.rows;
  }
  switch (size) {
    case 1: return panel<1>(x, w, stride, K, width, ahead, out);
    case 2: return panel<2>(x, w, stride, K, width, ahead, out);
    case 3: return panel<3>(x, w, stride, K, width, ahead, out);
    case 4: return panel<4>(x, w, stride, K, width, ahead, out);
    case 5: return panel<5>(x, w, stride, K, width, ahead, out);
#if defined(SPEC_JAX_AVX512)
    case 6: return panel<6>(x, w, stride, K, width, ahead, out);
    case 7: return panel<7>(x, w, stride, K, width, ahead, out);
    case 8: return panel<8>(x, w, stride, K, width, ahead, out);
#endif
  }
}

}  // namespace spec_jax
