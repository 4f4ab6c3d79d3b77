// The active rows as the products read them: word after word of k, for a group of rows
// side by side.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "byte_rows.h"
#include "gemm.h"
#include "interleave.h"
#include "panels.h"
#include "scratch.h"
#include "simd.h"

namespace spec_jax {

// Rows of K elements for weights of type T, in groups of nearly equal size, each a
// `RowGroup`. For weights of eight bits, bytes as in `byte_rows.h`.
template <typename T>
class SideBySide {
 public:
  // Room for `most` rows of `most_k` elements, of which none is used yet.
  SideBySide(int64_t most, int64_t most_k)
      : room_(most * std::max<int64_t>(row_bytes(most_k), blocks_of(most_k) * kRowBlockBytes)) {}

  // Begins with `rows` rows of K elements; each group is then set.
  void begin(int64_t rows, int64_t K, bool is_bytes = false) {
    rows_ = rows;
    K_ = K;
    is_bytes_ = is_bytes;
  }

  int64_t words() const { return words_of<T>(K_); }

  int64_t num_groups() const {
    int64_t most = is_bytes_ ? kGroup : kMostRows<T>;
    return (rows_ + most - 1) / most;
  }
  // The first row of group `i`.
  int64_t first_of(int64_t i) const {
    int64_t groups = num_groups();
    return i * (rows_ / groups) + std::min(i, rows_ % groups);
  }

  // The `size` rows from `first` on, which are a group.
  RowGroup<T> group(int64_t first, int64_t size) const {
    const uint8_t* words = room_.data() + first * row_bytes(K_);
    return {reinterpret_cast<const Row<T>*>(words), size};
  }
  const uint8_t* group_of_bytes(int64_t first) const {
    return room_.data() + first * blocks_of(K_) * kRowBlockBytes;
  }

  // Sets the `size` rows of the group at `first`, each x[r] [K], which T can hold.
  void set(int64_t first, int64_t size, const T* const* x) {
    if (!is_bytes_) {
      return interleave(x, size, K_, const_cast<Row<T>*>(group(first, size).words));
    }
    uint8_t* to = const_cast<uint8_t*>(group_of_bytes(first));
    for (int64_t r = 0; r < size; ++r) set_row_bytes(x[r], K_, r, size, to);
  }

  // Calls `body(first, size)` for each group.
  template <typename Body>
  void for_each_group(const Body& body) const {
    for (int64_t i = 0, end = num_groups(); i < end; ++i) {
      body(first_of(i), first_of(i + 1) - first_of(i));
    }
  }

 private:
  static constexpr int64_t row_bytes(int64_t K) {
    return row_words<T>(K) * kWord<T> * int64_t{sizeof(Row<T>)};
  }

  Scratch<uint8_t> room_;
  int64_t rows_ = 0, K_ = 0;
  bool is_bytes_ = false;
};

// 1 / rms(x)
template <typename T>
float inverse_rms(const T* x, int64_t K, float eps) {
  Vec acc = zero();
  for (int64_t k = 0; k < K; k += kLanes) {
    Vec value = load_lanes(x + k, K - k);
    acc = fma(value, value, acc);
  }
  return 1.0f / std::sqrt(sum(acc) / static_cast<float>(K) + eps);
}

// round(round(x * scale) * weight): the normalised value is rounded to T before it meets
// its weight.
template <typename T>
inline Vec norm_lanes(Vec x, Vec scale, Vec weight) {
  return round_lanes<T>(mul(round_lanes<T>(mul(x, scale)), weight));
}

// y [K] = norm(x).
template <typename T>
void norm_row(const T* x, const T* norm, int64_t K, float eps, T* y) {
  Vec scale = broadcast(inverse_rms(x, K, eps));
  for (int64_t k = 0; k < K; k += kLanes) {
    Vec value = load_lanes(x + k, K - k), weight = load_lanes(norm + k, K - k);
    store_lanes(y + k, K - k, norm_lanes<T>(value, scale, weight));
  }
}

// The rows x [rows, K] of a product, and the RMSNorm that comes first, unless it is null.
template <typename T>
struct Input {
  const T* x;
  const T* norm;
  float eps;
  int64_t rows;
};

// Sets group `i` of `out` to the rows of a product, normed with `scratch` for a group.
template <typename T>
void set_group(const Input<T>& input, int64_t K, int64_t i, T* scratch,
               SideBySide<T>& out) {
  int64_t first = out.first_of(i), size = out.first_of(i + 1) - first;
  const T* group[kMostRows<T>];
  for (int64_t r = 0; r < size; ++r) {
    group[r] = input.x + (first + r) * K;
    if (input.norm != nullptr) {
      norm_row(group[r], input.norm, K, input.eps, scratch + r * K);
      group[r] = scratch + r * K;
    }
  }
  out.set(first, size, group);
}

}  // namespace spec_jax
