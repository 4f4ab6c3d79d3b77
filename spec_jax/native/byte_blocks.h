// Products of rows and weights of eight bits, in blocks of 32 along k with a scale each.
//
//   sums[r][n] = sum_b (sum_i x[r][b][i] * w[n][b][i]) * (scale_x[r][b] * scale_w[n][b])
//
// The sum over a block is one of integers, which has no order. Those over blocks are lanes
// of float accumulators, to which the blocks are added in their order: whatever the tiles,
// as in `gemm.h`.
//
// A panel of weights holds its blocks by pairs: kBlockWords words of four bytes for each of
// kPanel outputs, twice, and the float16 scales of both. So a panel is one stream of whole
// lines of a cache. Past the matrix weights and scales are zero.

#pragma once

#include <algorithm>
#include <cstdint>

#include "byte_lanes.h"
#include "byte_rows.h"
#include "gemm.h"
#include "panels.h"
#include "simd.h"

namespace spec_jax {

constexpr int64_t kBlockWords = kBlock / 4;
// Panels beside each other for R rows: as in `gemm.h`, with two sums for each.
#if defined(SPEC_JAX_AVX512)
constexpr int byte_panels_beside(int R) { return R <= 3 ? 4 : R <= 6 ? 2 : 1; }
#else
constexpr int byte_panels_beside(int R) { return R == 1 ? 2 : 1; }
#endif

// R rows by the P panels at `w`, into sums [R, stride], as in `gemm.h`.
template <int R, int P>
void byte_tile(const uint8_t* rows, const uint8_t* w, int64_t pairs, float* sums, int64_t stride,
               int64_t skipped) {
  constexpr int V = P * kVectors;
  constexpr int64_t kLine = 4 * kPanel;
  const uint8_t* panel[P];
  Vec acc[R][V];
#pragma GCC unroll 16
  for (int j = 0; j < P; ++j) panel[j] = w + j * pairs * kPairBytes;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) acc[r][j] = zero();
  }
  int64_t begin = 0, ahead = kAheadBytes;
  for (int64_t end : {std::max<int64_t>(pairs - kAheadBytes / kPairBytes, 0), pairs}) {
    for (int64_t b = 2 * begin; b < 2 * end; ++b) {
      RowBlock x(rows, R, b);
      IntVec block[R][V];
      int64_t half = b % 2, at = b / 2 * kPairBytes + half * kBlockWords * kLine;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) block[r][j] = broadcast_int(kSumsOffsets ? x.sums[r] : 0);
      }
#pragma GCC unroll 16
      for (int word = 0; word < kBlockWords; ++word) {
        Bytes weights[V];
#pragma GCC unroll 16
        for (int j = 0; j < P; ++j) prefetch(panel[j] + at + word * kLine, ahead);
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
          int64_t lane = j % kVectors * 4 * kLanes;
          weights[j] = load_bytes(panel[j / kVectors] + at + word * kLine + lane);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          int32_t four = four_bytes(x.bytes + r * kBlock + 4 * word);
#pragma GCC unroll 16
          for (int j = 0; j < V; ++j) block[r][j] = add_products(weights[j], four, block[r][j]);
        }
      }
      int64_t scales = b / 2 * kPairBytes + 2 * kBlockWords * kLine + half * 2 * kPanel;
      Vec scale[V];
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) {
        scale[j] = load_float16(panel[j / kVectors] + scales + j % kVectors * 2 * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec of_row = broadcast(x.scales[r]);
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
          acc[r][j] = fma(to_floats(block[r][j]), mul(scale[j], of_row), acc[r][j]);
        }
      }
    }
    begin = end;
    ahead += (P - 1) * pairs * kPairBytes + skipped;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) store(sums + r * stride + j * kLanes, acc[r][j]);
  }
}

// R rows by `count` panels at `w`.
template <int R>
void multiply_byte_rows(const uint8_t* rows, const uint8_t* w, int64_t count, int64_t pairs,
                        float* sums, int64_t stride, int64_t skipped) {
  constexpr int P = byte_panels_beside(R);
  for (; count >= P; count -= P, w += P * pairs * kPairBytes, sums += P * kPanel) {
    byte_tile<R, P>(rows, w, pairs, sums, stride, count == P ? skipped : 0);
  }
  if constexpr (P > 2) {
    if (count >= 2) {
      byte_tile<R, 2>(rows, w, pairs, sums, stride, count == 2 ? skipped : 0);
      count -= 2, w += 2 * pairs * kPairBytes, sums += 2 * kPanel;
    }
  }
  if constexpr (P > 1) {
    if (count == 1) byte_tile<R, 1>(rows, w, pairs, sums, stride, skipped);
  }
}

// A group of `size` rows by `count` panels at `w`, of blocks, as `multiply` in `gemm.h`.
inline void multiply_bytes(const uint8_t* rows, int64_t size, const uint8_t* w,
                           int64_t count, int64_t pairs, float* sums, int64_t stride,
                           int64_t skipped) {
  switch (size) {
    case 1: return multiply_byte_rows<1>(rows, w, count, pairs, sums, stride, skipped);
    case 2: return multiply_byte_rows<2>(rows, w, count, pairs, sums, stride, skipped);
    case 3: return multiply_byte_rows<3>(rows, w, count, pairs, sums, stride, skipped);
    case 4: return multiply_byte_rows<4>(rows, w, count, pairs, sums, stride, skipped);
    case 5: return multiply_byte_rows<5>(rows, w, count, pairs, sums, stride, skipped);
#if defined(SPEC_JAX_AVX512)
    case 6: return multiply_byte_rows<6>(rows, w, count, pairs, sums, stride, skipped);
    case 7: return multiply_byte_rows<7>(rows, w, count, pairs, sums, stride, skipped);
    case 8: return multiply_byte_rows<8>(rows, w, count, pairs, sums, stride, skipped);
#endif
  }
}

}  // namespace spec_jax
