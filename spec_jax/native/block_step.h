// The round of a block drafter, in three calls: it takes in the features of context, runs
// whole blocks of rows, and goes over their slots token by token.
//
// Context needs no queries: their weights are apart. The rows of a block see all of it,
// and find its keys as the rows of a tree find their branch, last.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "draw.h"
#include "projection.h"
#include "row_attention.h"
#include "side_by_side.h"
#include "step.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

// Writes the keys and values of context, made of its features [live, fc.K] by the `kv`
// of the step's layers.
template <typename Pool, typename T>
void append_context(Team<Pool>& team, const Step<T>& step, const T* features,
                    const Panels<T>& fc, const T* hidden_norm) {
  int64_t live = step.rows.live, size = 2 * step.K * step.H;
  if (live == 0) return;
  Scratch<T> fused(live * fc.N), made(live * size);
  Workers<Pool, T> workers(team, live, std::max(fc.K, fc.N));
  Attention<Pool, T> attention(team, step.rows, step.K, 0, step.H);
  project(workers, Input<T>{features, nullptr, step.eps, live}, fc, fused.data());
  Input<T> context{fused.data(), hidden_norm, step.eps, live};
  for (const auto& layer : step.layers) {
    project(workers, context, layer.kv, made.data());
    attention.write_all(step.attention(layer, made.data(), 0, nullptr));
  }
}

// The rows of whole blocks, each of `size` rows at following positions of one slot: the
// last position that each sees, and the places of its block's keys, its own last.
struct WholeBlocks {
  std::vector<int32_t> ends, branch;

  WholeBlocks(const int32_t* positions, int64_t live, int64_t size) {
    for (int64_t r = 0; r < live; ++r) {
      int64_t own = r % size, first = positions[r] - own;
      ends.push_back(static_cast<int32_t>(first + size - 1));
      for (int64_t i = 1; i <= size; ++i) {
        branch.push_back(static_cast<int32_t>(first + (own + i) % size));
      }
    }
  }
};

// Runs whole blocks of `size` rows; writes hidden states [live, D] after the final
// norm, and the step's logits of them.
template <typename Pool, typename T>
void run_blocks(Team<Pool>& team, Step<T> step, int64_t size, T* hidden) {
  int64_t live = step.rows.live, D = step.head.K;
  if (live == 0) return;
  WholeBlocks where(step.rows.positions, live, size);
  step.rows.positions = where.ends.data();
  step.rows.branch = where.branch.data();
  step.rows.width = size;
  Layers<Pool, T> layers(team, step);
  Scratch<T> left = run_layers(layers);
  for (int64_t at = 0; at < live * D; at += D) {
    norm_row(left.data() + at, step.final_norm, D, step.eps, hidden + at);
  }
  Input<T> normed{hidden, nullptr, step.eps, live};
  project(layers.workers, normed, step.head, step.logits);
}

// The slots of S blocks, in each of which a token is chosen after the one before it.
struct SlotChains {
  const float* logits;     // [S, most, N]
  const int32_t* anchors;  // [S], tokens before the first slot
  const int32_t* counts;   // [S] slots to fill, from the first
  const int32_t* names;    // [N] the token of each of the drafter's own; null: the same
  int64_t num_slots, most, N;
  int32_t* drafts;  // [S, most]; 0 from `counts` on
  Draws draws;
};

// A sequential head that mixes the token before a slot with the hidden state of the
// slot's row: gated [r, D + r], of hidden state and embedding; or recurrent
// [3r, 2r + D], of a state of its own, the embedding and the hidden state.
template <typename T>
struct Mix {
  Panels<T> w;      // without data: the embedding is taken as it is
  const T* bias;    // [w.N]
  const T* hidden;  // [S, passed + most, D]
  int64_t D, passed;  // slots before the first that predicts, which a state passes through
};

inline Vec sigmoid(Vec x) {
  return divide(broadcast(1.0f), add(broadcast(1.0f), exp(subtract(zero(), x))));
}
// Computes tanh to within a few units of the last place of 1.
inline Vec tanh(Vec x) {
  return subtract(broadcast(1.0f),
                  divide(broadcast(2.0f), add(broadcast(1.0f), exp(add(x, x)))));
}

// A run of such a head, with the state that it carries from slot to slot.
template <typename T>
struct Mixer {
  const Mix<T>& mix;
  int64_t r;
  std::vector<float> state, made;  // [S, r], [rows, w.N]
  std::vector<T> read;             // [rows, w.K]

  Mixer(const Mix<T>& mix, int64_t num_slots, int64_t r)
      : mix(mix), r(r), state(num_slots * r), made(num_slots * mix.w.N),
        read(num_slots * mix.w.K) {}

