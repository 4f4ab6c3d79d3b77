// What a block drafter does in a round, as it is called through XLA.

#pragma once

#include <cstdint>
#include <utility>

#include "block_step.h"
#include "buffers.h"
#include "team.h"

namespace spec_jax {
namespace {

// The buffers of a layer, among a call's arguments after those that it names.
enum BlockBuffer { kBlockInputNorm, kBlockQ, kBlockKv, kBlockQNorm, kBlockKNorm,
                   kBlockAttentionOut, kBlockMlpNorm, kBlockGateUp, kBlockDown,
                   kBlockKeys, kBlockValues, kBlockBuffers };

// A drafter but for its rows: the last arguments of a call, the pages among its results,
// and attributes, in the order of `bind_block`.
struct BlockModel {
  Ints table;
  Floats cos, sin;
  ffi::RemainingArgs rest;  // of each layer, see BlockBuffer
  ffi::RemainingRets pages;
  int64_t width, num_heads, mlp_size;
  float scale, eps;

  Any at(int64_t layer, int64_t which) const {
    return *rest.get<Any>(layer * kBlockBuffers + which);
  }
  int64_t num_layers() const { return rest.size() / kBlockBuffers; }

  ffi::Error check() const {
    for (int64_t i = 0; i < num_layers(); ++i) {
      for (int j : {0, 1}) {
        auto out = *pages.get<Any>(2 * i + j);
        if (at(i, kBlockKeys + j).untyped_data() != out->untyped_data()) {
          return ffi::Error::Internal("the pages must be updated in place");
        }
      }
    }
    return check_head_size(at(0, kBlockKeys).dimensions()[3]);
  }

  template <typename T>
  Blocks<T> block(Ints slots, Ints positions, Scalar num_active) const {
    auto shape = at(0, kBlockKeys).dimensions();
    int64_t K = shape[2], H = shape[3], N = num_heads * H;
    Blocks<T> block{};
    block.rows = {table.typed_data(),
                  slots.typed_data(),
                  positions.typed_data(),
                  table.dimensions()[0],
                  table.dimensions()[1],
                  shape[0],
                  shape[1],
                  live_rows(num_active, slots.element_count())};
    block.cos = cos.typed_data();
    block.sin = sin.typed_data();
    block.N = num_heads;
    block.K = K;
    block.H = H;
    block.scale = scale;
    block.eps = eps;
    for (int64_t i = 0; i < num_layers(); ++i) {
      auto vector = [&](int64_t which) { return data<T>(at(i, which)); };
      auto matrix = [&](int64_t which, int64_t rows, int64_t columns) {
        return panels<T>(at(i, which), rows, columns);
      };
      auto pool = [&](int64_t which) { return static_cast<T*>(at(i, which).untyped_data()); };
      block.layers.push_back({vector(kBlockInputNorm), vector(kBlockQNorm),
                              vector(kBlockKNorm), vector(kBlockMlpNorm),
                              matrix(kBlockQ, N, width), matrix(kBlockKv, 2 * K * H, width),
                              matrix(kBlockAttentionOut, width, N),
                              matrix(kBlockGateUp, 2 * mlp_size, width),
                              matrix(kBlockDown, width, mlp_size), pool(kBlockKeys),
                              pool(kBlockValues)});
    }
    return block;
  }
};

template <typename Binding>
auto bind_block(Binding own) {
  return std::move(own)
      .template Arg<Ints>()    // page_table
      .template Arg<Floats>()  // cos
      .template Arg<Floats>()  // sin
      .RemainingArgs()         // of each layer
      .RemainingRets()         // keys and values of each layer
      .template Attr<int64_t>("width")
      .template Attr<int64_t>("num_heads")
      .template Attr<int64_t>("mlp_size")
      .template Attr<float>("scale")
      .template Attr<float>("eps");
}

constexpr auto AppendContext = [](ffi::ThreadPool pool, Any features, Ints slots,
                                  Ints positions, Scalar num_active, Any fc,
                                  Any hidden_norm, auto... parts) -> ffi::Error {
  BlockModel model{parts...};
  if (ffi::Error error = model.check(); error.failure()) return error;
  return by_dtype(features.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Team<ffi::ThreadPool> team(pool);
    append_context(team, model.block<T>(slots, positions, num_active), data<T>(features),
                   panels<T>(fc, model.width, features.dimensions()[1]),
                   data<T>(hidden_norm));
    return ffi::Error::Success();
  });
};

constexpr auto RunBlocks = [](ffi::ThreadPool pool, Ints tokens, Ints slots, Ints positions,
                              Scalar num_active, Any embed, Any final_norm, Any head,
                              Result hidden, ffi::Result<Floats> logits, int64_t block_size,
                              int64_t entries, auto... parts) -> ffi::Error {
  BlockModel model{parts...};
  if (ffi::Error error = model.check(); error.failure()) return error;
  return by_dtype(final_norm.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Team<ffi::ThreadPool> team(pool);
    run_blocks(team, model.block<T>(slots, positions, num_active), block_size,
               tokens.typed_data(), table_of<T>(embed, entries, model.width),
               data<T>(final_norm),
               panels<T>(head, logits->dimensions()[1], model.width), data<T>(hidden),
               logits->typed_data());
    return ffi::Error::Success();
  });
};

ffi::Error RunSlots(ffi::ThreadPool pool, Floats logits, Ints anchors, Ints counts,
                    Ints names, Any embed, Any out, ffi::Result<Ints> drafts,
                    int64_t entries, int64_t rank) {
  auto shape = logits.dimensions();
  SlotChains chains{logits.typed_data(), anchors.typed_data(), counts.typed_data(),
                    names.element_count() > 0 ? names.typed_data() : nullptr,
                    shape[0],            shape[1],             shape[2],
                    drafts->typed_data()};
  return by_dtype(out.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Panels<T> w{data_or_null<T>(out), chains.N, rank};
    Team<ffi::ThreadPool> team(pool);
    run_slots(team, table_of<T>(embed, entries, rank), w, chains);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace spec_jax
