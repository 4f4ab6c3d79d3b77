// Rows of a table, by their numbers: the embeddings of tokens.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace spec_jax {

// y [rows, D] of table [entries, D]; NaN where there is no such entry, and zero for rows
// from `live` on.
template <typename T>
void take_rows(const T* table, const int32_t* index, T* y, int64_t rows, int64_t live,
               int64_t entries, int64_t D) {
  for (int64_t r = 0; r < rows; ++r, y += D) {
    if (r < live && index[r] >= 0 && index[r] < entries) {
      std::memcpy(static_cast<void*>(y), table + index[r] * D, D * sizeof(T));
    } else {
      float value = r < live ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      std::fill(y, y + D, round_to<T>(value));
    }
  }
}

}  // namespace spec_jax
