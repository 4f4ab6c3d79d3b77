// Attention of a span of queries over the pages of one slot.
//
// Keys go in blocks of kKeyBlock absolute positions, walked in order with a running
// softmax. A query's sums see its own keys only, one after the other in the order of
// their positions, so they do not depend on other queries, on physical pages or on the
// width of the table. Queries share what is read: each key and each value is loaded
// once for several of them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "packed_rows.h"
#include "simd.h"

namespace spec_jax {

constexpr int kKeyBlock = 32;
constexpr int kMaxHead = 256;  // floats of a head, at most; checked by the caller
constexpr float kLowest = -std::numeric_limits<float>::infinity();

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

// One key/value head of one slot.
struct Pages {
  const int32_t* table;  // [M]
  int64_t page_size;     // C
  int64_t row_stride;    // K * H
  int64_t head_offset;   // of the head within a row

  int64_t at(int64_t position) const {
    int64_t page = table[position / page_size];
    return (page * page_size + position % page_size) * row_stride + head_offset;
  }

  // Of `count` positions from `start`, without a division for each.
  void all(int64_t start, int64_t count, int64_t* offsets) const {
    int64_t left = 0, next = 0;
    for (int64_t t = 0; t < count; ++t, --left, next += row_stride) {
      if (left == 0) {
        next = at(start + t);
        left = page_size - (start + t) % page_size;
      }
      offsets[t] = next;
    }
  }
};

// Queries of one key/value head and one slot, and their running softmax.
struct Queries {
  int64_t count, H;
  PackedRows<float> packed;      // [count, H], scaled
  std::vector<int64_t> ends;     // [count]: keys 0 .. end - 1 are seen
  std::vector<float> maximum, total;
  std::vector<float> weighted;   // [count, width()]
  std::vector<float> scores;     // [count, kKeyBlock], and then probabilities
  std::vector<float> rescale;    // [count]: what a block does to the sums before it

  // Room for `most` queries.
  Queries(int64_t most, int64_t H)
      : count(0), H(H), packed(most, H), ends(most), maximum(most), total(most),
        weighted(most * width()), scores(most * kKeyBlock), rescale(most) {}

  int64_t width() const { return (H + kLanes - 1) / kLanes * kLanes; }

  // Begins with `n` queries; each is then set.
  void begin(int64_t n) {
    count = packed.rows = n;
    std::fill_n(maximum.begin(), n, kLowest);
    std::fill_n(total.begin(), n, 0.0f);
    std::fill_n(weighted.begin(), n * width(), 0.0f);
  }

  // Query `i` is q [H] and sees keys 0 .. end - 1, which are of type T.
  template <typename T>
  void set(int64_t i, const float* q, int64_t end) {
    pack_floats<T>(q, i, packed);
    ends[i] = end;
  }

