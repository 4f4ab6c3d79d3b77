// The best children of a tree's rows: the tokens that rows most probably give, as
// `draw.h` draws them, and their scores.
//
// A row is split into pieces. For each the best tokens and a part of the sum are found:
// the pieces are the same whatever the number of threads, and of rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "argmax.h"
#include "draw.h"
#include "noise.h"
#include "side_by_side.h"
#include "simd.h"
#include "team.h"

namespace spec_jax {

// The rows of a tree's level, of several slots.
struct ChildRows {
  const float* logits;     // [S, width, N]
  const int32_t* counts;   // [S] rows of each slot to look at
  const int32_t* numbers;  // [width] their numbers for `Draws::key`
  const int32_t* names;    // [N] the token of each of the drafter's own; null: the same
  int64_t num_slots, width, N, most;  // `most`: children of a row
  float tau;       // divides the values of a row before they become scores
  float* scores;   // [S, width, most]; -inf: no draft
  int32_t* tokens;  // [S, width, most]
  Draws draws;
};

// The tokens of the highest values, best first, equal ones by index.
struct Best {
  Largest* found;
  int64_t most, count = 0;

  // Takes a token whose number is above those of equal values that were offered before.
  void offer(Largest next) {
    if (count == most && !(next.value > found[most - 1].value)) return;
    int64_t at = count < most ? count++ : most - 1;
    for (; at > 0 && next.value > found[at - 1].value; --at) found[at] = found[at - 1];
    found[at] = next;
  }

  void offer_all(const float* x, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += kLanes) {
      // (Lanes past the end are zeros, which at worst cause a search in vain. NaN may
      // hide the highest value, but a row with NaN has no draft.)
      float highest = largest_lane(load_lanes(x + n, end - n));
      if (count == most && highest <= found[most - 1].value) continue;
      for (int64_t i = n; i < std::min<int64_t>(n + kLanes, end); ++i) offer({x[i], i});
    }
  }
};

// A piece of a row: its highest value, and the sum of exp((x - highest) / tau), which
// is NaN where a value is NaN, or infinitely high.
struct PieceSum {
  float highest, sum;
};

inline PieceSum sum_of_piece(const float* x, int64_t begin, int64_t end, float highest,
                             float scale) {
  if (highest == -kInfinity) {
    // All values are -inf or NaN.
    bool is_none = std::any_of(x + begin, x + end, [](float v) { return v != v; });
    return {highest, is_none ? std::numeric_limits<float>::quiet_NaN() : 0.0f};
  }
  Vec most = broadcast(highest), factor = broadcast(scale), sums = zero();
  int64_t n = begin;
  for (; n + kLanes <= end; n += kLanes) {
    sums = add(sums, exp(mul(subtract(load(x + n), most), factor)));
  }
  float total = sum(sums);
  for (; n < end; ++n) total += exp((x[n] - highest) * scale);
  return {highest, total};
}

// Writes the children of row `at`, each of whose pieces found at most `most`.
inline void join_pieces(const ChildRows& rows, const std::vector<Best>& best,
                        const PieceSum* sums, int64_t pieces, int64_t at) {
  std::vector<Largest> found(rows.most);
  Best all{found.data(), rows.most};
  for (int64_t p = 0; p < pieces; ++p) {
    const Best& own = best[p];
    for (int64_t i = 0; i < own.count; ++i) all.offer(own.found[i]);
  }
  float highest = all.found[0].value, scale = 1.0f / rows.tau, total = 0;
  for (int64_t p = 0; p < pieces; ++p) {
    float part = sums[p].sum;
    if (part != 0) part *= exp((sums[p].highest - highest) * scale);
    total += part;
  }
  // Where no token has a weight, or a value is NaN or +inf, no token is a draft.
  bool is_sum = total > 0 && total < kInfinity;
  float shift = is_sum ? log_of(total) : 0.0f;
  for (int64_t i = 0; i < rows.most; ++i) {
    int64_t n = is_sum ? all.found[i].index : i;
    float score = (all.found[i].value - highest) / rows.tau - shift;
    rows.scores[at * rows.most + i] = is_sum ? score : -kInfinity;
    rows.tokens[at * rows.most + i] =
        rows.names == nullptr ? static_cast<int32_t>(n) : rows.names[n];
  }
}

// Finds the children of the rows within `counts`; the others get no drafts.
template <typename Pool>
void best_children(Team<Pool>& team, const ChildRows& rows) {
  int64_t N = rows.N, all = rows.num_slots * rows.width;
  std::vector<Draft> asked;
  std::vector<int64_t> where;
  for (int64_t at = 0; at < all; ++at) {
    int64_t slot = at / rows.width, own = at % rows.width;
    if (own >= rows.counts[slot]) continue;
    asked.push_back({slot, rows.numbers[own]});
    where.push_back(at);
  }
  std::fill(rows.scores, rows.scores + all * rows.most, -kInfinity);
  std::fill(rows.tokens, rows.tokens + all * rows.most, 0);
  int64_t count = asked.size(), pieces = (N + kDrawPiece - 1) / kDrawPiece;
  std::vector<float> drawn;
  if (rows.draws.temperature != nullptr) {
    drawn.resize(count * N);
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(rows.logits + where[r] * N, N, drawn.data() + r * N);
    }
    std::vector<int32_t> highest(count);
    argmax(team, drawn.data(), highest.data(), count, count, N);
    weigh_rows(team, rows.draws, asked, rows.names, N, drawn.data(), highest.data());
  }
  std::vector<Largest> found(count * pieces * rows.most);
  std::vector<PieceSum> sums(count * pieces);
  std::vector<Best> best;
  for (int64_t i = 0; i < count * pieces; ++i) {
    best.push_back({found.data() + i * rows.most, rows.most});
  }
  team.run(count * pieces, 1, [&](int64_t i, int64_t, int64_t) {
    int64_t r = i / pieces, begin = i % pieces * kDrawPiece;
    int64_t end = std::min(begin + kDrawPiece, N);
    const float* x = drawn.empty() ? rows.logits + where[r] * N : drawn.data() + r * N;
    best[i].offer_all(x, begin, end);
    sums[i] = sum_of_piece(x, begin, end, best[i].found[0].value, 1.0f / rows.tau);
  });
  for (int64_t r = 0; r < count; ++r) {
    std::vector<Best> own(best.begin() + r * pieces, best.begin() + (r + 1) * pieces);
    join_pieces(rows, own, sums.data() + r * pieces, pieces, where[r]);
  }
}

}  // namespace spec_jax
