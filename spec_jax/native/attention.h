// Attention of one row over the pages of its slot.
//
// Keys go in blocks of kKeyBlock absolute positions, walked in order with a running
// softmax. A row's sums see its own keys only, in the order of their positions, so
// they do not depend on other rows, on physical pages or on the width of the table.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace spec_jax {

constexpr int kKeyBlock = 32;
constexpr int kMaxHead = 256;  // floats of a head, at most; checked by the caller

struct Pages {
  const int32_t* table;  // of one slot, [M]
  int64_t page_size;     // C
  int64_t row_stride;    // K * H
  int64_t head_offset;   // of the key/value head within a row

  int64_t at(int64_t position) const {
    int64_t page = table[position / page_size];
    return (page * page_size + position % page_size) * row_stride + head_offset;
  }
};

// Running softmax of one query head.
struct Running {
  float maximum = -std::numeric_limits<float>::infinity();
  float total = 0.0f;
  float weighted[kMaxHead];
};

template <typename T>
inline float dot(const float* q, const T* k, int64_t H) {
  Vec acc = zero();
  int64_t whole = H / kLanes * kLanes;
  for (int64_t h = 0; h < whole; h += kLanes) acc = fma(load(q + h), load(k + h), acc);
  float out = sum(acc);
  for (int64_t h = whole; h < H; ++h) out = out + q[h] * to_float(k[h]);
  return out;
}

// weighted = weighted * scale + p * v
template <typename T>
inline void accumulate(float* weighted, float scale, float p, const T* v, int64_t H) {
  Vec s = broadcast(scale), weight = broadcast(p);
  int64_t whole = H / kLanes * kLanes;
  for (int64_t h = 0; h < whole; h += kLanes) {
    store(weighted + h, fma(weight, load(v + h), mul(load(weighted + h), s)));
  }
  for (int64_t h = whole; h < H; ++h) {
    weighted[h] = weighted[h] * scale + p * to_float(v[h]);
  }
}

// One block of `count` keys from position `start`, for one query head.
template <typename T>
inline void attend_block(Running& run, const float* q, const T* k, const T* v,
                         const int64_t* offsets, int count, int64_t H) {
  float scores[kKeyBlock] = {};
  float maximum = run.maximum;
  for (int t = 0; t < count; ++t) {
    scores[t] = dot(q, k + offsets[t], H);
    if (scores[t] > maximum) maximum = scores[t];
  }
  // While nothing but -inf was seen, shifting by it would make NaN of the zeros. A
  // score that is NaN, or inf - inf, makes its probability NaN, and so the sums.
  float shift = maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum;
  float probs[kKeyBlock];
  for (int t = 0; t < kKeyBlock; t += kLanes) {
    store(probs + t, exp(add(load(scores + t), broadcast(-shift))));
  }
  float scale = exp(run.maximum - shift);
  float total = run.total * scale;
  for (int t = 0; t < count; ++t) {
    total += probs[t];
    accumulate(run.weighted, t == 0 ? scale : 1.0f, probs[t], v + offsets[t], H);
  }
  run.total = total;
  run.maximum = maximum;
}

// All query heads of one key/value head of one row at `position`:
// q [G, H] (scaled), out [G, H].
template <typename T>
inline void attend(const float* q, const T* k, const T* v, const Pages& pages,
                   int64_t position, int64_t G, int64_t H, Running* runs, float* out) {
  for (int64_t g = 0; g < G; ++g) {
    runs[g].maximum = -std::numeric_limits<float>::infinity();
    runs[g].total = 0.0f;
    for (int64_t h = 0; h < H; ++h) runs[g].weighted[h] = 0.0f;
  }
  for (int64_t start = 0; start <= position; start += kKeyBlock) {
    int64_t end = std::min<int64_t>(start + kKeyBlock, position + 1);
    int count = static_cast<int>(end - start);
    int64_t offsets[kKeyBlock];
    for (int t = 0; t < count; ++t) offsets[t] = pages.at(start + t);
    for (int64_t g = 0; g < G; ++g) {
      attend_block(runs[g], q + g * H, k, v, offsets, count, H);
    }
  }
  for (int64_t g = 0; g < G; ++g) {
    const Running& run = runs[g];
    for (int64_t h = 0; h < H; ++h) out[g * H + h] = run.weighted[h] / run.total;
  }
}

}  // namespace spec_jax