  bool is_recurrent() const { return mix.w.N != r; }

  // Writes a slot's input of the product: [hidden, before], or [own, before, hidden].
  void gather(const float* own, const T* before, const T* hidden, T* to) const {
    if (!is_recurrent()) {
      std::copy(before, before + r, std::copy(hidden, hidden + mix.D, to));
      return;
    }
    for (int64_t n = 0; n < r; n += kLanes) {
      store_lanes(to + n, r - n, load_lanes(own + n, r - n));
    }
    std::copy(hidden, hidden + mix.D, std::copy(before, before + r, to + r));
  }

  // Applies the gates of one row, made [w.N], to its state and to the embedding [r].
  void gate(const float* made, float* own, T* before) const {
    for (int64_t n = 0; n < r; n += kLanes) {
      auto at = [&](int64_t part) {
        int64_t from = part * r + n;
        return add(load_lanes(made + from, r - n), load_lanes(mix.bias + from, r - n));
      };
      if (!is_recurrent()) {
        Vec token = load_lanes(before + n, r - n);
        store_lanes(before + n, r - n, mul(sigmoid(at(0)), token));
        continue;
      }
      Vec kept = sigmoid(at(0)), old = load_lanes(own + n, r - n);
      Vec fresh = mul(subtract(broadcast(1.0f), kept), tanh(at(1)));
      store_lanes(own + n, r - n, add(mul(kept, old), fresh));
      store_lanes(before + n, r - n, tanh(at(2)));
    }
  }

  // Turns the embeddings `before` [rows, r] into the input of the head's second
  // product; `rows` names the block and the slot of each.
  template <typename Pool>
  void run(Workers<Pool, T>& workers, const std::vector<Draft>& rows, int64_t most,
           T* before) {
    int64_t live = rows.size();
    for (int64_t j = 0; j < live; ++j) {
      auto [slot, number] = rows[j];
      int64_t at = slot * (mix.passed + most) + mix.passed + number;
      gather(state.data() + slot * r, before + j * r, mix.hidden + at * mix.D,
             read.data() + j * mix.w.K);
    }
    project(workers, Input<T>{read.data(), nullptr, 0.0f, live}, mix.w, made.data());
    for (int64_t j = 0; j < live; ++j) {
      gate(made.data() + j * mix.w.N, state.data() + rows[j].slot * r, before + j * r);
    }
  }
};

// Chooses each slot's token by its logits. Unless `out` [N, r] is null, they get its
// product with the embedding of the token before, or with what `mix` makes of that.
template <typename Pool, typename T>
void run_slots(Team<Pool>& team, const Table<T>& embed, const Panels<T>& out,
               const Mix<T>& mix, const SlotChains& chains) {
  int64_t S = chains.num_slots, N = chains.N;
  std::vector<T> before(S * out.K);
  Scratch<float> scores(S * N);
  std::vector<int32_t> tokens(S), chosen(S);
  std::vector<Draft> asked;
  Workers<Pool, T> workers(team, S, std::max(out.K, mix.w.K));
  Mixer<T> mixer(mix, S, out.K);
  std::fill(chains.drafts, chains.drafts + S * chains.most, 0);
  for (int64_t i = -mix.passed; i < chains.most; ++i) {
    asked.clear();
    for (int64_t s = 0; s < S; ++s) {
      if (std::max<int64_t>(i, 0) >= chains.counts[s]) continue;
      const int32_t* own = chains.drafts + s * chains.most;
      tokens[asked.size()] = i <= 0 ? chains.anchors[s] : own[i - 1];
      asked.push_back({s, i});
    }
    int64_t live = asked.size();
    if (live == 0) return;
    if (out) take_rows(embed, tokens.data(), before.data(), live);
    if (mix.w) mixer.run(workers, asked, chains.most, before.data());
    if (i < 0) continue;
    if (out) {
      Input<T> input{before.data(), nullptr, 0.0f, live};
      project(workers, input, out, scores.data());
    }
    for (int64_t j = 0; j < live; ++j) {
      const float* own = chains.logits + (asked[j].slot * chains.most + i) * N;
      float* row = scores.data() + j * N;
      for (int64_t n = 0; n < N; ++n) row[n] = !out ? own[n] : own[n] + row[n];
    }
    choose(team, chains.draws, asked, chains.names, N, scores.data(), chosen.data());
    for (int64_t j = 0; j < live; ++j) {
      chains.drafts[asked[j].slot * chains.most + i] = chosen[j];
    }
  }
}

}  // namespace spec_jax
