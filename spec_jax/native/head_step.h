// A whole step of an EAGLE-3 head in one call; and chains of such steps.
//
// A row is a pair of a token and a feature, which is the target's, fused, or what the pair
// before it left behind.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "argmax.h"
#include "projection.h"
#include "side_by_side.h"
#include "step.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

// A head: a step of one layer, whose `qkv` reads the normed token and the normed feature,
// [2 * D]. Its own tokens are fewer than those that it embeds.
template <typename T>
struct Head {
  Step<T> step;
  const T* hidden_norm;  // [D], of features
  bool norm_before_residual, norm_output;

  int64_t size() const { return step.embed.panels.K; }
};

// What the rows leave behind, [live, D], of features [live, D].
template <typename Pool, typename T>
std::vector<T> run_pairs(Team<Pool>& team, const Head<T>& head, const T* features) {
  const Step<T>& step = head.step;
  const StepLayer<T>& layer = step.layers[0];
  int64_t live = step.rows.live, D = head.size();
  std::vector<T> out(live * D), normed(live * D), pairs(live * 2 * D);
  Layers<Pool, T> layers(team, step);
  take_rows(step.embed, step.tokens, out.data(), live);
  for (int64_t r = 0; r < live; ++r) {
    T* pair = pairs.data() + r * 2 * D;
    norm_row(out.data() + r * D, layer.input_norm, D, step.eps, pair);
    norm_row(features + r * D, head.hidden_norm, D, step.eps, pair + D);
    std::copy(pair + D, pair + 2 * D, normed.data() + r * D);
  }
  const T* residual = head.norm_before_residual ? normed.data() : features;
  layers.run(layer, layers.input(pairs, nullptr), residual, out);
  return out;
}

// Logits [rows, N] of what `rows` rows left behind, [rows, D].
template <typename Pool, typename T>
void pair_logits(Team<Pool>& team, const Head<T>& head, const T* left, int64_t rows,
                 float* logits) {
  const Step<T>& step = head.step;
  const T* none = nullptr;
  Workers<Pool, T> workers(team, rows, step.head.K);
  Input<T> input{left, step.final_norm, step.eps, rows};
  project(workers, input, step.head, none, logits);
}

// The features [rows, D] of the pairs that come next.
template <typename T>
void next_features(const Head<T>& head, const T* left, int64_t rows, T* features) {
  int64_t D = head.size();
  for (int64_t at = 0; at < rows * D; at += D) {
    if (head.norm_output) {
      norm_row(left + at, head.step.final_norm, D, head.step.eps, features + at);
    } else {
      std::copy(left + at, left + at + D, features + at);
    }
  }
}

// A step: logits [live, N], and the features [live, D] of the pairs that come next.
template <typename Pool, typename T>
void run_head(Team<Pool>& team, const Head<T>& head, const T* features, T* next) {
  int64_t live = head.step.rows.live;
  if (live == 0) return;
  std::vector<T> left = run_pairs(team, head, features);
  pair_logits(team, head, left.data(), live, head.step.logits);
  next_features(head, left.data(), live, next);
}

// Drafts, of a head whose step is as `run_all` takes it.
//
// Args:
//   features: of what is pending, [S, width, D].
//   names: the token of each of the head's own, [N], or null: the same.
template <typename Pool, typename T>
void run_head_chains(Pool& pool, Head<T> head, const Chains& chains, const T* features,
                     const int32_t* names) {
  int64_t S = chains.num_slots, D = head.size(), N = head.step.head.N;
  std::vector<T> read, last, next(S * D);  // of the next pair of each slot
  std::vector<float> logits;
  std::vector<int32_t> highest;
  Team<Pool> team(pool);
  run_all(head.step, chains, [&](const ChainRows& rows, int32_t* chosen) {
    read.clear();
    for (size_t r = 0; r < rows.slots.size(); ++r) {
      int64_t s = rows.slots[r], i = rows.positions[r] - chains.starts[s];
      const T* from = next.data() + s * D;
      if (i < chains.pending[s]) from = features + (s * chains.width + i) * D;
      read.insert(read.end(), from, from + D);
    }
    std::vector<T> left = run_pairs(team, head, read.data());
    // Only the last rows of slots draft, and only they have a next pair.
    last.clear();
    for (int64_t s = 0; s < S; ++s) {
      if (rows.slot_ends[s] == 0) continue;
      const T* row = left.data() + (rows.slot_ends[s] - 1) * D;
      next_features(head, row, 1, next.data() + s * D);
      last.insert(last.end(), row, row + D);
    }
    int64_t count = last.size() / D, from = 0;
    logits.resize(count * N);
    highest.resize(count);
    pair_logits(team, head, last.data(), count, logits.data());
    argmax(team, logits.data(), highest.data(), count, count, N);
    for (int64_t s = 0; s < S; ++s) {
      if (rows.slot_ends[s] == 0) continue;
      int32_t own = highest[from++];
      chosen[s] = names == nullptr ? own : names[own];
    }
  });
}

}  // namespace spec_jax
