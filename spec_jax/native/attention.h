// Attention of a span of queries over the pages of one slot.
//
// Keys go in blocks of kKeyBlock absolute positions, walked in order with a running
// softmax. The keys of a block are turned into panels, so that a score is a product as
// any other (gemm.h); the probabilities are added to totals, one in each lane; and the
// weighted values to a query's sums, in the order of their positions. Every kRange
// positions another softmax begins, and the ranges' are combined in their order:
// several threads can walk one long text. So a query's result depends only on the keys
// that it sees, and not on other queries, on physical pages, on the width of the table
// or on the number of threads. Queries share what is read: each key is turned, and each
// value loaded, once for several of them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "gemm.h"
#include "pages.h"
#include "panels.h"
#include "side_by_side.h"
#include "simd.h"

namespace spec_jax {

constexpr int64_t kRange = 1024;  // keys, whole blocks of them
constexpr int kMaxHead = 256;  // elements of a head, at most; callers check it
constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kPlaces[kKeyBlock] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                      11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                      22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// Running softmaxes. Each has its largest score `m`, the sum of exp(score - m), and the
// sum of exp(score - m) * value.
template <typename T>
struct Sums {
  int64_t H;
  Scratch<float> maximum;   // [most]
  Scratch<float> total;     // [most, kLanes]
  Scratch<float> weighted;  // [most, width()]

  // Makes room for `most` softmaxes.
  Sums(int64_t most, int64_t H)
      : H(H), maximum(most), total(most * kLanes), weighted(most * width()) {}

  // Counts a sum's floats: whole vectors, of bf16 the even elements before the odd.
  int64_t width() const {
    constexpr int64_t kStep = kLanes * kWord<T>;
    return (H + kStep - 1) / kStep * kStep;
  }

  // Resets the first `n`: they have seen no key.
  void clear(int64_t n) {
    std::fill_n(maximum.begin(), n, kLowest);
    std::fill_n(total.begin(), n * kLanes, 0.0f);
    std::fill_n(weighted.begin(), n * width(), 0.0f);
  }

  // Copies `n` softmaxes of `other`, from number `from` on, to number `to` and on.
  void take(int64_t to, const Sums& other, int64_t from, int64_t n) {
    std::copy_n(&other.maximum[from], n, &maximum[to]);
    std::copy_n(&other.total[from * kLanes], n * kLanes, &total[to * kLanes]);
    std::copy_n(&other.weighted[from * width()], n * width(), &weighted[to * width()]);
  }

  // Adds number `j` of `other`, of a later range of keys, to number `i`.
  void combine(int64_t i, const Sums& other, int64_t j) {
    float before = maximum[i], later = other.maximum[j];
    float most = largest_lane(spec_jax::maximum(broadcast(later), broadcast(before)));
    maximum[i] = most;
    float shift = most == kLowest ? 0.0f : most;  // As in a block (`weigh_block`).
    auto rescale = [&](float own) {
      return exp(broadcast(own == shift ? 0.0f : own - shift));
    };
    Vec mine = rescale(before), theirs = rescale(later);
    auto add_up = [&](float* to, const float* from, int64_t n) {
      for (int64_t h = 0; h < n; h += kLanes) {
        store(to + h, fma(load(from + h), theirs, mul(load(to + h), mine)));
      }
    };
    add_up(&total[i * kLanes], &other.total[j * kLanes], kLanes);
    add_up(&weighted[i * width()], &other.weighted[j * width()], width());
  }

  // Writes the result of number `i`: out [H].
  void finish(int64_t i, T* out) const {
    constexpr int64_t kStep = kLanes * kWord<T>;
    const float* sums = weighted.data() + i * width();
    Vec all = broadcast(sum(load(total.data() + i * kLanes)));
    for (int64_t h = 0; h < H; h += kStep) {
      T step[kStep];
      if constexpr (kWord<T> == 1) {
        store(step, divide(load(sums + h), all));
      } else {
        store_pairs(step, divide(load(sums + h), all),
                    divide(load(sums + h + kLanes), all));
      }
      std::copy_n(step, std::min(H - h, kStep), out + h);
    }
  }
};

// Queries of one key/value head and one slot, and their running softmaxes.
template <typename T>
struct Queries : Sums<T> {
  int64_t count = 0;
  SideBySide<T> rows;     // [count, H]
  Scratch<int64_t> starts;  // [count]: keys start .. end - 1 are seen
  Scratch<int64_t> ends;    // [count]
  Scratch<float> scores;  // [count, kKeyBlock], and then probabilities
  Scratch<float> shift;   // [count]: is subtracted from a block's scores
  Scratch<float> rescale; // [count]: the sums before a block are multiplied by it

  // Makes room for `most` queries.
  Queries(int64_t most, int64_t H)
      : Sums<T>(most, H), rows(most, H), starts(most), ends(most),
        scores(most * kKeyBlock),
        shift(most), rescale((most + kLanes - 1) / kLanes * kLanes) {}

  // Counts the keys of the block from `start` before the first that query `i` sees.
  int64_t hidden(int64_t i, int64_t start) const {
    return std::clamp<int64_t>(starts[i] - start, 0, kKeyBlock);
  }

