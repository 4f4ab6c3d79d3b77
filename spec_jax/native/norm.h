// RMSNorm of one row.

#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace spec_jax {

// out = round(round(x / rms(x)) * weight): the normalised value is rounded to T before
// it meets its weight.
template <typename T>
void rms_norm(const float* x, const T* weight, int64_t size, float eps, float* out) {
  Vec acc = zero();
  int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) acc = fma(load(x + i), load(x + i), acc);
  float square = sum(acc);
  for (int64_t i = whole; i < size; ++i) square = square + x[i] * x[i];
  float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) {
    float normed = to_float(round_to<T>(x[i] * scale));
    out[i] = to_float(round_to<T>(normed * to_float(weight[i])));
  }
}

}  // namespace spec_jax
