// The attention of a layer on the row path: norm, rotate, write to pages, attend.
//
// Work is split over key/value heads, which share nothing. Within one, the live rows
// write first and attend after: a row sees no position past its own.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "norm.h"
#include "parallel.h"
#include "simd.h"

namespace spec_jax {

// Where the rows live.
struct Rows {
  const int32_t* table;  // [S, M]
  const int32_t* slots;  // [R]
  const int32_t* positions;  // [R]
  int64_t num_slots, table_width, num_pages, page_size;
  int64_t live;

  // Whether every page of the row's prefix, its own included, exists.
  bool is_mapped(int64_t r) const {
    int64_t slot = slots[r], position = positions[r];
    if (slot < 0 || slot >= num_slots || position < 0) return false;
    if (position / page_size >= table_width) return false;
    for (int64_t m = 0; m <= position / page_size; ++m) {
      int32_t page = table[slot * table_width + m];
      if (page < 0 || page >= num_pages) return false;
    }
    return true;
  }
};

// What a layer reads and writes.
template <typename T>
struct Layer {
  const T* heads;  // [R, (N + 2K) * H]: queries, keys, values
  const T* q_norm;  // [H]
  const T* k_norm;  // [H]
  const float* cos;  // [R, H / 2]
  const float* sin;  // [R, H / 2]
  T* k;  // [P, C, K, H]
  T* v;  // [P, C, K, H]
  T* out;  // [R, N * H]
  int64_t N, K, H;
  float scale, eps;

  int64_t group() const { return N / K; }
  // Head `head` of row `r`, counted through queries, keys and values.
  const T* head(int64_t r, int64_t head) const {
    return heads + (r * (N + 2 * K) + head) * H;
  }
};

// Norm and rotation of one head: out [H]. `cos` and `sin` are rounded to T by the
// caller, and every product and sum is rounded, as the reference does.
template <typename T>
void rotate(const T* head, const T* norm, const float* cos, const float* sin, int64_t H,
            float eps, float* out) {
  float wide[kMaxHead], normed[kMaxHead];
  for (int64_t h = 0; h < H; ++h) wide[h] = to_float(head[h]);
  rms_norm(wide, norm, H, eps, normed);
  auto round = [](float x) { return to_float(round_to<T>(x)); };
  int64_t half = H / 2;
  for (int64_t h = 0; h < half; ++h) {
    float a = normed[h], b = normed[h + half];
    out[h] = round(round(a * cos[h]) - round(b * sin[h]));
    out[h + half] = round(round(b * cos[h]) + round(a * sin[h]));
  }
}

inline Pages pages_of(const Rows& rows, int64_t r, int64_t kv_head, int64_t K,
                      int64_t H) {
  const int32_t* table = rows.table + rows.slots[r] * rows.table_width;
  return {table, rows.page_size, K * H, kv_head * H};
}

// Stores the keys and values of one head; rows without a page are dropped, as in the
// reference.
template <typename T>
void write_head(const Layer<T>& layer, const Rows& rows, int64_t kv_head) {
  int64_t N = layer.N, K = layer.K, H = layer.H, half = H / 2;
  for (int64_t r = 0; r < rows.live; ++r) {
    if (!rows.is_mapped(r)) continue;
    int64_t at = pages_of(rows, r, kv_head, K, H).at(rows.positions[r]);
    float rotated[kMaxHead];
    rotate(layer.head(r, N + kv_head), layer.k_norm, layer.cos + r * half,
           layer.sin + r * half, H, layer.eps, rotated);
    for (int64_t h = 0; h < H; ++h) layer.k[at + h] = round_to<T>(rotated[h]);
    std::memcpy(layer.v + at, layer.head(r, N + K + kv_head), H * sizeof(T));
  }
}

// Attends the query heads of one key/value head; rows without a page become NaN.
// Scratch: runs [G], q [G, H], result [G, H].
template <typename T>
void attend_head(const Layer<T>& layer, const Rows& rows, int64_t kv_head,
                 Running* runs, float* q, float* result) {
  int64_t G = layer.group(), H = layer.H, half = H / 2;
  for (int64_t r = 0; r < rows.live; ++r) {
    T* to = layer.out + (r * layer.N + kv_head * G) * H;
    if (!rows.is_mapped(r)) {
      T nan = round_to<T>(std::numeric_limits<float>::quiet_NaN());
      for (int64_t i = 0; i < G * H; ++i) to[i] = nan;
      continue;
    }
    for (int64_t g = 0; g < G; ++g) {
      rotate(layer.head(r, kv_head * G + g), layer.q_norm, layer.cos + r * half,
             layer.sin + r * half, H, layer.eps, q + g * H);
    }
    for (int64_t i = 0; i < G * H; ++i) q[i] *= layer.scale;
    attend(q, layer.k, layer.v, pages_of(rows, r, kv_head, layer.K, H),
           rows.positions[r], G, H, runs, result);
    for (int64_t i = 0; i < G * H; ++i) to[i] = round_to<T>(result[i]);
  }
}

// The whole layer. Dead rows of the result, up to `num_rows`, are zero.
template <typename Pool, typename T>
void attend_rows(Pool& pool, const Layer<T>& layer, const Rows& rows,
                 int64_t num_rows) {
  int64_t G = layer.group(), H = layer.H, width = layer.N * H;
  std::vector<Running> runs(layer.N);
  std::vector<float> q(width), result(width);
  parallel_for(pool, layer.K, [&](int64_t kv_head) {
    int64_t first = kv_head * G;
    write_head(layer, rows, kv_head);
    attend_head(layer, rows, kv_head, runs.data() + first, q.data() + first * H,
                result.data() + first * H);
  });
  size_t bytes = (num_rows - rows.live) * width * sizeof(T);
  if (bytes > 0) {
    std::memset(static_cast<void*>(layer.out + rows.live * width), 0, bytes);
  }
}

}  // namespace spec_jax
