// The attention of a layer on the row path: norm, rotate, write to pages, attend.
//
// Work is split over key/value heads, which share nothing. Within one, the active rows
// write first and attend after: a row sees no position past its own.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "packed_rows.h"
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

// n elements as floats, zeros up to whole vectors: `out` has room for them.
template <typename T>
inline void widen(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load_lanes(x + i, n - i));
}

// Norm and rotation of one head: out [H], times `scale`. `cos` and `sin` are rounded to
// T by the caller, and every product and sum is rounded, as the reference does.
template <typename T>
void rotate(const T* head, const float* norm, const float* cos, const float* sin,
            int64_t H, float eps, float scale, float* out) {
  // Loads of a whole vector from the last element of the first half stay inside.
  alignas(64) float x[kMaxHead + kLanes] = {}, low[kMaxHead], high[kMaxHead];
  widen(head, H, x);
  Vec square = zero();
  for (int64_t h = 0; h < H; h += kLanes) square = fma(load(x + h), load(x + h), square);
  float rms = std::sqrt(sum(square) / static_cast<float>(H) + eps);
  Vec inverse = broadcast(1.0f / rms), factor = broadcast(scale);
  for (int64_t h = 0; h < H; h += kLanes) {
    store(x + h, norm_lanes<T>(load(x + h), inverse, load(norm + h)));
  }
  int64_t half = H / 2;
  for (int64_t h = 0; h < half; h += kLanes) {
    Vec a = load(x + h), b = load(x + h + half);
    Vec c = load_lanes(cos + h, half - h), s = load_lanes(sin + h, half - h);
    auto round = [](Vec value) { return round_lanes<T>(value); };
    store(low + h, mul(factor, round(subtract(round(mul(a, c)), round(mul(b, s))))));
    store(high + h, mul(factor, round(add(round(mul(b, c)), round(mul(a, s))))));
  }
  std::copy_n(low, half, out);
  std::copy_n(high, half, out + half);
}

// Active rows of one slot, one after the other, all with their pages.
struct Span {
  int64_t first, count;
};

// The active rows that have pages, in spans of at most `kSpan`: a span shares its reads.
constexpr int64_t kSpan = 16;
inline std::vector<Span> spans(const Rows& rows) {
  std::vector<Span> out;
  for (int64_t r = 0; r < rows.live; ++r) {
    if (!rows.is_mapped(r)) continue;
    bool follows = !out.empty() && out.back().first + out.back().count == r &&
                   rows.slots[r] == rows.slots[r - 1] && out.back().count < kSpan;
    if (follows) {
      ++out.back().count;
    } else {
      out.push_back({r, 1});
    }
  }
  return out;
}

// One key/value head of a layer, and what it works with. (Bodies of a parallel loop
// allocate nothing.)
template <typename T>
struct Head {
  const Layer<T>& layer;
  const Rows& rows;
  const float *q_norm, *k_norm;  // [H], in float
  int64_t index;
  Queries queries;

  // For spans of `most` rows.
  Head(const Layer<T>& layer, const Rows& rows, const float* q_norm,
       const float* k_norm, int64_t index, int64_t most)
      : layer(layer), rows(rows), q_norm(q_norm), k_norm(k_norm), index(index),
        queries(most * layer.group(), layer.H) {}

  Pages pages(const Span& span) const {
    const int32_t* table = rows.table + rows.slots[span.first] * rows.table_width;
    return {table, rows.page_size, layer.K * layer.H, index * layer.H};
  }

  void rotate_row(const T* head, const float* norm, int64_t r, float scale,
                  float* to) const {
    int64_t half = layer.H / 2;
    rotate(head, norm, layer.cos + r * half, layer.sin + r * half, layer.H, layer.eps,
           scale, to);
  }

  // Stores the keys and values of a span.
  void write(const Span& span) const {
    int64_t H = layer.H;
    for (int64_t r = span.first; r < span.first + span.count; ++r) {
      int64_t at = pages(span).at(rows.positions[r]);
      float rotated[kMaxHead + kLanes];  // Whole vectors are read.
      rotate_row(layer.head(r, layer.N + index), k_norm, r, 1.0f, rotated);
      for (int64_t h = 0; h < H; h += kLanes) {
        store_lanes(layer.k + at + h, H - h, load(rotated + h));
      }
      const T* value = layer.head(r, layer.N + layer.K + index);
      std::memcpy(static_cast<void*>(layer.v + at), value, H * sizeof(T));
    }
  }

  // Takes up the queries of a span.
  void begin(const Span& span) {
    int64_t G = layer.group();
    queries.begin(span.count * G);
    for (int64_t i = 0; i < queries.count; ++i) {
      int64_t r = span.first + i / G;
      float q[kMaxHead];
      rotate_row(layer.head(r, index * G + i % G), q_norm, r, layer.scale, q);
      queries.template set<T>(i, q, rows.positions[r] + int64_t{1});
    }
  }

  // Writes what they attended to.
  void end(const Span& span) const {
    int64_t G = layer.group();
    for (int64_t i = 0; i < queries.count; ++i) {
      int64_t head = (span.first + i / G) * layer.N + index * G + i % G;
      queries.finish(i, layer.out + head * layer.H);
    }
  }
};

// A span under heads [begin, end): a block of keys for all of them before the next,
// since their rows lie side by side.
template <typename T>
void attend_span(const Span& span, const Rows& rows, Head<T>* begin, Head<T>* end) {
  int64_t last = 0;
  for (int64_t r = span.first; r < span.first + span.count; ++r) {
    last = std::max(last, rows.positions[r] + int64_t{1});
  }
  for (Head<T>* head = begin; head < end; ++head) head->begin(span);
  for (int64_t start = 0; start < last; start += kKeyBlock) {
    for (Head<T>* head = begin; head < end; ++head) {
      attend_block(head->queries, head->layer.k, head->layer.v, head->pages(span),
                   start, last);
    }
  }
  for (Head<T>* head = begin; head < end; ++head) head->end(span);
}

// The whole layer. Rows without a page become NaN, and are not written, as in the
// reference; padding rows of the result, up to `num_rows`, are zero.
template <typename Pool, typename T>
void attend_rows(Pool& pool, const Layer<T>& layer, const Rows& rows,
                 int64_t num_rows) {
  int64_t width = layer.N * layer.H, K = layer.K, most = 0;
  std::vector<float> q_norm(layer.H + kLanes), k_norm(layer.H + kLanes);
  widen(layer.q_norm, layer.H, q_norm.data());
  widen(layer.k_norm, layer.H, k_norm.data());
  T nan = round_to<T>(std::numeric_limits<float>::quiet_NaN()), none = round_to<T>(0.0f);
  std::fill(layer.out, layer.out + rows.live * width, nan);
  std::fill(layer.out + rows.live * width, layer.out + num_rows * width, none);
  std::vector<Span> all = spans(rows);
  for (const Span& span : all) most = std::max(most, span.count);
  std::vector<Head<T>> heads;
  heads.reserve(K);
  for (int64_t i = 0; i < K; ++i) {
    heads.emplace_back(layer, rows, q_norm.data(), k_norm.data(), i, most);
  }
  int64_t shares = std::clamp<int64_t>(pool.num_threads(), 1, K);
  parallel_for(pool, shares, [&](int64_t i) {
    Head<T>*begin = heads.data() + K * i / shares, *end = heads.data() + K * (i + 1) / shares;
    for (const Span& span : all) {
      for (Head<T>* head = begin; head < end; ++head) head->write(span);
    }
    for (const Span& span : all) attend_span(span, rows, begin, end);
  });
}

}  // namespace spec_jax