  // Counts the keys of the block from `start` up to the last that query `i` sees.
  int64_t seen(int64_t i, int64_t start) const {
    return std::clamp<int64_t>(ends[i] - start, 0, kKeyBlock);
  }

  // Begins with `n` queries, which the caller then sets.
  void begin(int64_t n) {
    count = n;
    rows.begin(n, this->H);
    this->clear(n);
  }
};

// A block of keys or values, and the offsets of the next block, to prefetch it; `next` is
// null for the last block. Processors do not prefetch rows of a head by themselves: they
// are short and far apart. Prefetches are spread over the work on a block, since memory
// serves only so many requests at a time.
template <typename T>
struct Block {
  const T* rows;
  const int64_t (&offsets)[kKeyBlock];
  const int64_t* next;

  const T* row(int64_t t) const { return rows + offsets[t]; }
  void fetch(int64_t t, int64_t h) const {
    if (next != nullptr) prefetch(rows + next[t], h * int64_t{sizeof(T)});
  }
};

// Room for the keys of a block as panels. A worker has one for all heads that it walks:
// several would evict each other from the first-level cache. It begins at a cache line,
// since a vector that is stored across two lines is slow to load again.
template <typename T>
class KeyPanels {
 public:
  explicit KeyPanels(int64_t H) : room_(words_of<T>(H) * kKeyBlock * kWord<T> + kLine) {}

  T* data() {
    uintptr_t past = reinterpret_cast<uintptr_t>(room_.data()) / sizeof(T) % kLine;
    return room_.data() + (kLine - past) % kLine;
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  Scratch<T> room_;
};

// Writes the keys of a block to `panels`.
template <typename T>
void turn_keys(const Block<T>& k, int64_t H, T* panels) {
  constexpr int64_t kFour = 4 * kWord<T>;  // elements of four words
  int64_t words = words_of<T>(H), whole = H / kFour * kFour;
  for (int64_t t = 0; t < kKeyBlock; t += kLanes) {
    T* to = panels + t / kPanel * words * kPanel * kWord<T> + t % kPanel * kWord<T>;
    const char* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = reinterpret_cast<const char*>(k.row(t + i));
    }
    auto four_words = [&](int64_t at, int64_t count) {
      Vec columns[4];
      transpose(rows, at, columns);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (j < count) store_words(to + j * kPanel * kWord<T>, columns[j]);
      }
      to += 4 * kPanel * kWord<T>;
    };
    constexpr int64_t kLine = 64 / sizeof(T), kParts = kLine / kFour;
    for (int64_t h = 0; h < whole; h += kFour) {
      four_words(h * sizeof(T), 4);
      int64_t part = h / kFour % kParts, line = h / kLine * kLine;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes / kParts; ++i) {
        k.fetch(t + part * (kLanes / kParts) + i, line);
      }
    }
    if (whole < H) {  // Elements past a head are not read.
      T tails[kLanes][kFour] = {};
      for (int i = 0; i < kLanes; ++i) {
        std::memcpy(static_cast<void*>(tails[i]), k.row(t + i) + whole,
                    (H - whole) * sizeof(T));
        rows[i] = reinterpret_cast<const char*>(tails[i]);
      }
      four_words(0, (H - whole) / kWord<T>);
    }
  }
}

// Computes the scores of all queries with a block's keys, in panels. Scores of keys
// that a query does not see are not used: such a key may hold anything.
template <typename T>
void score_block(Queries<T>& queries, const T* panels) {
  const SideBySide<T>& rows = queries.rows;
  rows.for_each_group([&](int64_t first, int64_t size) {
    multiply<false>(rows.group(first, size), panels, kKeyBlock / kPanel, rows.words(),
                    queries.scores.data() + first * kKeyBlock, kKeyBlock);
  });
}

// Turns the scores of a block, times `scale`, into probabilities under the running
// maximum of their query; 0 for keys that it does not see. In one loop over the
// queries, not three, each query would wait for its maximum, and then for the factor of
// its sums.
template <typename T>
void weigh_block(Queries<T>& queries, int64_t start, float scale) {
  constexpr int kParts = kKeyBlock / kLanes;
  Vec lowest = broadcast(kLowest), factor = broadcast(scale);
  for (int64_t i = 0; i < queries.count; ++i) {
    float* scores = queries.scores.data() + i * kKeyBlock;
    Vec seen = broadcast(static_cast<float>(queries.seen(i, start)));
    Vec largest = broadcast(queries.maximum[i]);
    float hidden = static_cast<float>(queries.hidden(i, start));
    for (int j = 0; j < kParts; ++j) {
      Vec score = mul(load(scores + j * kLanes), factor);
      score = where_less(load(kPlaces + j * kLanes), seen, score, lowest);
      if (hidden > 0) {
        score = where_less(load(kPlaces + j * kLanes), broadcast(hidden), lowest, score);
      }
      largest = maximum(score, largest);
      store(scores + j * kLanes, score);
    }
    // While all scores were -inf, subtracting their maximum would make them NaN, not 0.
    // A score that is NaN, or +inf, makes a probability NaN, and so the sums.
    float before = queries.maximum[i], most = largest_lane(largest);
    queries.maximum[i] = most;
    queries.shift[i] = most == kLowest ? 0.0f : most;
    queries.rescale[i] = before == queries.shift[i] ? 0.0f : before - queries.shift[i];
  }
  // Where the maximum stays, the factor is exp(0), exactly 1.
  for (int64_t i = 0; i < queries.count; i += kLanes) {
    float* rescale = queries.rescale.data() + i;
    store(rescale, exp(load(rescale)));
  }
  for (int64_t i = 0; i < queries.count; ++i) {
    float* scores = queries.scores.data() + i * kKeyBlock;
    float* total = queries.total.data() + i * kLanes;
    Vec shift = broadcast(queries.shift[i]);
    Vec all = mul(load(total), broadcast(queries.rescale[i]));
    for (int j = 0; j < kParts; ++j) {
      Vec probability = exp(subtract(load(scores + j * kLanes), shift));
      store(scores + j * kLanes, probability);
      all = add(all, probability);
    }
    store(total, all);
  }
}

