// The inner product at the heart of every projection: rows times weight rows.
//
//   acc[r][n] = sum_k x[r][k] * w[n][k]
//
// Each (r, n) has one vector accumulator, walked over k in order, and one order of
// summing its lanes. Tiles of rows and of weight rows are only a matter of speed: they
// decide which accumulators share registers, never the order within one. The weight
// stream is outermost, so each weight is read from memory once for all rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace spec_jax {

constexpr int kStep = 2 * kLanes;  // elements of k per step

// Rounded up to whole steps; the packed rows are zero from K on.
inline int64_t padded(int64_t K) { return (K + kStep - 1) / kStep * kStep; }

// Rows as the kernel reads them: float, and for bf16 weights the even elements of each
// step before its odd ones, so that weights need no shuffle.
template <typename W>
void pack_row(const float* x, int64_t K, float* out) {
  for (int64_t k = 0; k < padded(K); k += kStep) {
    for (int i = 0; i < kStep; ++i) {
      int64_t from = sizeof(W) == 2 ? k + 2 * (i % kLanes) + i / kLanes : k + i;
      out[k + i] = from < K ? x[from] : 0.0f;
    }
  }
}

inline void load_step(const bf16* w, Vec& a, Vec& b) { load_pairs(w, a, b); }
inline void load_step(const float* w, Vec& a, Vec& b) {
  a = load(w);
  b = load(w + kLanes);
}

// The last step of a weight row whose length is not a multiple: a copy with zeros, so
// that nothing past the row is read.
template <typename W>
inline void load_tail(const W* w, int64_t left, Vec& a, Vec& b) {
  W copy[kStep];
  std::memset(copy, 0, sizeof copy);
  std::memcpy(copy, w, left * sizeof(W));
  load_step(copy, a, b);
}

// R rows by NT weight rows. `x` has row stride `stride`; results go to
// `out[r * out_stride + j]`.
template <int R, int NT, typename W>
inline void tile(const float* x, int64_t stride, const W* w, int64_t K, float* out,
                 int64_t out_stride) {
  Vec acc[R][NT];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) acc[r][j] = zero();
  }
  int64_t whole = K / kStep * kStep;
  for (int64_t k = 0; k < whole; k += kStep) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) {
      Vec a, b;
      load_step(w + j * K + k, a, b);
      prefetch(w + j * K + k, NT * K * sizeof(W));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* row = x + r * stride + k;
        acc[r][j] = fma(a, load(row), acc[r][j]);
        acc[r][j] = fma(b, load(row + kLanes), acc[r][j]);
      }
    }
  }
  if (whole < K) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) {
      Vec a, b;
      load_tail(w + j * K + whole, K - whole, a, b);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* row = x + r * stride + whole;
        acc[r][j] = fma(a, load(row), acc[r][j]);
        acc[r][j] = fma(b, load(row + kLanes), acc[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < NT; ++j) out[r * out_stride + j] = sum(acc[r][j]);
  }
}

// Weight rows of a tile, by its number of rows: as many accumulators as there are
// registers for. (32 of them with AVX-512, 16 otherwise.)
constexpr int tile_width(int R) {
  int accumulators = kLanes == 16 ? 24 : 12;
  int width = accumulators / R;
  return width > 8 ? 8 : width < 1 ? 1 : width;
}
constexpr int64_t kGroup = 8;  // rows of a tile, at most
constexpr int64_t kBlock = 8;  // weight rows that one group leaves to the next

template <int R, typename W>
void columns(const float* x, int64_t stride, const W* w, int64_t K, int64_t N,
             float* out, int64_t out_stride) {
  constexpr int NT = tile_width(R);
  int64_t n = 0;
  for (; n + NT <= N; n += NT) {
    tile<R, NT>(x, stride, w + n * K, K, out + n, out_stride);
  }
  for (; n < N; ++n) tile<R, 1>(x, stride, w + n * K, K, out + n, out_stride);
}

template <typename W>
void group(int64_t rows, const float* x, int64_t stride, const W* w, int64_t K,
           int64_t N, float* out, int64_t out_stride) {
  switch (rows) {
    case 1: return columns<1>(x, stride, w, K, N, out, out_stride);
    case 2: return columns<2>(x, stride, w, K, N, out, out_stride);
    case 3: return columns<3>(x, stride, w, K, N, out, out_stride);
    case 4: return columns<4>(x, stride, w, K, N, out, out_stride);
    case 5: return columns<5>(x, stride, w, K, N, out, out_stride);
    case 6: return columns<6>(x, stride, w, K, N, out, out_stride);
    case 7: return columns<7>(x, stride, w, K, N, out, out_stride);
    case 8: return columns<8>(x, stride, w, K, N, out, out_stride);
  }
}

// N weight rows for all rows: `out[r * out_stride + n]`. More rows than a group go over
// a block of weight rows that the cache still holds.
template <typename W>
void product(int64_t rows, const float* x, const W* w, int64_t K, int64_t N, float* out,
             int64_t out_stride) {
  int64_t stride = padded(K);
  int64_t block = rows <= kGroup ? N : kBlock;
  for (int64_t n = 0; n < N; n += block) {
    int64_t width = std::min(block, N - n);
    for (int64_t r = 0; r < rows; r += kGroup) {
      int64_t count = std::min<int64_t>(kGroup, rows - r);
      group(count, x + r * stride, stride, w + n * K, K, width,
            out + r * out_stride + n, out_stride);
    }
  }
}

}  // namespace spec_jax
