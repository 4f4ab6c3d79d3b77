// What a block drafter does in a round, in three calls: it takes in the features of
// context, runs whole blocks of rows, and goes over their slots token by token.
//
// Of context there are keys and values alone, so queries have weights apart. The rows of a
// block see all of it, which comes last among a row's keys as branches of trees do.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "argmax.h"
#include "projection.h"
#include "row_attention.h"
#include "side_by_side.h"
#include "simd.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

template <typename T>
struct BlockLayer {
  const T *input_norm, *q_norm, *k_norm, *mlp_norm;
  Panels<T> q, kv, attention_out, gate_up, down;
  T *k, *v;  // [P, C, K, H]
};

// A drafter, and the rows that it runs.
template <typename T>
struct Blocks {
  std::vector<BlockLayer<T>> layers;
  Rows rows;
  const float *cos, *sin;  // [R, H / 2]
  int64_t N, K, H;
  float scale, eps;

  // What attention reads and writes, of queries of `num_heads`.
  Layer<T> attention(const BlockLayer<T>& layer, const T* heads, int64_t num_heads,
                     T* out) const {
    return {heads, layer.q_norm, layer.k_norm, cos,   sin, layer.k,
            layer.v, out,        num_heads,    K,     H,   scale,
            eps};
  }
};

// Writes the keys and values of context, of its features [live, fc.K].
template <typename Pool, typename T>
void append_context(Team<Pool>& team, const Blocks<T>& block, const T* features,
                    const Panels<T>& fc, const T* hidden_norm) {
  int64_t live = block.rows.live, size = 2 * block.K * block.H;
  if (live == 0) return;
  std::vector<T> fused(live * fc.N), made(live * size);
  Workers<Pool, T> workers(team, live, std::max(fc.K, fc.N));
  Attention<Pool, T> attention(team, block.rows, block.K, 0, block.H);
  const T* none = nullptr;
  T* nowhere = nullptr;
  project(workers, Input<T>{features, none, block.eps, live}, fc, none, fused.data());
  Input<T> context{fused.data(), hidden_norm, block.eps, live};
  for (const auto& layer : block.layers) {
    project(workers, context, layer.kv, none, made.data());
    attention.write_all(block.attention(layer, made.data(), 0, nowhere));
  }
}

// The rows of whole blocks, each of `size` rows at following positions of one slot: how
// far all of them see, and the places of their last keys, of which the own is last.
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

// Runs whole blocks: hidden states [live, D] after the final norm, and logits [live, N].
template <typename Pool, typename T>
void run_blocks(Team<Pool>& team, Blocks<T> block, int64_t size, const int32_t* tokens,
                const Table<T>& embed, const T* final_norm, const Panels<T>& head,
                T* hidden, float* logits) {
  int64_t live = block.rows.live, D = head.K, N = block.N * block.H;
  if (live == 0) return;
  WholeBlocks where(block.rows.positions, live, size);
  block.rows.positions = where.ends.data();
  block.rows.branch = where.branch.data();
  block.rows.width = size;
  int64_t row = N + 2 * block.K * block.H, F = 0;
  for (const auto& layer : block.layers) F = std::max(F, layer.down.K);
  std::vector<T> x(live * D), heads(live * row), attended(live * N), inner(live * F);
  Workers<Pool, T> workers(team, live, std::max({D, N, F}));
  Attention<Pool, T> attention(team, block.rows, block.K, block.N / block.K, block.H);
  auto input = [&](const std::vector<T>& rows, const T* norm) {
    return Input<T>{rows.data(), norm, block.eps, live};
  };
  const T* none = nullptr;
  take_rows(embed, tokens, x.data(), live);
  for (const auto& layer : block.layers) {
    project(workers, input(x, layer.input_norm), layer.q, none, heads.data(), row);
    project(workers, input(x, layer.input_norm), layer.kv, none, heads.data() + N, row);
    attention.run(block.attention(layer, heads.data(), block.N, attended.data()));
    project(workers, input(attended, none), layer.attention_out, x.data(), x.data());
    gate(workers, input(x, layer.mlp_norm), layer.gate_up, inner.data());
    project(workers, input(inner, none), layer.down, x.data(), x.data());
  }
  for (int64_t r = 0; r < live; ++r) {
    norm_row(x.data() + r * D, final_norm, D, block.eps, hidden + r * D);
  }
  project(workers, Input<T>{hidden, none, block.eps, live}, head, none, logits);
}

// Slots of blocks that are gone over greedily, each after the token before it.
struct SlotChains {
  const float* logits;     // [S, most, N]
  const int32_t* anchors;  // [S], tokens before the first slot
  const int32_t* counts;   // [S] slots to go over
  const int32_t* names;    // [N] the token of each of the drafter's own; null: the same
  int64_t num_slots, most, N;
  int32_t* drafts;  // [S, most]; 0 from `counts` on
};

// Takes the highest of a slot's logits, to which the product of `out` [N, r] with the
// embedding of the token before is added, unless `out` is null.
template <typename Pool, typename T>
void run_slots(Team<Pool>& team, const Table<T>& embed, const Panels<T>& out,
               const SlotChains& chains) {
  int64_t S = chains.num_slots, N = chains.N;
  std::vector<T> before(S * out.K);
  std::vector<float> scores(S * N);
  std::vector<int32_t> tokens(S), highest(S), asked;
  Workers<Pool, T> workers(team, S, out.K);
  std::fill(chains.drafts, chains.drafts + S * chains.most, 0);
  for (int64_t i = 0; i < chains.most; ++i) {
    asked.clear();
    for (int64_t s = 0; s < S; ++s) {
      if (i >= chains.counts[s]) continue;
      const int32_t* last = chains.drafts + s * chains.most + i - 1;
      tokens[asked.size()] = i == 0 ? chains.anchors[s] : *last;
      asked.push_back(static_cast<int32_t>(s));
    }
    int64_t live = asked.size();
    if (live == 0) return;
    if (out.data != nullptr) {
      const T* none = nullptr;
      take_rows(embed, tokens.data(), before.data(), live);
      Input<T> input{before.data(), none, 0.0f, live};
      project(workers, input, out, none, scores.data());
    }
    for (int64_t j = 0; j < live; ++j) {
      const float* own = chains.logits + (asked[j] * chains.most + i) * N;
      float* row = scores.data() + j * N;
      for (int64_t n = 0; n < N; ++n) row[n] = out.data == nullptr ? own[n] : own[n] + row[n];
    }
    argmax(team, scores.data(), highest.data(), live, live, N);
    for (int64_t j = 0; j < live; ++j) {
      int32_t token = chains.names == nullptr ? highest[j] : chains.names[highest[j]];
      chains.drafts[asked[j] * chains.most + i] = token;
    }
  }
}

}  // namespace spec_jax
