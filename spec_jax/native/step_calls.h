// The handlers of whole steps of models, of chains of them, and of blocks, which XLA calls.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "block_step.h"
#include "buffers.h"
#include "head_step.h"
#include "step.h"
#include "team.h"

namespace spec_jax {
namespace {

// The weights of a layer, which follow the named arguments of a kernel.
enum LayerWeight { kInputNorm, kQkv, kQNorm, kKNorm, kAttentionOut, kMlpNorm, kGateUp,
                   kDown, kKv, kLayerWeights };

// The rows of a step, in the order of `bind_rows`.
struct RowCall {
  Ints tokens, slots, positions;
  Scalar num_active;
  Ints branch;  // [R, width]; empty: not of trees
};

template <typename Binding>
auto bind_rows(Binding&& own) {
  return bind<Ints, Ints, Ints, Scalar, Ints>(std::move(own));
}

// The parts of a step except its rows: a kernel's last arguments, the pages, which are
// its last results, and attributes, in the order of `bind_model`.
struct Model {
  Ints table;
  Floats cos, sin;
  Any embed, final_norm, head;
  ffi::RemainingArgs rest;  // weights of each layer; then all keys, and all values
  ffi::RemainingRets updated;
  int64_t entries, own_entries, num_heads, mlp_size;
  float scale, eps;

  Any at(int64_t layer, int64_t which) const {
    return *rest.get<Any>(layer * kLayerWeights + which);
  }
  Pools pages() const { return {rest, updated}; }
  int64_t num_layers() const { return pages().size() / 2; }

  ffi::Error check() const {
    if (ffi::Error error = pages().check(); error.failure()) return error;
    return check_head_size(pages()[0].dimensions()[3]);
  }

  template <typename T>
  StepLayer<T> layer(int64_t i, int64_t D, int64_t K, int64_t H) const {
    int64_t N = num_heads * H, both = 2 * K * H;
    bool is_apart = at(i, kKv).element_count() > 0;
    auto vector = [&](int64_t which) { return data_or_null<T>(at(i, which)); };
    return {vector(kInputNorm),
            vector(kQNorm),
            vector(kKNorm),
            vector(kMlpNorm),
            panels<T>(at(i, kQkv), is_apart ? N : N + both, D),
            panels<T>(at(i, kAttentionOut), D, N),
            panels<T>(at(i, kGateUp), 2 * mlp_size, D),
            panels<T>(at(i, kDown), D, mlp_size),
            pages().data<T>(i),
            pages().data<T>(num_layers() + i),
            panels<T>(at(i, kKv), both, D)};
  }

  // Returns a step without rows, which chains set for each of their steps.
  template <typename T>
  Step<T> step() const {
    Any keys = pages()[0];
    int64_t K = keys.dimensions()[2], H = keys.dimensions()[3];
    int64_t D = final_norm.element_count();
    Step<T> step{};
    step.embed = table_of<T>(embed, entries, D);
    step.final_norm = data<T>(final_norm);
    step.head = panels<T>(head.element_count() > 0 ? head : embed, own_entries, D);
    step.rows.table = page_table(table, keys);
    step.cos = cos.typed_data();
    step.sin = sin.typed_data();
    step.N = num_heads;
    step.K = K;
    step.H = H;
    step.scale = scale;
    step.eps = eps;
    for (int64_t i = 0; i < num_layers(); ++i) step.layers.push_back(layer<T>(i, D, K, H));
    return step;
  }
};

template <typename Binding>
auto bind_model(Binding&& own) {
  return bind<Ints, Floats, Floats, Any, Any, Any, ffi::RemainingArgs, ffi::RemainingRets,
              int64_t, int64_t, int64_t, int64_t, float, float>(
      std::move(own), "entries", "own_entries", "num_heads", "mlp_size", "scale", "eps");
}

// Calls `run(team, step, tag)` with a model's step without rows; the tag is of its dtype.
template <typename Run>
ffi::Error with_model(ffi::ThreadPool& pool, const Model& model, const Run& run) {
  if (ffi::Error error = model.check(); error.failure()) return error;
  return with_team(pool, model.final_norm.element_type(), [&](auto& team, auto tag) {
    run(team, model.step<decltype(tag)>(), tag);
  });
}

// Calls `run(team, step, tag)` with the step of a call's rows and model.
template <typename Run>
ffi::Error with_step(ffi::ThreadPool& pool, const Model& model, const RowCall& rows,
                     const Run& run) {
  return with_model(pool, model, [&](auto& team, auto step, auto tag) {
    step.tokens = rows.tokens.typed_data();
    step.rows = rows_of(step.rows.table, rows.slots, rows.positions, rows.num_active,
                        rows.branch);
    run(team, step, tag);
  });
}

constexpr auto RunStep = [](ffi::ThreadPool pool, ffi::Result<Floats> logits,
                            Result features, ffi::Span<const int64_t> taps,
                            auto... parts) -> ffi::Error {
  struct { RowCall rows; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows, [&](auto& team, auto step, auto tag) {
    using T = decltype(tag);
    step.taps.assign(taps.begin(), taps.end());
    step.logits = data_or_null(*logits);
    step.features = data<T>(features);
    // A prompt's features leave the program with their padding rows: these are zeros,
    // since `jax_debug_nans` would take unset memory for results.
    int64_t row = features->dimensions()[1] * features->dimensions()[2];
    std::fill(step.features + step.rows.live * row,
              step.features + features->element_count(), T{});
    run_step(team, step);
  });
};

// How slots draw, in the order of `bind_draws`; no slot draws if `numbers` is empty.
struct DrawCall {
  Floats numbers;  // [3, S] temperature, top_p, min_p
  Ints integers;   // [3, S] top_k, seed, position
  int64_t vocabulary;
  bool is_independent;

