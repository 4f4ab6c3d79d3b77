// A whole step of a model, the active rows through all layers, in one call; and chains of
// such steps, each of which takes in what the one before it chose.
//
// Its results are those of the five operations of a layer called one by one; it runs
// them on one team of threads, and with the residual in one place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "draw.h"
#include "projection.h"
#include "row_attention.h"
#include "scratch.h"
#include "simd.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

template <typename T>
struct StepLayer {
  const T *input_norm, *q_norm, *k_norm, *mlp_norm;
  Panels<T> qkv, attention_out, gate_up, down;
  T *k, *v;         // [P, C, K, H]
  Panels<T> kv{};  // of keys and values, where `qkv` is of queries alone
};

template <typename T>
struct Step {
  const int32_t* tokens;  // [R]
  Table<T> embed;         // [V, D]
  std::vector<StepLayer<T>> layers;
  const T* final_norm;  // [D]
  Panels<T> head;       // [V, D]
  Rows rows;
  const float *cos, *sin;  // [R, H / 2]
  int64_t N, K, H;
  float scale, eps;
  std::vector<int64_t> taps;  // layers before which the residual is a feature
  float* logits;              // [R, V], or null: not wanted
  T* features;                // [R, taps, D]

  // Returns the arrays that attention reads and writes, with `num_heads` query heads.
  Layer<T> attention(const StepLayer<T>& layer, const T* heads, int64_t num_heads,
                     T* out) const {
    return {heads, layer.q_norm, layer.k_norm, cos, sin, layer.k, layer.v, out,
            num_heads, K, H, scale, eps};
  }
};

// Copies the residual x [live, D] to the feature whose tap is `boundary`, if any.
template <typename T>
void tap_features(const Step<T>& step, int64_t boundary, const T* x) {
  int64_t D = step.embed.panels.K, count = step.taps.size();
  for (int64_t i = 0; i < count; ++i) {
    if (step.taps[i] != boundary) continue;
    for (int64_t r = 0; r < step.rows.live; ++r) {
      std::memcpy(static_cast<void*>(step.features + (r * count + i) * D), x + r * D,
                  D * sizeof(T));
    }
  }
}

// The team, and the memory that the layers of a step need beside their weights.
template <typename Pool, typename T>
struct Layers {
  const Step<T>& step;
  Workers<Pool, T> workers;
  Attention<Pool, T> attention;
  Scratch<T> heads, attended, hidden;

  Layers(Team<Pool>& team, const Step<T>& step)
      : step(step), workers(team, step.rows.live, widest(step)),
        attention(team, step.rows, step.K, step.N / step.K, step.H),
        heads(step.rows.live * (step.N + 2 * step.K) * step.H),
        attended(step.rows.live * step.N * step.H) {
    for (const auto& layer : step.layers) {
      hidden.resize(std::max<size_t>(hidden.size(), step.rows.live * layer.down.K));
    }
  }

  // Reads the rows of `step` as they are now; returns false if they need more memory.
  bool begin() {
    int64_t row = (step.N + 2 * step.K) * step.H;
    if (step.rows.live * row > static_cast<int64_t>(heads.size())) return false;
    attention.begin(step.N / step.K, step.H);
    return true;
  }

  // Returns the most values that a row of a product has.
  static int64_t widest(const Step<T>& step) {
    int64_t most = std::max(step.head.K, step.N * step.H);
    for (const auto& layer : step.layers) {
      most = std::max({most, layer.qkv.K, layer.down.K});
    }
    return most;
  }

  Input<T> input(const Scratch<T>& rows, const T* norm = nullptr) const {
    return {rows.data(), norm, step.eps, step.rows.live};
  }

