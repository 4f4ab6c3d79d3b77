// The token of each row: that of the highest logit, or a draw of `rules.sampling`, that
// of the highest log weight plus noise.
//
// Tokens are the drafter's own; noise is by the target's, which `names` gives.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "argmax.h"
#include "noise.h"
#include "scratch.h"
#include "side_by_side.h"
#include "simd.h"
#include "team.h"

namespace spec_jax {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kDrawPiece = 1024;  // tokens that one thread takes at a time

// How each slot draws. If `temperature` is null no slot draws; a slot whose temperature
// is 0 does not draw either.
struct Draws {
  const float *temperature = nullptr, *top_p = nullptr, *min_p = nullptr;   // [S]
  const int32_t *top_k = nullptr, *seeds = nullptr, *positions = nullptr;   // [S]
  int64_t vocabulary = 0;        // of the target
  bool is_independent = false;   // noise of `Stream.DRAFT`, by round and number
  float* log_weights = nullptr;  // [S, most, N] result: before noise; null: none
  int64_t most = 0;

  // Returns the key of draft `number` of a slot, whose first is at `positions[slot]`.
  Key key(int64_t slot, int64_t number) const {
    uint32_t position = positions[slot], seed = seeds[slot], i = number;
    return is_independent ? noise_key(seed, 1, position, i)
                          : noise_key(seed, 0, position + i, 0);
  }
};

// The draft that a row gives: its slot, and its number there.
struct Draft {
  int64_t slot, number;
};

// The first tokens of a row in the order of their scores, equal ones by index: all less
// than `distance` below the highest, and at this distance the ones before index `end`.
struct Kept {
  static constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max();
  float distance = kInfinity;
  int64_t end = kNoEnd;

  bool is_all() const { return distance == kInfinity && end == kNoEnd; }
  bool holds(float score, int64_t n) const {
    return -score < distance || (-score == distance && n < end);
  }
};

// Distances of a row's tokens from the highest score, and their weights; past the last
// token infinite distances and weights of 0.
struct Weighed {
  static constexpr int64_t kBeside = 4;  // sums that do not wait for each other
  std::vector<float> distance, weight;

  explicit Weighed(int64_t N) {
    int64_t most = kBeside * kLanes;
    distance.assign((N + most - 1) / most * most, kInfinity);
    weight.assign(distance.size(), 0.0f);
  }

  // Returns the weight of all tokens at distances up to `at`.
  float mass(float at) const {
    Vec sums[kBeside], bound = broadcast(at);
    for (auto& sum : sums) sum = zero();
    for (size_t n = 0; n < distance.size(); n += kBeside * kLanes) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < kBeside; ++j) {
        const float* from = distance.data() + n + j * kLanes;
        Vec own = load(weight.data() + n + j * kLanes);
        sums[j] = add(sums[j], where_less(bound, load(from), zero(), own));
      }
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  }

  // Finds the least distance up to which tokens weigh at least `wanted`, or infinity.
  float nearest(float wanted) const {
    // Distances are not negative: their bits have the same order.
    uint32_t low = 0, high = 0x7f800000u;
    while (low < high) {
      uint32_t middle = low + (high - low) / 2;
      if (mass(of_bits(middle)) >= wanted) high = middle; else low = middle + 1;
    }
    return of_bits(low);
  }

  // Finds the fewest first tokens that weigh `wanted`; all tokens if all weigh less.
  Kept first(float wanted) const {
    Kept kept{nearest(wanted)};
    uint32_t bits = load_as<uint32_t>(&kept.distance);
    float found = bits == 0 ? 0.0f : mass(of_bits(bits - 1));
    for (size_t n = 0; n < distance.size(); ++n) {
      if (distance[n] != kept.distance) continue;
      found += weight[n];
      if (found < wanted) continue;
      kept.end = n + 1;
      break;
    }
    return kept;
  }

  static float of_bits(uint32_t bits) { return load_as<float>(&bits); }
};

// A row that is drawn from: x [N] logits, of which `most` is the highest.
struct DrawnRow {
  float* x;
  float most, scale, min_p;  // `scale` is 1 / temperature, as XLA divides
  Key key;
  Kept kept;
  float* log_weights;  // [N], or null

  // Keeps the first of N tokens, by `top_k` and then by `top_p`.
  void filter(int64_t N, int32_t top_k, float top_p) {
    Weighed tokens(N);
    for (int64_t n = 0; n < N; ++n) {
      tokens.distance[n] = (most - x[n]) * scale;
      tokens.weight[n] = 1.0f;
    }
    // Keeps all tokens whose scores equal that of the last, too.
    if (top_k < N) kept.distance = tokens.nearest(static_cast<float>(top_k));
    if (!(top_p < 1)) return;
    for (int64_t n = 0; n < N; n += kLanes) {
      Vec score = subtract(zero(), load(tokens.distance.data() + n));
      store(tokens.weight.data() + n, exp(score));
    }
    for (int64_t n = 0; n < N; ++n) {
      if (!kept.holds(-tokens.distance[n], n)) tokens.weight[n] = 0.0f;
    }
    kept = tokens.first(top_p * tokens.mass(kInfinity));
  }

