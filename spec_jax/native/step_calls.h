// Whole steps of models, and chains of them, as they are called through XLA.

#pragma once

#include <cstdint>
#include <utility>

#include "buffers.h"
#include "head_step.h"
#include "step.h"
#include "team.h"

namespace spec_jax {
namespace {

// The buffers of a layer, of a step's arguments and results after those that it names.
enum StepBuffer { kInputNorm, kQkv, kQNorm, kKNorm, kAttentionOut, kMlpNorm, kGateUp,
                  kDown, kKeys, kValues, kLayerBuffers };

template <typename T>
StepLayer<T> step_layer(const ffi::RemainingArgs& rest, int64_t number, int64_t D, int64_t F,
                        int64_t attention_size, int64_t heads_size) {
  auto at = [&](StepBuffer which) {
    return *rest.get<Any>(number * kLayerBuffers + which);
  };
  auto vector = [&](StepBuffer which) { return data_or_null<T>(at(which)); };
  auto pages = [&](StepBuffer which) { return static_cast<T*>(at(which).untyped_data()); };
  return {vector(kInputNorm),
          vector(kQNorm),
          vector(kKNorm),
          vector(kMlpNorm),
          panels<T>(at(kQkv), heads_size, D),
          panels<T>(at(kAttentionOut), D, attention_size),
          panels<T>(at(kGateUp), 2 * F, D),
          panels<T>(at(kDown), D, F),
          pages(kKeys),
          pages(kValues)};
}

// What a step is made of, but for its rows: the last arguments of a kernel, the pages
// among its results, and attributes, in the order of `bind_model`.
struct Model {
  Ints table;
  Floats cos, sin;
  Any embed, final_norm, head;
  ffi::RemainingArgs rest;  // of each layer, see StepBuffer
  ffi::RemainingRets pages;
  int64_t entries, num_heads, mlp_size;
  float scale, eps;

  auto page_shape() const { return (*rest.get<Any>(kKeys)).dimensions(); }

  ffi::Error check() const {
    int64_t num_layers = rest.size() / kLayerBuffers;
    for (int64_t i = 0; i < num_layers; ++i) {
      for (int j : {0, 1}) {
        auto in = *rest.get<Any>(i * kLayerBuffers + kKeys + j);
        auto out = *pages.get<Any>(2 * i + j);
        if (in.untyped_data() != out->untyped_data()) {
          return ffi::Error::Internal("the pages must be updated in place");
        }
      }
    }
    return check_head_size(page_shape()[3]);
  }

  template <typename T>
  Step<T> step(const int32_t* slots, const int32_t* positions, int64_t live) const {
    auto shape = page_shape();
    int64_t K = shape[2], H = shape[3], D = final_norm.element_count();
    Step<T> step{};
    step.embed = table_of<T>(embed, entries, D);
    step.final_norm = data<T>(final_norm);
    step.head = panels<T>(head.element_count() > 0 ? head : embed, entries, D);
    step.rows = {table.typed_data(),    slots,    positions, table.dimensions()[0],
                 table.dimensions()[1], shape[0], shape[1],  live};
    step.cos = cos.typed_data();
    step.sin = sin.typed_data();
    step.N = num_heads;
    step.K = K;
    step.H = H;
    step.scale = scale;
    step.eps = eps;
    for (size_t i = 0; i < rest.size() / kLayerBuffers; ++i) {
      step.layers.push_back(step_layer<T>(rest, i, D, mlp_size, num_heads * H,
                                          (num_heads + 2 * K) * H));
    }
    return step;
  }
};

template <typename Binding>
auto bind_model(Binding own) {
  return std::move(own)
      .template Arg<Ints>()         // page_table
      .template Arg<Floats>()       // cos
      .template Arg<Floats>()       // sin
      .template Arg<Any>()          // embed
      .template Arg<Any>()          // final_norm
      .template Arg<Any>()          // head
      .RemainingArgs()              // of each layer
      .RemainingRets()              // keys and values of each layer
      .template Attr<int64_t>("entries")
      .template Attr<int64_t>("num_heads")
      .template Attr<int64_t>("mlp_size")
      .template Attr<float>("scale")
      .template Attr<float>("eps");
}

constexpr auto RunStep = [](ffi::ThreadPool pool, Ints tokens, Ints slots, Ints positions,
                            Scalar num_active, Ints branch, ffi::Result<Floats> logits,
                            Result features, ffi::Span<const int64_t> taps,
                            auto... parts) -> ffi::Error {
  Model model{parts...};
  if (ffi::Error error = model.check(); error.failure()) return error;
  int64_t live = live_rows(num_active, tokens.element_count());
  return by_dtype(model.final_norm.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Step<T> step = model.step<T>(slots.typed_data(), positions.typed_data(), live);
    step.tokens = tokens.typed_data();
    step.rows = with_branch(step.rows, branch);
    step.taps.assign(taps.begin(), taps.end());
    step.logits = logits->element_count() > 0 ? logits->typed_data() : nullptr;
    step.features = data<T>(features);
    Team<ffi::ThreadPool> team(pool);
    run_step(team, step);
    return ffi::Error::Success();
  });
};

inline Chains chains_of(Ints tokens, Ints starts, Ints pending, Ints counts,
                        ffi::Result<Ints>& drafts) {
  return {tokens.typed_data(),     starts.typed_data(),     pending.typed_data(),
          counts.typed_data(),     tokens.dimensions()[0],  tokens.dimensions()[1],
          drafts->dimensions()[1], drafts->typed_data()};
}

constexpr auto RunChains = [](ffi::ThreadPool pool, Ints tokens, Ints starts, Ints pending,
                              Ints counts, ffi::Result<Ints> drafts,
                              auto... parts) -> ffi::Error {
  Model model{parts...};
  if (ffi::Error error = model.check(); error.failure()) return error;
  Chains chains = chains_of(tokens, starts, pending, counts, drafts);
  return by_dtype(model.final_norm.element_type(), [&](auto tag) {
    using T = decltype(tag);
    run_chains(pool, model.step<T>(nullptr, nullptr, 0), chains);
    return ffi::Error::Success();
  });
};

// The same of an EAGLE-3 head, in the order of `bind_head`.
struct HeadModel {
  Any hidden_norm;
  int64_t own_entries;  // those that `head` has logits of
  bool norm_before_residual, norm_output;
  Model model;

