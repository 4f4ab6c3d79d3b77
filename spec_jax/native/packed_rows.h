// The active rows as the products read them: one step of k after the other for a whole
// group of rows.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace spec_jax {

constexpr int kStep = 2 * kLanes;                 // elements of k per step
constexpr int64_t kGroup = kLanes == 16 ? 8 : 5;  // rows of a tile, at most
// Of the tiles of more rows than that: four rows make the fastest tile of AVX2.
constexpr int64_t kShare = kLanes == 8 ? 4 : kGroup;

// The last elements of an array, fewer than a step, with zeros after them: nothing past
// its end is read.
template <typename T>
inline void copy_tail(const T* x, int64_t left, T (&step)[kStep]) {
  std::memset(static_cast<void*>(step), 0, sizeof step);
  std::memcpy(static_cast<void*>(step), x, left * sizeof(T));
}

// One step of an array of K elements, zeros after its end.
template <typename T>
inline void load_step(const T* x, int64_t k, int64_t K, Vec& first, Vec& second) {
  T end[kStep];
  const T* from = x + k;
  if (k + kStep > K) {
    copy_tail(from, K - k, end);
    from = end;
  }
  first = load_first(from);
  second = load_second(from);
}

// What rows are packed as for weights of type T: bf16 where products go by pairs of it,
// which loses nothing of a row that is bf16; else float.
#if defined(SPEC_JAX_AVX512BF16)
template <typename T>
using Packed = T;
inline void store_step(bf16* p, Vec even, Vec odd) { store_pairs(p, even, odd); }
#else
template <typename T>
using Packed = float;
#endif
inline void store_step(float* p, Vec first, Vec second) {
  store(p, first);
  store(p + kLanes, second);
}

// Rows in groups of nearly equal size; within one, `[K / kStep, rows, kStep]` of X. (A
// stream of its own for every row would fall on the same lines of the cache.)
template <typename X>
struct PackedRows {
  int64_t rows, K;

  // Room for `rows` rows of K elements.
  PackedRows(int64_t rows, int64_t K)
      : rows(rows), K(K), storage_(rows * padded() + kLineBytes / sizeof(X)) {
    auto address = reinterpret_cast<uintptr_t>(storage_.data());
    data_ = storage_.data() + -address % kLineBytes / sizeof(X);
  }
  PackedRows(PackedRows&&) = default;

  // Rows of the group that begins at row `first`.
  int64_t group_size(int64_t first) const {
    int64_t groups = rows <= kGroup ? 1 : (rows + kShare - 1) / kShare;
    int64_t larger = rows % groups;
    return rows / groups + (first < larger * (rows / groups + 1) ? 1 : 0);
  }
  const X* group(int64_t first) const { return data_ + first * padded(); }

  // Fills row `row` of the group at `first` with what `values(k, first, second)` sets
  // for each step.
  template <typename Values>
  void fill(int64_t first, int64_t row, const Values& values) {
    int64_t size = group_size(first);
    X* to = data_ + first * padded() + row * kStep;
    for (int64_t k = 0; k < K; k += kStep, to += size * kStep) {
      Vec a, b;
      values(k, a, b);
      store_step(to, a, b);
    }
  }

 private:
  static constexpr uintptr_t kLineBytes = 64;  // of the cache
  int64_t padded() const { return (K + kStep - 1) / kStep * kStep; }

  std::vector<X> storage_;
  X* data_;
};

// Calls `body(first, r)` for each row, as row `r` of the group at `first`.
template <typename X, typename Body>
void for_each_row(const PackedRows<X>& packed, const Body& body) {
  for (int64_t first = 0, size; first < packed.rows; first += size) {
    size = packed.group_size(first);
    for (int64_t r = 0; r < size; ++r) body(first, r);
  }
}

// 1 / rms(x)
template <typename T>
float inverse_rms(const T* x, int64_t K, float eps) {
  Vec acc = zero();
  for (int64_t k = 0; k < K; k += kStep) {
    Vec a, b;
    load_step(x, k, K, a, b);
    acc = fma(b, b, fma(a, a, acc));
  }
  return 1.0f / std::sqrt(sum(acc) / static_cast<float>(K) + eps);
}

// round(round(x * scale) * weight): the normalised value is rounded to T before it meets
// its weight.
template <typename T>
inline Vec norm_lanes(Vec x, Vec scale, Vec weight) {
  return round_lanes<T>(mul(round_lanes<T>(mul(x, scale)), weight));
}

// The rows of x [rows, K] for weights of its type; normed unless `norm` is null.
template <typename T>
PackedRows<Packed<T>> pack_rows(const T* x, const T* norm, int64_t rows, int64_t K,
                                float eps) {
  PackedRows<Packed<T>> packed(rows, K);
  for_each_row(packed, [&](int64_t first, int64_t r) {
    const T* row = x + (first + r) * K;
    if (norm == nullptr) {
      return packed.fill(first, r,
                         [&](int64_t k, Vec& a, Vec& b) { load_step(row, k, K, a, b); });
    }
    Vec scale = broadcast(inverse_rms(row, K, eps));
    packed.fill(first, r, [&](int64_t k, Vec& a, Vec& b) {
      Vec u, v;
      load_step(row, k, K, a, b);
      load_step(norm, k, K, u, v);
      a = norm_lanes<T>(a, scale, u);
      b = norm_lanes<T>(b, scale, v);
    });
  });
  return packed;
}

// Row `row` of the whole, x [K] in float, for weights of type T.
template <typename T>
void pack_floats(const float* x, int64_t row, PackedRows<float>& packed) {
  int64_t first = 0;
  while (row >= first + packed.group_size(first)) first += packed.group_size(first);
  packed.fill(first, row - first, [&](int64_t k, Vec& a, Vec& b) {
    float end[kStep], halves[kStep];
    const float* from = x + k;
    if (k + kStep > packed.K) {
      copy_tail(from, packed.K - k, end);
      from = end;
    }
    for (int i = 0; i < kLanes; ++i) {
      // The even ones before the odd ones where weights come in pairs.
      halves[i] = from[sizeof(T) == 2 ? 2 * i : i];
      halves[i + kLanes] = from[sizeof(T) == 2 ? 2 * i + 1 : i + kLanes];
    }
    a = load(halves);
    b = load(halves + kLanes);
  });
}

}  // namespace spec_jax