// Adds p[r][t] * value[t][j] to sums[r][j], for t in [t0, t1) in order: R queries from
// `i`, W vectors of words from element `h`. The sums are first rescaled if `begins`.
template <int R, int W, typename T>
inline void add_values(Queries<T>& queries, int64_t i, int64_t h, const Block<T>& v,
                       int64_t t0, int64_t t1, bool begins) {
  constexpr int64_t kLine = 64 / sizeof(T);
  constexpr int V = W * kWord<T>;
  constexpr int64_t kStep = kLanes * kWord<T>;
  Vec acc[R][V];
  float* sums = queries.weighted.data() + i * queries.width() + h;
  const float* probs = queries.scores.data() + i * kKeyBlock;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    Vec scale = broadcast(begins ? queries.rescale[i + r] : 1.0f);
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      acc[r][j] = mul(load(sums + r * queries.width() + j * kLanes), scale);
    }
  }
  int64_t left = queries.H - h;
  for (int64_t t = t0; t < t1; ++t) {
    Vec value[V];
    const T* from = v.row(t) + h;
    T end[kStep];
    if (W == 1 && left < kStep) {  // Elements past a head are not read.
      std::memset(static_cast<void*>(end), 0, sizeof end);
      std::memcpy(static_cast<void*>(end), from, left * sizeof(T));
      from = end;
    }
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) {
      value[j] = load_part(from + j / kWord<T> * kStep, j % kWord<T>);
    }
    if (i == 0) {
      for (int64_t at = 0; at < W * kStep; at += kLine) v.fetch(t, h + at);
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

// Adds the values of the block from position `start` to R queries from `i`. Keys that all
// queries see are added to all at once, the rest to each.
template <int R, typename T>
void add_block(Queries<T>& queries, int64_t i, int64_t start, const Block<T>& v) {
  int64_t hidden[R], seen[R];
  for (int r = 0; r < R; ++r) {
    hidden[r] = queries.hidden(i + r, start);
    seen[r] = queries.seen(i + r, start);
  }
  constexpr int W = (kLanes == 16 || R <= 2 ? 4 : 2) / kWord<T>;
  constexpr int64_t kStep = kLanes * kWord<T>;
  int64_t all = *std::min_element(seen, seen + R);
  auto run = [&](auto count, int64_t first, int64_t t0, int64_t t1, bool begins) {
    constexpr int kCount = decltype(count)::value;
    int64_t h = 0;
    for (; h + W * kStep <= queries.H; h += W * kStep) {
      add_values<kCount, W>(queries, first, h, v, t0, t1, begins);
    }
    for (; h < queries.H; h += kStep) {
      add_values<kCount, 1>(queries, first, h, v, t0, t1, begins);
    }
  };
  constexpr std::integral_constant<int, 1> kOne;
  if (*std::max_element(hidden, hidden + R) > 0) {  // Some query's window begins later.
    for (int r = 0; r < R; ++r) {
      if (seen[r] > hidden[r]) run(kOne, i + r, hidden[r], seen[r], true);
    }
    return;
  }
  if (all > 0) run(std::integral_constant<int, R>(), i, 0, all, true);
  for (int r = 0; r < R; ++r) {
    if (seen[r] > all) run(kOne, i + r, all, seen[r], all == 0);
  }
}

// Attends to one block of keys, from position `start`, and their values.
template <typename T>
void attend_block(Queries<T>& queries, KeyPanels<T>& panels, const Block<T>& k,
                  const Block<T>& v, int64_t start, float scale) {
  turn_keys(k, queries.H, panels.data());
  score_block(queries, panels.data());
  weigh_block(queries, start, scale);
  // The registers hold the sums of five queries by four vectors of a value, or by two.
  for (int64_t i = 0; i < queries.count; i += 5) {
    with_constant<5>(std::min<int64_t>(queries.count - i, 5), [&](auto size) {
      add_block<decltype(size)::value>(queries, i, start, v);
    });
  }
}

}  // namespace spec_jax
