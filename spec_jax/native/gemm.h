// The inner product at the heart of every projection: rows times weight rows.
//
//   acc[r][n] = sum_k x[r][k] * w[n][k]
//
// Each (r, n) has one vector accumulator, walked over k in order, and one order of
// summing its lanes. Tiles of rows and of weight rows and blocks of k are only a matter
// of speed: they decide which accumulators share registers and caches, never the order
// within one. The weight stream is outermost, so each weight is read from memory once
// for all rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "packed_rows.h"
#include "simd.h"

namespace spec_jax {

// Weight rows of a tile, by its number of rows: as many accumulators as leave registers
// for the weights and one row. (32 registers with AVX-512, 16 otherwise.)
constexpr int tile_width(int R) {
  constexpr int narrow[] = {4, 4, 3, 2, 2}, wide[] = {8, 8, 8, 6, 4, 4, 3, 3};
  return kLanes == 16 ? wide[R - 1] : narrow[R - 1];
}
// Of a block of k: its rows stay in the first cache.
constexpr int64_t kDepth = 1024;
// Weight rows of a block: a multiple of every tile width and of the lanes.
constexpr int64_t kPanel = kLanes == 16 ? 48 : 24;

// One step of k for R rows by NT weight rows. `a` of a weight row is multiplied before
// its `b`.
template <int R, int NT>
inline void step(const float* x, const Vec (&weights)[NT], Vec (&acc)[R][NT]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Vec row = load(x + r * kStep);
    // Loaded once for all weight rows: left alone, compilers load it for each.
    if (NT > 1) keep_in_register(row);
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) acc[r][j] = fma(weights[j], row, acc[r][j]);
  }
}

// R rows by NT weight rows, `stride` elements apart, over k in [k0, k1); accumulators
// wait in `waiting` [R, kPanel] between blocks of k. With `kFetch`, what comes next is
// asked for.
template <int R, int NT, bool kFetch, typename W>
inline void tile(const float* x, const W* w, int64_t stride, int64_t k0, int64_t k1,
                 Vec* waiting) {
  Vec acc[R][NT], weights[NT];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) acc[r][j] = k0 == 0 ? zero() : waiting[r * kPanel + j];
  }
  int64_t k = k0;
  for (; k + kStep <= k1; k += kStep) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) {
      if (kFetch) prefetch(w + j * stride + k, NT * stride * sizeof(W));
      weights[j] = load_first(w + j * stride + k);
    }
    step<R, NT>(x + k * R, weights, acc);
    // Few rows leave the compiler tempted to keep the first half's loads for the second,
    // in registers that the accumulators need.
    if (R <= 3) asm("" : "+r"(k));
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) weights[j] = load_second(w + j * stride + k);
    step<R, NT>(x + k * R + kLanes, weights, acc);
  }
  if (k < k1) {
    Vec second[NT];
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) {
      load_tail(w + j * stride + k, k1 - k, weights[j], second[j]);
    }
    step<R, NT>(x + k * R, weights, acc);
    step<R, NT>(x + k * R + kLanes, second, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) waiting[r * kPanel + j] = acc[r][j];
  }
}

// R rows by a panel of weight rows: `out[r * kPanel + j]`.
template <int R, bool kFetch, typename W>
void panel(const float* x, const W* w, int64_t stride, int64_t K, int64_t width,
           float* out) {
  constexpr int NT = tile_width(R);
  Vec acc[R * kPanel];
  for (int64_t k0 = 0; k0 == 0 || k0 < K; k0 += kDepth) {
    int64_t k1 = std::min(k0 + kDepth, K), n = 0;
    for (; n + NT <= width; n += NT) {
      tile<R, NT, kFetch>(x, w + n * stride, stride, k0, k1, acc + n);
    }
    for (; n < width; ++n) {
      tile<R, 1, kFetch>(x, w + n * stride, stride, k0, k1, acc + n);
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
// rows at `first`: `out[r * kPanel + j]`. With `fetch`, memory is asked for the weights
// that follow.
template <typename W>
void multiply(const PackedRows& rows, int64_t first, const W* w, int64_t stride,
              int64_t width, bool fetch, float* out) {
  const float* x = rows.group(first);
  int64_t K = rows.K;
  auto run = [&](auto choice) {
    constexpr bool kFetch = decltype(choice)::value;
    switch (rows.group_size(first)) {
      case 1: return panel<1, kFetch>(x, w, stride, K, width, out);
      case 2: return panel<2, kFetch>(x, w, stride, K, width, out);
      case 3: return panel<3, kFetch>(x, w, stride, K, width, out);
      case 4: return panel<4, kFetch>(x, w, stride, K, width, out);
      case 5: return panel<5, kFetch>(x, w, stride, K, width, out);
#if defined(__AVX512F__)
      case 6: return panel<6, kFetch>(x, w, stride, K, width, out);
      case 7: return panel<7, kFetch>(x, w, stride, K, width, out);
      case 8: return panel<8, kFetch>(x, w, stride, K, width, out);
#endif
    }
  };
  if (fetch) return run(std::true_type());
  run(std::false_type());
}

}  // namespace spec_jax
