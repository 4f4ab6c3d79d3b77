// Projections of the active rows: an optional norm before, a residual or a gate after.
//
// Work is split over weight rows, never over the dimension that is summed, so that no
// result depends on the number of threads. Values are rounded to the model's dtype
// where the reference form of the op rounds, and nowhere else.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "packed_rows.h"
#include "parallel.h"
#include "simd.h"

namespace spec_jax {

// Weight rows of a panel: as many as the second cache holds beside the next panel,
// which is asked for meanwhile. It decides no bits.
inline int64_t panel_width(int64_t row_bytes) {
  return kPanel * row_bytes <= 64 * 1024 ? kPanel : kPanel / 2;
}

template <typename T>
inline void copy(const T* from, int64_t count, T* to) {
  std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
}

// Rows from `live` on, as zeros.
template <typename T>
void clear_padding(T* y, int64_t rows, int64_t live, int64_t width) {
  size_t bytes = (rows - live) * width * sizeof(T);
  if (bytes > 0) std::memset(static_cast<void*>(y + live * width), 0, bytes);
}

// Calls `body(first, size, n, width)` for each group of the active rows and each panel of
// [0, N), on the threads of the pool: groups innermost, so that all find the weights in
// a cache.
template <typename Pool, typename X, typename Body>
void over_panels(Pool& pool, const PackedRows<X>& x, int64_t N, int64_t row_bytes,
                 const Body& body) {
  int64_t whole = panel_width(row_bytes);
  parallel_for(pool, (N + whole - 1) / whole, [&](int64_t i) {
    int64_t n = i * whole, width = std::min(whole, N - n), size;
    for (int64_t first = 0; first < x.rows; first += size) {
      size = x.group_size(first);
      body(first, size, n, width);
    }
  });
}

// y [rows, N] = residual + round(norm(x) w^T); `norm` and `residual` may be null.
template <typename Pool, typename T, typename Out>
void project(Pool& pool, const T* x, const T* norm, const T* w, const T* residual,
             Out* y, int64_t rows, int64_t live, int64_t K, int64_t N, float eps) {
  PackedRows<Packed<T>> packed = pack_rows(x, norm, live, K, eps);
  auto panel = [&](int64_t first, int64_t size, int64_t n, int64_t width) {
    alignas(64) float acc[kGroup * kPanel] = {};
    multiply(packed, first, w + n * K, K, width, n + width < N, acc);
    for (int64_t r = 0; r < size; ++r) {
      int64_t at = (first + r) * N + n;
      alignas(64) T kept[kPanel] = {};
      alignas(64) Out out[kPanel];
      if (residual != nullptr) copy(residual + at, width, kept);
      for (int64_t j = 0; j < kPanel; j += kLanes) {
        Vec value = load(acc + r * kPanel + j);
        if (residual != nullptr) value = add(load(kept + j), round_lanes<T>(value));
        store(out + j, value);
      }
      copy(out, width, y + at);
    }
  };
  over_panels(pool, packed, N, K * sizeof(T), panel);
  clear_padding(y, rows, live, N);
}

// y [rows, F] = swiglu(round(norm(x) w^T)); the gate's weights are the first F rows.
template <typename Pool, typename T>
void gate(Pool& pool, const T* x, const T* norm, const T* w, T* y, int64_t rows,
          int64_t live, int64_t K, int64_t F, float eps) {
  PackedRows<Packed<T>> packed = pack_rows(x, norm, live, K, eps);
  auto panel = [&](int64_t first, int64_t size, int64_t f, int64_t width) {
    alignas(64) float gates[kGroup * kPanel] = {}, ups[kGroup * kPanel] = {};
    bool more = f + width < F;
    multiply(packed, first, w + f * K, K, width, more, gates);
    multiply(packed, first, w + (F + f) * K, K, width, more, ups);
    for (int64_t r = 0; r < size; ++r) {
      alignas(64) T out[kPanel];
      for (int64_t j = 0; j < kPanel; j += kLanes) {
        Vec g = round_lanes<T>(load(gates + r * kPanel + j));
        Vec up = round_lanes<T>(load(ups + r * kPanel + j));
        Vec silu = divide(g, add(broadcast(1.0f), exp(subtract(zero(), g))));
        store(out + j, mul(round_lanes<T>(silu), up));
      }
      copy(out, width, y + (first + r) * F + f);
    }
  };
  over_panels(pool, packed, F, K * sizeof(T), panel);
  clear_padding(y, rows, live, F);
}

}  // namespace spec_jax
