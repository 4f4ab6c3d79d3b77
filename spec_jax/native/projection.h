// Projections of the live rows: an optional norm before, a residual or a gate after.
//
// Work is split over weight rows, never over the dimension that is summed, so that no
// result depends on the number of threads. Values are rounded to the model's dtype
// where the reference form of the op rounds, and nowhere else.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gemm.h"
#include "norm.h"
#include "parallel.h"
#include "simd.h"

namespace spec_jax {

// The live rows as the products read them: normed (unless `norm` is null) and packed.
template <typename T>
std::vector<float> pack_rows(const T* x, const T* norm, int64_t rows, int64_t K,
                             float eps) {
  std::vector<float> packed(rows * padded(K));
  std::vector<float> row(K), normed(K);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < K; ++k) row[k] = to_float(x[r * K + k]);
    if (norm != nullptr) rms_norm(row.data(), norm, K, eps, normed.data());
    const auto& from = norm != nullptr ? normed : row;
    pack_row<T>(from.data(), K, packed.data() + r * padded(K));
  }
  return packed;
}

// Weight rows that one thread takes at a time: enough to be worth taking, few enough
// that the threads finish together. It decides no bits.
inline int64_t chunk_size(int64_t row_bytes) {
  int64_t rows = 64 * 1024 / std::max<int64_t>(row_bytes, 1);
  return std::max<int64_t>((rows + 7) / 8 * 8, 8);
}

// Calls `body(n0, n1)` for pieces of [0, N), on the threads of the pool.
template <typename Pool, typename Body>
void over_columns(Pool& pool, int64_t N, int64_t row_bytes, const Body& body) {
  int64_t chunk = chunk_size(row_bytes);
  parallel_for(pool, (N + chunk - 1) / chunk, [&](int64_t i) {
    body(i * chunk, std::min((i + 1) * chunk, N));
  });
}

// Rows from `live` on, as zeros.
template <typename T>
void clear_dead(T* y, int64_t rows, int64_t live, int64_t width) {
  size_t bytes = (rows - live) * width * sizeof(T);
  if (bytes > 0) std::memset(static_cast<void*>(y + live * width), 0, bytes);
}

// y [rows, N] = residual + round(norm(x) w^T); `norm` and `residual` may be null.
template <typename Pool, typename T, typename Out>
void project(Pool& pool, const T* x, const T* norm, const T* w, const T* residual,
             Out* y, int64_t rows, int64_t live, int64_t K, int64_t N, float eps) {
  std::vector<float> packed = pack_rows(x, norm, live, K, eps);
  std::vector<float> sums(live * N);
  over_columns(pool, N, K * sizeof(T), [&](int64_t n0, int64_t n1) {
    product(live, packed.data(), w + n0 * K, K, n1 - n0, sums.data() + n0, N);
    for (int64_t r = 0; r < live; ++r) {
      for (int64_t i = r * N + n0; i < r * N + n1; ++i) {
        float acc = sums[i];
        if (residual != nullptr) {
          acc = to_float(residual[i]) + to_float(round_to<T>(acc));
        }
        y[i] = round_to<Out>(acc);
      }
    }
  });
  clear_dead(y, rows, live, N);
}

// y [rows, F] = swiglu(round(norm(x) w^T)); the gate's weights are the first F rows.
template <typename Pool, typename T>
void gate(Pool& pool, const T* x, const T* norm, const T* w, T* y, int64_t rows,
          int64_t live, int64_t K, int64_t F, float eps) {
  std::vector<float> packed = pack_rows(x, norm, live, K, eps);
  std::vector<float> gates(live * F), ups(live * F);
  over_columns(pool, F, 2 * K * sizeof(T), [&](int64_t f0, int64_t f1) {
    int64_t width = f1 - f0;
    product(live, packed.data(), w + f0 * K, K, width, gates.data() + f0, F);
    product(live, packed.data(), w + (F + f0) * K, K, width, ups.data() + f0, F);
    for (int64_t r = 0; r < live; ++r) {
      for (int64_t i = r * F + f0; i < r * F + f1; ++i) {
        float g = to_float(round_to<T>(gates[i])), up = to_float(round_to<T>(ups[i]));
        float silu = to_float(round_to<T>(g / (1.0f + exp(-g))));
        y[i] = round_to<T>(silu * up);
      }
    }
  });
  clear_dead(y, rows, live, F);
}

}  // namespace spec_jax