  // Computes x [live, D] = residual + attention(from), and then x += mlp(x). `residual`
  // may be x.
  void run(const StepLayer<T>& layer, const Input<T>& from, const T* residual,
           Scratch<T>& x) {
    int64_t row = (step.N + 2 * step.K) * step.H;
    project(workers, from, layer.qkv, heads.data(), nullptr, row);
    if (layer.kv) {
      project(workers, from, layer.kv, heads.data() + step.N * step.H, nullptr, row);
    }
    attention.run(step.attention(layer, heads.data(), step.N, attended.data()));
    project(workers, input(attended), layer.attention_out, x.data(), residual);
    gate(workers, input(x, layer.mlp_norm), layer.gate_up, hidden.data());
    project(workers, input(hidden), layer.down, x.data(), x.data());
  }

  // Stores the keys and values that the layer makes of `from`: other rows see no more
  // of it.
  void store(const StepLayer<T>& layer, const Input<T>& from) {
    int64_t row = (step.N + 2 * step.K) * step.H, queries = step.N * step.H;
    bool is_apart{layer.kv}, begins_panel = queries % kPanel == 0;
    if (is_apart || begins_panel) {
      const Panels<T> kv = is_apart ? layer.kv : layer.qkv.from(queries);
      project(workers, from, kv, heads.data() + queries, nullptr, row);
    } else {
      project(workers, from, layer.qkv, heads.data(), nullptr, row);
    }
    attention.write_all(step.attention(layer, heads.data(), step.N, attended.data()));
  }
};

// Returns the residual of the rows, [live, D], after the first `count` layers.
template <typename Pool, typename T>
Scratch<T> run_layers(Layers<Pool, T>& layers, int64_t count) {
  const Step<T>& step = layers.step;
  Scratch<T> x(step.rows.live * step.embed.panels.K);
  take_rows(step.embed, step.tokens, x.data(), step.rows.live);
  tap_features(step, 0, x.data());
  for (int64_t i = 0; i < count; ++i) {
    const StepLayer<T>& layer = step.layers[i];
    layers.run(layer, layers.input(x, layer.input_norm), x.data(), x);
    tap_features(step, i + 1, x.data());
  }
  return x;
}

template <typename Pool, typename T>
Scratch<T> run_layers(Layers<Pool, T>& layers) {
  return run_layers(layers, static_cast<int64_t>(layers.step.layers.size()));
}

// Writes logits [rows, N] of the residual after the last layer, `left` [rows, D].
template <typename Pool, typename T>
void row_logits(Workers<Pool, T>& workers, const Step<T>& step, const T* left,
                int64_t rows, float* logits) {
  project(workers, Input<T>{left, step.final_norm, step.eps, rows}, step.head, logits);
}

template <typename Pool, typename T>
void run_step(Team<Pool>& team, const Step<T>& step) {
  if (step.rows.live == 0) return;
  Layers<Pool, T> layers(team, step);
  int64_t count = step.layers.size();
  bool is_tapped = std::count(step.taps.begin(), step.taps.end(), count) > 0;
  if (step.logits == nullptr && !is_tapped) {  // As in the prefill of prompts.
    Scratch<T> left = run_layers(layers, count - 1);
    const StepLayer<T>& last = step.layers.back();
    return layers.store(last, layers.input(left, last.input_norm));
  }
  Scratch<T> left = run_layers(layers);
  if (step.logits != nullptr) {
    row_logits(layers.workers, step, left.data(), step.rows.live, step.logits);
  }
}

// Texts that are continued.
struct Chains {
  const int32_t* tokens;   // [S, width] of each slot's text, without stored K/V
  const int32_t* starts;   // [S] the position of the first of them
  const int32_t* pending;  // [S] how many of the tokens there are
  const int32_t* counts;   // [S] tokens to draft; 0: the slot sits out
  int64_t num_slots, width, most;
  int32_t* drafts;  // [S, most]
  Draws draws;

  int64_t num_places() const { return width + most - 1; }
};

// The rows of one step of chains, and which of them draft.
struct ChainRows {
  std::vector<int32_t> tokens, slots, positions;
  std::vector<float> cos, sin;
  std::vector<Draft> drafts;   // one of each slot that has rows
  std::vector<int64_t> lasts;  // the last row of each of these slots

