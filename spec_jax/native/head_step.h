// A whole step of an EAGLE-3 head in one call; and chains of such steps.
//
// A row is a pair of a token and a feature. The feature is the target's, fused, or is
// made of the residual of the pair before.

#pragma once

#include <algorithm>
#include <cstdint>

#include "projection.h"
#include "side_by_side.h"
#include "step.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

// A head: a step of one layer, whose `qkv` reads the normed token and the normed feature,
// [2 * D]. It may embed more tokens than it drafts.
template <typename T>
struct Head {
  Step<T> step;
  const T* hidden_norm;  // [D], of features
  bool norm_before_residual, norm_output;

  int64_t size() const { return step.embed.panels.K; }
};

// Returns the residual of the rows after the layer, [live, D], from features [live, D].
template <typename Pool, typename T>
Scratch<T> run_pairs(Team<Pool>& team, const Head<T>& head, const T* features) {
  const Step<T>& step = head.step;
  const StepLayer<T>& layer = step.layers[0];
  int64_t live = step.rows.live, D = head.size();
  Scratch<T> out(live * D), normed(live * D), pairs(live * 2 * D);
  Layers<Pool, T> layers(team, step);
  take_rows(step.embed, step.tokens, out.data(), live);
  for (int64_t r = 0; r < live; ++r) {
    T* pair = pairs.data() + r * 2 * D;
    norm_row(out.data() + r * D, layer.input_norm, D, step.eps, pair);
    norm_row(features + r * D, head.hidden_norm, D, step.eps, pair + D);
    std::copy(pair + D, pair + 2 * D, normed.data() + r * D);
  }
  const T* residual = head.norm_before_residual ? normed.data() : features;
  layers.run(layer, layers.input(pairs), residual, out);
  return out;
}

// Writes the features [rows, D] of the pairs that come next.
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

// Writes a step's logits [live, N], and features [live, D] of the pairs that come next.
template <typename Pool, typename T>
void run_head(Team<Pool>& team, const Head<T>& head, const T* features, T* next) {
  int64_t live = head.step.rows.live;
  if (live == 0) return;
  Scratch<T> left = run_pairs(team, head, features);
  Workers<Pool, T> workers(team, live, head.size());
  row_logits(workers, head.step, left.data(), live, head.step.logits);
  next_features(head, left.data(), live, next);
}

// Drafts with a head, whose step is as `run_all` takes it.
//
// Args:
//   features: of the pending tokens, [S, width, D].
//   names: the target's token for each of the head's own, [N], or null: the same.
template <typename Pool, typename T>
void run_head_chains(Team<Pool>& team, Head<T> head, const Chains& chains,
                     const T* features, const int32_t* names) {
  int64_t S = chains.num_slots, D = head.size();
  Scratch<T> read, next(S * D);  // of the next pair of each slot
  run_all(team, head.step, chains, names, [&](const ChainRows& rows) {
    read.clear();
    for (size_t r = 0; r < rows.slots.size(); ++r) {
      int64_t s = rows.slots[r], i = rows.positions[r] - chains.starts[s];
      const T* from = next.data() + s * D;
      if (i < chains.pending[s]) from = features + (s * chains.width + i) * D;
      read.insert(read.end(), from, from + D);
    }
    Scratch<T> left = run_pairs(team, head, read.data());
    // Only the last row of a slot has a next pair.
    for (size_t j = 0; j < rows.drafts.size(); ++j) {
      const T* row = left.data() + rows.lasts[j] * D;
      next_features(head, row, 1, next.data() + rows.drafts[j].slot * D);
    }
    return left;
  });
}

}  // namespace spec_jax
