// Copies rows of a table by their numbers: the embeddings of tokens.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "panels.h"
#include "simd.h"

namespace spec_jax {

// A table [N, D], as it is or as the panels of a product.
template <typename T>
struct Table {
  const T* rows;  // null: use `panels`
  Panels<T> panels;

  void take(int64_t n, T* to) const {
    if (rows == nullptr) return take_row(panels, n, to);
    std::memcpy(static_cast<void*>(to), rows + n * panels.K, panels.K * sizeof(T));
  }
};

// Copies rows `index` of the table to y [live, D]; NaN where there is no such row.
template <typename T>
void take_rows(const Table<T>& table, const int32_t* index, T* y, int64_t live) {
  int64_t D = table.panels.K;
  T nan = round_to<T>(std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = 0; r < live; ++r, y += D) {
    if (index[r] >= 0 && index[r] < table.panels.N) {
      table.take(index[r], y);
    } else {
      std::fill(y, y + D, nan);
    }
  }
}

}  // namespace spec_jax