  // Takes the rows of the slots that have not drafted enough: first all pending tokens,
  // then the last draft.
  void take(const Chains& chains, const std::vector<int64_t>& drafted, const float* all_cos,
            const float* all_sin, int64_t half) {
    for (auto* values : {&tokens, &slots, &positions}) values->clear();
    for (auto* values : {&cos, &sin}) values->clear();
    drafts.clear();
    lasts.clear();
    for (int64_t s = 0; s < chains.num_slots; ++s) {
      if (drafted[s] >= chains.counts[s]) continue;
      bool begins = drafted[s] == 0;
      int64_t first = begins ? 0 : chains.pending[s] + drafted[s] - 1;
      const int32_t* from = begins ? chains.tokens + s * chains.width
                                   : chains.drafts + s * chains.most + drafted[s] - 1;
      for (int64_t i = 0; i < (begins ? chains.pending[s] : 1); ++i) {
        tokens.push_back(from[i]);
        slots.push_back(static_cast<int32_t>(s));
        positions.push_back(static_cast<int32_t>(chains.starts[s] + first + i));
        int64_t at = (s * chains.num_places() + first + i) * half;
        cos.insert(cos.end(), all_cos + at, all_cos + at + half);
        sin.insert(sin.end(), all_sin + at, all_sin + at + half);
      }
      drafts.push_back({s, drafted[s]});
      lasts.push_back(tokens.size() - 1);
    }
  }
};

// Makes the drafts of all chains. `step` has the angles of all their places,
// [S, num_places, H / 2]; its tokens, rows and angles are set for each step. `run`
// returns the residual of the rows after the last layer, [rows, D].
template <typename Pool, typename T, typename Run>
void run_all(Team<Pool>& team, Step<T>& step, const Chains& chains, const int32_t* names,
             const Run& run) {
  const float *cos = step.cos, *sin = step.sin;
  int64_t D = step.head.K, N = step.head.N;
  std::vector<int64_t> drafted(chains.num_slots);
  Scratch<T> last;
  Scratch<float> logits;
  std::vector<int32_t> chosen;
  ChainRows rows;
  Workers<Pool, T> workers(team, chains.num_slots, D);
  std::fill(chains.drafts, chains.drafts + chains.num_slots * chains.most, 0);
  for (;;) {
    rows.take(chains, drafted, cos, sin, step.H / 2);
    if (rows.tokens.empty()) return;
    step.tokens = rows.tokens.data();
    step.rows.slots = rows.slots.data();
    step.rows.positions = rows.positions.data();
    step.rows.live = rows.tokens.size();
    step.cos = rows.cos.data();
    step.sin = rows.sin.data();
    Scratch<T> left = run(rows);
    int64_t count = rows.drafts.size();
    last.clear();
    for (int64_t row : rows.lasts) {
      last.insert(last.end(), left.data() + row * D, left.data() + (row + 1) * D);
    }
    logits.resize(count * N);
    chosen.resize(count);
    row_logits(workers, step, last.data(), count, logits.data());
    choose(team, chains.draws, rows.drafts, names, N, logits.data(), chosen.data());
    for (int64_t j = 0; j < count; ++j) {
      auto [slot, number] = rows.drafts[j];
      chains.drafts[slot * chains.most + number] = chosen[j];
      ++drafted[slot];
    }
  }
}

// Makes the drafts of a model, with a step as `run_all` takes it.
template <typename Pool, typename T>
void run_chains(Team<Pool>& team, Step<T> step, const Chains& chains) {
  std::optional<Layers<Pool, T>> layers;
  run_all(team, step, chains, nullptr, [&](const ChainRows&) {
    if (!layers || !layers->begin()) layers.emplace(team, step);
    return run_layers(*layers);
  });
}

}  // namespace spec_jax