  // Turns the logits of tokens [begin, end) into log weights, and adds noise.
  void weigh(const int32_t* names, int64_t vocabulary, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) x[n] = (x[n] - most) * scale;
    for (int64_t n = begin; !kept.is_all() && n < end; ++n) {
      if (!kept.holds(x[n], n)) x[n] = -kInfinity;
    }
    if (min_p > 0) {
      for (int64_t n = begin; n < end; n += kLanes) {
        Vec score = load_lanes(x + n, end - n);
        Vec none = broadcast(-kInfinity);
        store_lanes(x + n, end - n, where_less(exp(score), broadcast(min_p), none, score));
      }
    }
    if (log_weights != nullptr) std::copy(x + begin, x + end, log_weights + begin);
    add_noise(key, names, vocabulary, begin, end, x);
  }
};

// Turns the logits [count, N] of rows that draw into noisy log weights. For the others
// `log_weights` is 0 at the highest logit and -inf elsewhere.
template <typename Pool>
void weigh_rows(Team<Pool>& team, const Draws& draws, const std::vector<Draft>& drafts,
                const int32_t* names, int64_t N, float* logits, const int32_t* highest) {
  std::vector<DrawnRow> rows;
  std::vector<int64_t> slots;
  for (size_t r = 0; r < drafts.size(); ++r) {
    auto [slot, number] = drafts[r];
    float *x = logits + r * N, *out = draws.log_weights;
    if (out != nullptr) out += (slot * draws.most + number) * N;
    if (draws.temperature[slot] != 0) {
      rows.push_back({x, x[highest[r]], 1.0f / draws.temperature[slot], draws.min_p[slot],
                      draws.key(slot, number), Kept{}, out});
      slots.push_back(slot);
    } else if (out != nullptr) {
      std::fill(out, out + N, -kInfinity);
      out[highest[r]] = 0.0f;
    }
  }
  int64_t count = rows.size(), pieces = (N + kDrawPiece - 1) / kDrawPiece;
  auto filters = [&](int64_t slot) {
    return draws.top_k[slot] < N || draws.top_p[slot] < 1;
  };
  if (std::any_of(slots.begin(), slots.end(), filters)) {
    std::atomic<bool> is_short{false};  // of memory: a body must not throw
    team.run(count, 1, [&](int64_t r, int64_t, int64_t) {
      int64_t slot = slots[r];
      if (!filters(slot)) return;
      try {
        rows[r].filter(N, draws.top_k[slot], draws.top_p[slot]);
      } catch (const std::bad_alloc&) {
        is_short = true;
      }
    });
    if (is_short) throw std::bad_alloc();
  }
  team.run(count * pieces, 1, [&](int64_t i, int64_t, int64_t) {
    int64_t begin = i % pieces * kDrawPiece, end = std::min(begin + kDrawPiece, N);
    rows[i / pieces].weigh(names, draws.vocabulary, begin, end);
  });
}

// Chooses the tokens [count] of rows of logits [count, N], which it overwrites.
template <typename Pool>
void choose(Team<Pool>& team, const Draws& draws, const std::vector<Draft>& drafts,
            const int32_t* names, int64_t N, float* logits, int32_t* tokens) {
  int64_t count = drafts.size();
  argmax(team, logits, tokens, count, count, N);
  if (draws.temperature != nullptr) {
    weigh_rows(team, draws, drafts, names, N, logits, tokens);
    argmax(team, logits, tokens, count, count, N);
  }
  if (names == nullptr) return;
  for (int64_t r = 0; r < count; ++r) tokens[r] = names[tokens[r]];
}

// Draws tokens [rows] from logits [rows, N], each by the settings and position of the
// slot with the row's number; 0 where a row is not asked for.
template <typename Pool>
void draw_tokens(Team<Pool>& team, const Draws& draws, const float* logits,
                 const bool* asked, int64_t rows, int64_t N, int32_t* tokens) {
  std::vector<Draft> drafts;
  for (int64_t r = 0; r < rows; ++r) {
    if (asked[r]) drafts.push_back({r, 0});
  }
  int64_t count = drafts.size();
  Scratch<float> changed(count * N);
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(logits + drafts[i].slot * N, N, changed.data() + i * N);
  }
  std::vector<int32_t> drawn(count);
  choose(team, draws, drafts, nullptr, N, changed.data(), drawn.data());
  std::fill_n(tokens, rows, 0);
  for (int64_t i = 0; i < count; ++i) tokens[drafts[i].slot] = drawn[i];
}

}  // namespace spec_jax
