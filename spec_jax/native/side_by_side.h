// The active rows as the products read them: word after word of k, for a group of rows
// side by side.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "panels.h"
#include "scratch.h"
#include "simd.h"

namespace spec_jax {

// The lanes at `value`, or zeros after its end.
template <typename T>
inline Vec load_lanes(const T* value, int64_t left) {
  if (left >= kLanes) return load(value);
  T copy[kLanes];
  std::memset(static_cast<void*>(copy), 0, sizeof copy);
  std::memcpy(static_cast<void*>(copy), value, left * sizeof(T));
  return load(copy);
}

// Rounds the lanes to T, and stores those before its end.
template <typename T>
inline void store_lanes(T* to, int64_t left, Vec lanes) {
  if (left >= kLanes) return store(to, lanes);
  T copy[kLanes];
  store(copy, lanes);
  std::memcpy(static_cast<void*>(to), copy, left * sizeof(T));
}

// Rows of K elements for weights of type T, in groups of nearly equal size; within one,
// [words, rows of the group, kWord].
template <typename T>
class SideBySide {
 public:
  // Room for `most` rows of `most_k` elements, of which none is used yet.
  SideBySide(int64_t most, int64_t most_k) : data_(most * words_of<T>(most_k) * kWord<T>) {}

  // Begins with `rows` rows of K elements; each is then set.
  void begin(int64_t rows, int64_t K) {
    rows_ = rows;
    K_ = K;
  }

  int64_t words() const { return words_of<T>(K_); }

  // Rows of the group that begins at row `first`.
  int64_t group_size(int64_t first) const {
    int64_t groups = (rows_ + kGroup - 1) / kGroup, larger = rows_ % groups;
    return rows_ / groups + (first < larger * (rows_ / groups + 1) ? 1 : 0);
  }
  const Row<T>* group(int64_t first) const {
    return data_.data() + first * words() * kWord<T>;
  }

  // Sets row `row` of the group at `first` to x [K], which T can hold.
  void set(int64_t first, int64_t row, const T* x) {
    constexpr int64_t kSize = kWord<T>;
    int64_t step = group_size(first) * kSize, whole = K_ / kSize;
    Row<T>* to = data_.data() + first * words() * kSize + row * kSize;
    for (int64_t k = 0; k < whole; ++k, to += step) {
      if constexpr (sizeof(Row<T>) == sizeof(T)) {
        std::memcpy(static_cast<void*>(to), x + k * kSize, kSize * sizeof(T));
      } else {
        for (int64_t i = 0; i < kSize; ++i) to[i] = row_of(x[k * kSize + i]);
      }
    }
    if (whole < words()) {
      to[0] = row_of(x[whole * kSize]);
      to[kSize - 1] = row_of(T{});
    }
  }

  // Calls `body(first, size)` for each group.
  template <typename Body>
  void for_each_group(const Body& body) const {
    for (int64_t first = 0, size; first < rows_; first += size) {
      size = group_size(first);
      body(first, size);
    }
  }

 private:
  static Row<T> row_of(T x) {
    if constexpr (sizeof(Row<T>) == sizeof(T)) return x;
    else return to_float(x);
  }

  Scratch<Row<T>> data_;
  int64_t rows_ = 0, K_ = 0;
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

// The rows of x [rows, K], normed unless `norm` is null, with `scratch` for one of them.
template <typename T>
void set_rows(const T* x, const T* norm, int64_t rows, int64_t K, float eps, T* scratch,
              SideBySide<T>& out) {
  out.begin(rows, K);
  out.for_each_group([&](int64_t first, int64_t size) {
    for (int64_t r = 0; r < size; ++r) {
      const T* row = x + (first + r) * K;
      if (norm != nullptr) {
        norm_row(row, norm, K, eps, scratch);
        row = scratch;
      }
      out.set(first, r, row);
    }
  });
}

}  // namespace spec_jax