  // Returns the draws, which write their `log_weights` [S, most, N] if there are any.
  Draws draws(float* log_weights = nullptr, int64_t most = 0) const {
    if (numbers.element_count() == 0) return {};
    int64_t S = numbers.dimensions()[1];
    const float* number = numbers.typed_data();
    const int32_t* integer = integers.typed_data();
    return {number,      number + S,     number + 2 * S, integer,
            integer + S, integer + 2 * S, vocabulary,    is_independent,
            log_weights, most};
  }
};

template <typename Binding>
auto bind_draws(Binding&& own) {
  return bind<Floats, Ints, int64_t, bool>(std::move(own), "vocabulary",
                                           "is_independent");
}

// Chains without their model, in the order of `bind_chains`.
struct ChainCall {
  Ints tokens, starts, pending, counts;
  ffi::Result<Ints> drafts;
  ffi::Result<Floats> log_weights;  // [S, most, N], or empty: not asked for
  DrawCall draws;

  Chains chains() {
    int64_t most = drafts->dimensions()[1];
    return {tokens.typed_data(), starts.typed_data(),    pending.typed_data(),
            counts.typed_data(), tokens.dimensions()[0], tokens.dimensions()[1],
            most,                drafts->typed_data(),
            draws.draws(data_or_null(*log_weights), most)};
  }
};

template <typename Binding>
auto bind_chains(Binding&& own) {
  return bind_draws(
      bind<Ints, Ints, Ints, Ints, ffi::Result<Ints>, ffi::Result<Floats>>(
          std::move(own)));
}

constexpr auto RunChains = [](ffi::ThreadPool pool, auto... parts) -> ffi::Error {
  struct { ChainCall chains; Model model; } call{parts...};
  return with_model(pool, call.model, [&](auto& team, const auto& step, auto) {
    run_chains(team, step, call.chains.chains());
  });
};

// An EAGLE-3 head, in the order of `bind_head`.
struct HeadCall {
  Any hidden_norm;
  bool norm_before_residual, norm_output;
  int64_t window;

  template <typename T>
  Head<T> head(Step<T> step) const {
    step.layers[0].qkv.K *= 2;  // A row is a token and a feature, side by side.
    step.rows.window = window;
    return {step, data<T>(hidden_norm), norm_before_residual, norm_output};
  }
};

template <typename Binding>
auto bind_head(Binding&& own) {
  return bind_model(bind<Any, bool, bool, int64_t>(std::move(own), "norm_before_residual",
                                                   "norm_output", "window"));
}

constexpr auto RunHeadStep = [](ffi::ThreadPool pool, Any features,
                                ffi::Result<Floats> logits, Result next,
                                auto... parts) -> ffi::Error {
  struct { RowCall rows; HeadCall head; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows, [&](auto& team, auto step, auto tag) {
    using T = decltype(tag);
    step.logits = logits->typed_data();
    run_head(team, call.head.head(step), data<T>(features), data<T>(next));
  });
};

constexpr auto RunHeadChains = [](ffi::ThreadPool pool, Any features, Ints names,
                                  auto... parts) -> ffi::Error {
  struct { ChainCall chains; HeadCall head; Model model; } call{parts...};
  return with_model(pool, call.model, [&](auto& team, const auto& step, auto tag) {
    run_head_chains(team, call.head.head(step), call.chains.chains(),
                    data<decltype(tag)>(features), data_or_null(names));
  });
};

constexpr auto AppendContext = [](ffi::ThreadPool pool, Any features, Any fc,
                                  Any hidden_norm, auto... parts) -> ffi::Error {
  struct { RowCall rows; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows,
                   [&](auto& team, const auto& step, auto tag) {
    using T = decltype(tag);
    append_context(team, step, data<T>(features),
                   panels<T>(fc, step.head.K, features.dimensions()[1]),
                   data<T>(hidden_norm));
  });
};

constexpr auto RunBlocks = [](ffi::ThreadPool pool, Result hidden,
                              ffi::Result<Floats> logits, int64_t block_size,
                              auto... parts) -> ffi::Error {
  struct { RowCall rows; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows, [&](auto& team, auto step, auto tag) {
    step.logits = logits->typed_data();
    run_blocks(team, step, block_size, data<decltype(tag)>(hidden));
  });
};

ffi::Error RunSlots(ffi::ThreadPool pool, Floats logits, Ints anchors, Ints counts,
                    Ints names, Any embed, Any out, Any mix, Any mix_bias, Any hidden,
                    ffi::Result<Ints> drafts, int64_t entries, int64_t rank,
                    Floats numbers, Ints integers, ffi::Result<Floats> log_weights,
                    int64_t vocabulary, bool is_independent) {
  auto shape = logits.dimensions();
  int64_t D = hidden.dimensions()[2], gates = mix_bias.element_count();
  int64_t width = D + (gates == rank ? rank : 2 * rank);
  DrawCall draws{numbers, integers, vocabulary, is_independent};
  SlotChains chains{logits.typed_data(), anchors.typed_data(), counts.typed_data(),
                    data_or_null(names), shape[0], shape[1], shape[2],
                    drafts->typed_data(),
                    draws.draws(data_or_null(*log_weights), shape[1])};
  return with_team(pool, embed.element_type(), [&](auto& team, auto tag) {
    using T = decltype(tag);
    auto w = panels<T>(out, chains.N, rank);
    Mix<T> head{};
    if (gates > 0) {
      head = {panels<T>(mix, gates, width), data<T>(mix_bias), data<T>(hidden), D,
              hidden.dimensions()[1] - shape[1]};
    }
    run_slots(team, table_of<T>(embed, entries, rank), w, head, chains);
  });
}

}  // namespace
}  // namespace spec_jax