  // What query `i` has attended to: out [H].
  template <typename T>
  void finish(int64_t i, T* out) const {
    const float* sums = weighted.data() + i * width();
    Vec all = broadcast(total[i]);
    for (int64_t h = 0; h < H; h += kLanes) {
      store_lanes(out + h, H - h, divide(load(sums + h), all));
    }
  }
};

// Asks memory for the keys and values of a block: rows of a head are short and far
// apart, which no processor foresees.
template <typename T>
void fetch_block(const T* k, const T* v, const Pages& pages, int64_t start,
                 int64_t last, int64_t H) {
  int64_t line = 64 / sizeof(T), keys = std::min<int64_t>(kKeyBlock, last - start);
  int64_t offsets[kKeyBlock];
  pages.all(start, keys, offsets);
  for (int64_t t = 0; t < keys; ++t) {
    for (int64_t h = 0; h < H; h += line) {
      prefetch(k + offsets[t] + h, 0);
      prefetch(v + offsets[t] + h, 0);
    }
  }
}

// Scores of every query with `keys` keys from `start`. Those past a query's end are
// unused: such a key may hold anything.
template <typename T>
void score_block(Queries& queries, const T* k, const Pages& pages, int64_t start,
                 int64_t keys) {
  for (int64_t t = 0, width; t < keys; t += width) {
    int64_t left = pages.page_size - (start + t) % pages.page_size;
    width = std::min({keys - t, left, kPanel});
    const T* key = k + pages.at(start + t);
    for (int64_t first = 0, size; first < queries.count; first += size) {
      size = queries.packed.group_size(first);
      float out[kGroup * kPanel];
      multiply(queries.packed, first, key, pages.row_stride, width, false, out);
      for (int64_t r = 0; r < size; ++r) {
        float* to = queries.scores.data() + (first + r) * kKeyBlock + t;
        std::copy_n(out + r * kPanel, width, to);
      }
    }
  }
}

// Scores become probabilities under the running maxima, for R queries from `i`; `seen[r]`
// of the block's keys are theirs. Each query's probabilities are summed one key after
// the other: a chain of additions, so several queries go side by side.
template <int R>
inline void weigh_block(Queries& queries, int64_t i, const int64_t* seen) {
  float* scores = queries.scores.data() + i * kKeyBlock;
  float shift[R], drop[kLanes] = {}, total[R];
  for (int r = 0; r < R; ++r) {
    float* own = scores + r * kKeyBlock;
    std::fill(own + seen[r], own + kKeyBlock, kLowest);
    Vec largest = broadcast(queries.maximum[i + r]);
    for (int t = 0; t < kKeyBlock; t += kLanes) largest = maximum(load(own + t), largest);
    float lanes[kLanes];
    store(lanes, largest);
    float maximum = *std::max_element(lanes, lanes + kLanes);
    // While nothing but -inf was seen, shifting by it would make NaN of the zeros. A
    // score that is NaN, or inf - inf, makes its probability NaN, and so the sums.
    shift[r] = maximum == kLowest ? 0.0f : maximum;
    drop[r] = queries.maximum[i + r] - shift[r];
    queries.maximum[i + r] = maximum;
  }
  store(drop, exp(load(drop)));
  for (int r = 0; r < R; ++r) {
    float* own = scores + r * kKeyBlock;
    for (int t = 0; t < kKeyBlock; t += kLanes) {
      store(own + t, exp(subtract(load(own + t), broadcast(shift[r]))));
    }
    queries.rescale[i + r] = drop[r];
    total[r] = queries.total[i + r] * drop[r];
  }
  // As far as any of them sees: what is not seen adds zeros.
  int64_t most = *std::max_element(seen, seen + R);
  for (int64_t t = 0; t < most; ++t) {
    for (int r = 0; r < R; ++r) total[r] += scores[r * kKeyBlock + t];
  }
  for (int r = 0; r < R; ++r) queries.total[i + r] = total[r];
}

// sums[r][j] += p[r][t] * value[t][j] for t in [t0, t1) in order: R queries from `i`,
// V vectors from element `h`.
template <int R, int V, typename T>
inline void add_values(Queries& queries, int64_t i, int64_t h, const T* v,
                       const int64_t* offsets, int64_t t0, int64_t t1) {
  Vec acc[R][V];
  float* sums = queries.weighted.data() + i * queries.width() + h;
  const float* probs = queries.scores.data() + i * kKeyBlock;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    // A rescaling belongs to the first key.
    Vec scale = broadcast(t0 == 0 ? queries.rescale[i + r] : 1.0f);
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      acc[r][j] = mul(load(sums + r * queries.width() + j * kLanes), scale);
    }
  }
  for (int64_t t = t0; t < t1; ++t) {
    Vec value[V];
    const T* from = v + offsets[t] + h;
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      value[j] = V > 1 ? load(from + j * kLanes) : load_lanes(from, queries.H - h);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec weight = broadcast(probs[r * kKeyBlock + t]);
#pragma GCC unroll 16
      for (int j = 0; j < V; ++j) acc[r][j] = fma(weight, value[j], acc[r][j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      store(sums + r * queries.width() + j * kLanes, acc[r][j]);
    }
  }
}

// The values of a block for R queries from `i`; `seen[r]` of its keys are theirs. What
// all see is added for all, and the rest for each.
template <int R, typename T>
void add_block(Queries& queries, int64_t i, const int64_t* seen, const T* v,
               const int64_t* offsets) {
  constexpr int V = R <= 2 ? 4 : 2;
  int64_t all = *std::min_element(seen, seen + R);
  auto run = [&](auto count, int64_t first, int64_t t0, int64_t t1) {
    constexpr int kCount = decltype(count)::value;
    int64_t h = 0;
    for (; h + V * kLanes <= queries.H; h += V * kLanes) {
      add_values<kCount, V>(queries, first, h, v, offsets, t0, t1);
    }
    for (; h < queries.H; h += kLanes) {
      add_values<kCount, 1>(queries, first, h, v, offsets, t0, t1);
    }
  };
  if (all > 0) run(std::integral_constant<int, R>(), i, 0, all);
  for (int r = 0; r < R; ++r) {
    if (seen[r] > all) run(std::integral_constant<int, 1>(), i + r, all, seen[r]);
  }
}

// One block of keys, from `start`, of the `last` that some query sees.
template <typename T>
void attend_block(Queries& queries, const T* k, const T* v, const Pages& pages,
                  int64_t start, int64_t last) {
  int64_t count = queries.count, keys = std::min<int64_t>(kKeyBlock, last - start);
  int64_t offsets[kKeyBlock];
  pages.all(start, keys, offsets);
  score_block(queries, k, pages, start, keys);
  fetch_block(k, v, pages, start + kKeyBlock, last, queries.H);
  auto run = [&](auto size, int64_t i) {
    constexpr int R = decltype(size)::value;
    int64_t seen[R];
    for (int r = 0; r < R; ++r) {
      seen[r] = std::clamp<int64_t>(queries.ends[i + r] - start, 0, keys);
    }
    weigh_block<R>(queries, i, seen);
    add_block<R>(queries, i, seen, v, offsets);
  };
  // Five by two vectors of a value is the largest tile of 16 registers.
  for (int64_t i = 0; i < count; i += 5) {
    switch (std::min<int64_t>(count - i, 5)) {
      case 1: run(std::integral_constant<int, 1>(), i); break;
      case 2: run(std::integral_constant<int, 2>(), i); break;
      case 3: run(std::integral_constant<int, 3>(), i); break;
      case 4: run(std::integral_constant<int, 4>(), i); break;
      case 5: run(std::integral_constant<int, 5>(), i); break;
    }
  }
}

}  // namespace spec_jax
