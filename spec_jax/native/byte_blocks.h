// Products of rows and weights of eight bits, in blocks of 32 along k with a scale each.
//
//   sums[r][n] = sum_b (sum_i x[r][b][i] * w[n][b][i]) * (scale_x[r][b] * scale_w[n][b])
//
// A block of four bits has a minimum, too, and after its own term comes another,
//
//   minimum_w[n][b] * (scale_x[r][b] * sum_i x[r][b][i])
//
// The sum over a block is of integers, and exact in any order. Sums over blocks are
// lanes of float accumulators, to which the blocks are added in order, whatever the
// tiles, as in `gemm.h`.
//
// Panels of weights hold their blocks by pairs, in whole lines of a cache: see `panels.h`.

#pragma once

#include <cstdint>

#include "byte_lanes.h"
#include "byte_rows.h"
#include "gemm.h"
#include "panels.h"
#include "simd.h"

namespace spec_jax {

constexpr int64_t kBlockWords = kBlock / 4;
// Panels beside each other for R rows, as in `gemm.h`; each has an integer sum, too.
#if defined(SPEC_JAX_AVX512)
constexpr int byte_panels_beside(int R) { return R <= 3 ? 4 : R <= 6 ? 2 : 1; }
#else
constexpr int byte_panels_beside(int R) { return R == 1 ? 2 : 1; }
#endif

// Multiplies R rows by the P panels at `w`, into sums [R, stride], as in `gemm.h`.
template <bool kIsFour, int R, int P>
[[gnu::noinline]] void byte_tile(const uint8_t* rows, const uint8_t* w, int64_t pairs,
                                 float* sums, int64_t stride, int64_t skipped) {
  constexpr int V = P * kVectors;
  constexpr int64_t kPair = kPairBytes<kIsFour>, kLines = kBlockLines<kIsFour>;
  const uint8_t* panel[P];
#pragma GCC unroll 16
  for (int j = 0; j < P; ++j) panel[j] = w + j * pairs * kPair;
  tile<R, P>(pairs, kPair, sums, stride, skipped,
             [&](int64_t begin, int64_t end, int64_t ahead,
                 auto& acc) __attribute__((always_inline)) {
    for (int64_t b = 2 * begin; b < 2 * end; ++b) {
      RowBlock x(rows, R, b);
      IntVec block[R][V];
      int64_t half = b % 2, at = b / 2 * kPair + half * kLines * kLineBytes;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t first = kSumsOffsets && !kIsFour ? x.sums[r] : 0;
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) block[r][j] = broadcast_int(first);
      }
#pragma GCC unroll 16
      for (int word = 0; word < kBlockWords; ++word) {
        const int64_t line = at + word % kLines * kLineBytes;
        decltype(load_weights<kIsFour>(w, true)) weights[V];
#pragma GCC unroll 16
        for (int j = 0; j < P && word < kLines; ++j) prefetch(panel[j] + line, ahead);
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
          const uint8_t* from = panel[j / kVectors] + line + j % kVectors * 4 * kLanes;
          weights[j] = load_weights<kIsFour>(from, word >= kLines);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          int32_t four = load_as<int32_t>(x.bytes + r * kBlock + 4 * word);
#pragma GCC unroll 16
          for (int j = 0; j < V; ++j) {
            block[r][j] = add_products(weights[j], four, block[r][j]);
            // Adds word by word: else compilers add all words in a tree, and spill.
            keep_in_register(block[r][j]);
          }
        }
      }
      int64_t scales = b / 2 * kPair + 2 * kLines * kLineBytes + half * 2 * kPanel;
      Vec scale[V], minimum[V];
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) {
        const uint8_t* from = panel[j / kVectors] + scales + j % kVectors * 2 * kLanes;
        scale[j] = load_float16(from);
        if constexpr (kIsFour) minimum[j] = load_float16(from + kLineBytes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec of_row = broadcast(x.scales[r]), total = broadcast(x.totals[r]);
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
          IntVec sum = kIsFour ? whole(block[r][j]) : block[r][j];
          acc[r][j] = fma(to_floats(sum), mul(scale[j], of_row), acc[r][j]);
          if constexpr (kIsFour) acc[r][j] = fma(minimum[j], total, acc[r][j]);
        }
      }
    }
  });
}

// Multiplies `size` rows by `count` panels of blocks, as `multiply` in `gemm.h` does.
template <bool kIsFour>
void multiply_bytes(const uint8_t* rows, int64_t size, const uint8_t* w, int64_t count,
                    int64_t pairs, float* sums, int64_t stride, int64_t skipped) {
  with_constant<kGroup>(size, [&](auto group) {
    constexpr int R = decltype(group)::value;
    constexpr int P = byte_panels_beside(R);
    by_panels<P, true>(count, [&](auto panels, int64_t at, bool is_last) {
      const uint8_t* from = w + at * pairs * kPairBytes<kIsFour>;
      byte_tile<kIsFour, R, decltype(panels)::value>(
          rows, from, pairs, sums + at * kPanel, stride, is_last ? skipped : 0);
    });
  });
}

}  // namespace spec_jax
