// A whole step of a model: the active rows through all layers, in one call.
//
// What the five operations of a layer do when they are called one by one, on one team
// of threads, and with the residual in one place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "projection.h"
#include "row_attention.h"
#include "simd.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {

template <typename T>
struct StepLayer {
  const T *input_norm, *q_norm, *k_norm, *mlp_norm;
  Panels<T> qkv, attention_out, gate_up, down;
  T *k, *v;  // [P, C, K, H]
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
  float* logits;              // [R, V], or null: nobody asks for them
  T* features;                // [R, taps, D]
};

// The residual x [live, D], where a tap is.
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

template <typename Pool, typename T>
void run_step(Pool& pool, const Step<T>& step) {
  int64_t live = step.rows.live, D = step.embed.panels.K;
  if (live == 0) return;
  int64_t attended_size = step.N * step.H, heads_size = (step.N + 2 * step.K) * step.H;
  int64_t hidden_size = 0;
  for (const auto& layer : step.layers) {
    hidden_size = std::max(hidden_size, layer.down.K);
  }
  std::vector<T> x(live * D), heads(live * heads_size), attended(live * attended_size),
      hidden(live * hidden_size);
  Team<Pool> team(pool);
  Workers<Pool, T> workers(team, live, std::max({D, attended_size, hidden_size}));
  Attention<Pool, T> attention(team, step.rows, step.K, step.N / step.K, step.H);
  auto input = [&](const std::vector<T>& rows, const T* norm) {
    return Input<T>{rows.data(), norm, step.eps, live};
  };
  const T* none = nullptr;
  take_rows(step.embed, step.tokens, x.data(), live);
  int64_t boundary = 0;
  tap_features(step, boundary, x.data());
  for (const auto& layer : step.layers) {
    project(workers, input(x, layer.input_norm), layer.qkv, none, heads.data());
    attention.run(Layer<T>{heads.data(), layer.q_norm, layer.k_norm, step.cos, step.sin,
                           layer.k, layer.v, attended.data(), step.N, step.K, step.H,
                           step.scale, step.eps});
    project(workers, input(attended, none), layer.attention_out, x.data(), x.data());
    gate(workers, input(x, layer.mlp_norm), layer.gate_up, hidden.data());
    project(workers, input(hidden, none), layer.down, x.data(), x.data());
    tap_features(step, ++boundary, x.data());
  }
  if (step.logits == nullptr) return;
  project(workers, input(x, step.final_norm), step.head, none, step.logits);
}

}  // namespace spec_jax