  template <typename T>
  Head<T> head(const int32_t* slots, const int32_t* positions, int64_t live) const {
    Step<T> step = model.step<T>(slots, positions, live);
    step.layers[0].qkv.K *= 2;  // Token and feature, side by side.
    step.head.N = own_entries;
    return {step, data<T>(hidden_norm), norm_before_residual, norm_output};
  }
};

template <typename Binding>
auto bind_head(Binding own) {
  return bind_model(std::move(own)
                        .template Arg<Any>()  // hidden_norm
                        .template Attr<int64_t>("own_entries")
                        .template Attr<bool>("norm_before_residual")
                        .template Attr<bool>("norm_output"));
}

template <typename... Parts>
HeadModel head_model(Any hidden_norm, int64_t own_entries, bool norm_before_residual,
                     bool norm_output, Parts... parts) {
  return {hidden_norm, own_entries, norm_before_residual, norm_output, {parts...}};
}

constexpr auto RunHeadStep = [](ffi::ThreadPool pool, Ints tokens, Ints slots,
                                Ints positions, Scalar num_active, Ints branch,
                                Any features, ffi::Result<Floats> logits, Result next,
                                auto... parts) -> ffi::Error {
  HeadModel model = head_model(parts...);
  if (ffi::Error error = model.model.check(); error.failure()) return error;
  int64_t live = live_rows(num_active, tokens.element_count());
  return by_dtype(features.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Head<T> head = model.head<T>(slots.typed_data(), positions.typed_data(), live);
    head.step.tokens = tokens.typed_data();
    head.step.rows = with_branch(head.step.rows, branch);
    head.step.logits = logits->typed_data();
    Team<ffi::ThreadPool> team(pool);
    run_head(team, head, data<T>(features), data<T>(next));
    return ffi::Error::Success();
  });
};

constexpr auto RunHeadChains = [](ffi::ThreadPool pool, Ints tokens, Ints starts,
                                  Ints pending, Ints counts, Any features, Ints names,
                                  ffi::Result<Ints> drafts, auto... parts) -> ffi::Error {
  HeadModel model = head_model(parts...);
  if (ffi::Error error = model.model.check(); error.failure()) return error;
  Chains chains = chains_of(tokens, starts, pending, counts, drafts);
  return by_dtype(features.element_type(), [&](auto tag) {
    using T = decltype(tag);
    const int32_t* of_own = names.element_count() > 0 ? names.typed_data() : nullptr;
    Head<T> head = model.head<T>(nullptr, nullptr, 0);
    run_head_chains(pool, head, chains, data<T>(features), of_own);
    return ffi::Error::Success();
  });
};

}  // namespace
}  // namespace spec_jax
