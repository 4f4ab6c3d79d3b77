// Rows for products with weights of eight or four bits: rounded to bytes, in blocks of
// kBlock with a scale each.

#pragma once

#include <cmath>
#include <cstdint>

#include "byte_lanes.h"
#include "panels.h"
#include "simd.h"

namespace spec_jax {

constexpr int64_t kRowBlockBytes = kBlock + 4 + 4 + 4;  // bytes, scale, sum, total

// Counts the blocks of kBlock values in a row of K, rounded up to an even number.
inline int64_t blocks_of(int64_t K) { return 2 * pairs_of(K); }

// One block of a group of rows, ready for products. For each row: its bytes; its scale;
// the number that its sums of products with eight-bit weights begin with; and the
// factor of the minima of four-bit weights, the sum of its bytes times the scale.
struct RowBlock {
  int8_t* bytes;
  float* scales;
  int32_t* sums;
  float* totals;

  RowBlock(const uint8_t* group, int64_t rows, int64_t block) {
    uint8_t* at = const_cast<uint8_t*>(group) + block * rows * kRowBlockBytes;
    bytes = reinterpret_cast<int8_t*>(at);
    scales = reinterpret_cast<float*>(at + rows * kBlock);
    sums = reinterpret_cast<int32_t*>(at + rows * (kBlock + 4));
    totals = reinterpret_cast<float*>(at + rows * (kBlock + 8));
  }
};

// Rounds row `r` of `rows`, x [K], to bytes: a block's largest magnitude becomes 127,
// or 0 if it is 1e-36 at most. A value that is not finite makes the scale NaN.
template <typename T>
void set_row_bytes(const T* x, int64_t K, int64_t r, int64_t rows, uint8_t* group) {
  constexpr int64_t kSteps = kBlock / kLanes;
  for (int64_t b = 0; b < blocks_of(K); ++b) {
    RowBlock to(group, rows, b);
    Vec value[kSteps], largest = zero(), probe = zero();
    for (int64_t i = 0; i < kSteps; ++i) {
      int64_t k = b * kBlock + i * kLanes;
      value[i] = k < K ? load_lanes(x + k, K - k) : zero();
      largest = maximum(largest, maximum(value[i], subtract(zero(), value[i])));
      probe = fma(value[i], zero(), probe);
    }
    float most = largest_lane(largest);
    Vec inverse = broadcast(most > 1e-36f ? 127.0f / most : 0.0f), all = zero();
    for (int64_t i = 0; i < kSteps; ++i) {
      // Rounds to nearest, ties to even, and leaves the integer in the low bits.
      Vec shifted = add(mul(value[i], inverse), broadcast(12582912.0f));
      store_low_bytes(to.bytes + r * kBlock + i * kLanes, shifted);
      all = add(all, subtract(shifted, broadcast(12582912.0f)));
    }
    float total = sum(all), scale = most / 127.0f + sum(probe);
    to.scales[r] = scale;
    to.totals[r] = total * scale;
    // Where the scale is NaN any number will do, but converting NaN is undefined.
    bool is_sum = std::abs(total) <= 127.0f * kBlock;
    to.sums[r] = is_sum ? static_cast<int32_t>(-128.0f * total) : 0;
  }
}

}  // namespace spec_jax
