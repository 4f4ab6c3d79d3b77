// The calls of a block drafter in a round, through XLA.

#pragma once

#include <cstdint>

#include "block_step.h"
#include "buffers.h"
#include "step_calls.h"
#include "team.h"

namespace spec_jax {
namespace {

constexpr auto AppendContext = [](ffi::ThreadPool pool, Any features, Any fc,
                                  Any hidden_norm, auto... parts) -> ffi::Error {
  struct { RowCall rows; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows, [&](auto& team, const auto& step) {
    using T = element_of<decltype(step)>;
    append_context(team, step, data<T>(features),
                   panels<T>(fc, step.head.K, features.dimensions()[1]),
                   data<T>(hidden_norm));
  });
};

constexpr auto RunBlocks = [](ffi::ThreadPool pool, Result hidden,
                              ffi::Result<Floats> logits, int64_t block_size,
                              auto... parts) -> ffi::Error {
  struct { RowCall rows; Model model; } call{parts...};
  return with_step(pool, call.model, call.rows, [&](auto& team, auto step) {
    step.logits = logits->typed_data();
    run_blocks(team, step, block_size, data<element_of<decltype(step)>>(hidden));
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
                    names.element_count() > 0 ? names.typed_data() : nullptr,
                    shape[0],            shape[1],             shape[2],
                    drafts->typed_data(), draws.draws(data_or_null(log_weights), shape[1])};
  return by_dtype(embed.element_type(), [&](auto tag) {
    using T = decltype(tag);
    auto w = panels<T>(out, chains.N, rank);
    Mix<T> head{};
    if (gates > 0) {
      head = {panels<T>(mix, gates, width), data<T>(mix_bias), data<T>(hidden), D,
              hidden.dimensions()[1] - shape[1]};
    }
    Team<ffi::ThreadPool> team(pool);
    run_slots(team, table_of<T>(embed, entries, rank), w, head, chains);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace spec_jax
