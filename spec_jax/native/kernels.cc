// CPU kernels of the row path, called through XLA's foreign function interface.
//
// Kernels of rows compute the active ones alone: cost follows `num_active`. Padding
// rows of a result are not written, except that they are zeros in a step's features, an
// argmax and a draw. Callers check shapes; handlers do not throw.

#include "argmax.h"
#include "buffers.h"
#include "children.h"
#include "look_up.h"
#include "move.h"
#include "projection.h"
#include "row_attention.h"
#include "step_calls.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {
namespace {

// Calls `run(workers, input, tag)` with the active rows of a product, and who multiplies
// them; the tag is of the rows' dtype. `norm` may be null.
template <typename Run>
ffi::Error with_rows(ffi::ThreadPool& pool, const Any& x, const Any* norm, float eps,
                     const Scalar& num_active, const Run& run) {
  int64_t live = live_rows(num_active, x.dimensions()[0]);
  return with_team(pool, x.element_type(), [&](auto& team, auto tag) {
    using T = decltype(tag);
    Workers<ffi::ThreadPool, T> workers(team, live, x.dimensions()[1]);
    const T* weight = norm == nullptr ? nullptr : data_or_null<T>(*norm);
    run(workers, Input<T>{data<T>(x), weight, eps, live}, tag);
  });
}

ffi::Error Project(ffi::ThreadPool pool, Any x, Any norm, Any w, Any residual,
                   Scalar num_active, Result y, float eps) {
  int64_t K = x.dimensions()[1], N = y->dimensions()[1];
  bool is_wide = y->element_type() == ffi::DataType::F32;
  if (!is_wide && y->element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("the result is neither float32 nor of x's type");
  }
  return with_rows(pool, x, &norm, eps, num_active,
                   [&](auto& workers, const auto& input, auto tag) {
    using T = decltype(tag);
    auto run = [&](auto* out) {
      project(workers, input, panels<T>(w, N, K), out, data_or_null<T>(residual));
    };
    is_wide ? run(data<float>(y)) : run(data<T>(y));
  });
}

ffi::Error ProjectSegments(ffi::ThreadPool pool, Any x, Scalar num_active,
                           ffi::RemainingArgs w, ffi::Result<Floats> y) {
  int64_t K = x.dimensions()[1], N = y->dimensions()[1], count = w.size();
  return with_rows(pool, x, nullptr, 0.0f, num_active,
                   [&](auto& workers, const auto& input, auto tag) {
    using T = decltype(tag);
    std::vector<Panels<T>> each;
    for (int64_t i = 0; i < count; ++i) {
      each.push_back(panels<T>(*w.get<Any>(i), N, K / count));
    }
    project_segments(workers, input, each, y->typed_data());
  });
}

ffi::Error Gate(ffi::ThreadPool pool, Any x, Any norm, Any w, Scalar num_active, Result y,
                float eps) {
  int64_t K = x.dimensions()[1], F = y->dimensions()[1];
  return with_rows(pool, x, &norm, eps, num_active,
                   [&](auto& workers, const auto& input, auto tag) {
    using T = decltype(tag);
    gate(workers, input, panels<T>(w, 2 * F, K), data<T>(y));
  });
}

ffi::Error Attend(ffi::ThreadPool pool, Any heads, Any q_norm, Any k_norm, Floats cos,
                  Floats sin, Ints table, Ints slots, Ints positions, Scalar num_active,
                  Ints branch, Ints firsts, ffi::RemainingArgs pages_in, Result out,
                  ffi::RemainingRets pages_out, float scale, float eps) {
  Pools pages{pages_in, pages_out};
  if (ffi::Error error = pages.check(); error.failure()) return error;
  auto shape = pages[0].dimensions();
  int64_t K = shape[2], H = shape[3], N = out->dimensions()[1] / H;
  if (ffi::Error error = check_head_size(H); error.failure()) return error;
  Rows rows = rows_of(page_table(table, pages[0]), slots, positions, num_active, branch);
  rows.firsts = data_or_null(firsts);
  return with_team(pool, heads.element_type(), [&](auto& team, auto tag) {
    using T = decltype(tag);
    Layer<T> layer{data<T>(heads),   data_or_null<T>(q_norm), data_or_null<T>(k_norm),
                   cos.typed_data(), sin.typed_data(), pages.data<T>(0),
                   pages.data<T>(1), data<T>(out),     N,
                   K,                H,                scale,
                   eps};
    Attention<ffi::ThreadPool, T>(team, rows, K, N / K, H).run(layer);
  });
}

ffi::Error Pack(ffi::ThreadPool pool, Any w, Result out) {
  constexpr int64_t kSome = 8;  // panels
  int64_t N = w.dimensions()[0], K = w.dimensions()[1];
  return with_team(pool, w.element_type(), [&](auto& team, auto tag) {
    using T = decltype(tag);
    int64_t size = words_of<T>(K) * kPanel * kWord<T>;
    team.run(panels_of(N), kSome, [&](int64_t i, int64_t end, int64_t) {
      for (; i < end; ++i) pack_panel(data<T>(w), N, K, i, data<T>(out) + i * size);
    });
  });
}

// Works in one piece and on this thread: a slab's rows are a few kilobytes.
ffi::Error TakeRows(Any table, Ints index, Scalar num_active, Result y, int64_t entries) {
  int64_t live = live_rows(num_active, index.element_count());
  return by_dtype(y->element_type(), [&](auto tag) {
    using T = decltype(tag);
    Table<T> from = table_of<T>(table, entries, y->dimensions()[1]);
    take_rows(from, index.typed_data(), data<T>(y), live);
  });
}

// Works in one piece and on this thread, as above.
ffi::Error Move(Ints table, Ints slots, Ints sources, Ints targets,
                ffi::Buffer<ffi::PRED> moves, ffi::RemainingArgs pages_in,
                ffi::RemainingRets pages_out) {
  Pools pages{pages_in, pages_out};
  if (ffi::Error error = pages.check(); error.failure()) return error;
  auto shape = pages[0].dimensions();
  Moves which{page_table(table, pages[0]), slots.typed_data(), sources.typed_data(),
              targets.typed_data(), moves.typed_data(),
              static_cast<int64_t>(slots.element_count())};
  return by_dtype(pages[0].element_type(), [&](auto tag) {
    using T = decltype(tag);
    std::vector<T*> pools;
    for (int64_t i = 0; i < pages.size(); ++i) pools.push_back(pages.data<T>(i));
    move_rows(which, pools, shape[2] * shape[3]);
  });
}

ffi::Error Argmax(ffi::ThreadPool pool, Floats x, Scalar num_active,
                  ffi::Result<Ints> out) {
  int64_t rows = x.dimensions()[0], N = x.dimensions()[1];
  return with_team(pool, x.element_type(), [&](auto& team, auto) {
    argmax(team, x.typed_data(), out->typed_data(), rows, live_rows(num_active, rows), N);
  });
}

ffi::Error DrawTokens(ffi::ThreadPool pool, Floats logits, ffi::Buffer<ffi::PRED> asked,
                      ffi::Result<Ints> tokens, Floats how, Ints integers,
                      int64_t vocabulary, bool is_independent) {
  int64_t rows = logits.dimensions()[0], N = logits.dimensions()[1];
  DrawCall draws{how, integers, vocabulary, is_independent};
  return with_team(pool, logits.element_type(), [&](auto& team, auto) {
    draw_tokens(team, draws.draws(), logits.typed_data(), asked.typed_data(), rows, N,
                tokens->typed_data());
  });
}

ffi::Error FindChildren(ffi::ThreadPool pool, Floats logits, Ints counts, Ints numbers,
                        Ints names, ffi::Result<Floats> scores, ffi::Result<Ints> tokens,
                        float tau, Floats how, Ints integers, int64_t vocabulary,
                        bool is_independent) {
  auto shape = logits.dimensions();
  DrawCall draws{how, integers, vocabulary, is_independent};
  ChildRows rows{logits.typed_data(), counts.typed_data(), numbers.typed_data(),
                 data_or_null(names), shape[0], shape[1], shape[2],
                 scores->dimensions()[2], tau, scores->typed_data(),
                 tokens->typed_data(), draws.draws()};
  return with_team(pool, logits.element_type(),
                   [&](auto& team, auto) { best_children(team, rows); });
}

ffi::Error LookUp(Ints tokens, Scalar length, Scalar gamma, Ints corpus, Ints budgets,
                  ffi::Result<Ints> drafts, ffi::Result<Scalar> num_drafted,
                  ffi::Result<Floats> survival, ffi::Result<ffi::BufferR0<ffi::F32>> score,
                  float min_probability) {
  int64_t most = drafts->element_count();
  auto bounded = [](const Scalar& value, int64_t most) {
    return std::clamp<int64_t>(*value.typed_data(), 0, most);
  };
  PathRule rule{budgets.typed_data(), static_cast<int64_t>(budgets.element_count()),
                static_cast<int32_t>(bounded(gamma, most)), min_probability};
  return by_dtype(ffi::DataType::F32, [&](auto) {
    Path path;
    if (rule.most > 0) {
      path = look_up(tokens.typed_data(), bounded(length, tokens.element_count()),
                     corpus.typed_data(), corpus.element_count(), rule);
    }
    int64_t count = path.tokens.size();
    std::fill_n(std::copy_n(path.tokens.data(), count, drafts->typed_data()),
                most - count, 0);
    std::fill_n(std::copy_n(path.survival.data(), count, survival->typed_data()),
                most - count, 0.0f);
    *num_drafted->typed_data() = static_cast<int32_t>(count);
    *score->typed_data() = path.score;
  });
}

}  // namespace
}  // namespace spec_jax

using namespace spec_jax;

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_pack, Pack, bind_to(Pack));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_project, Project, bind_to(Project, "eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_project_segments, ProjectSegments,
                              bind_to(ProjectSegments));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_gate, Gate, bind_to(Gate, "eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_attend, Attend, bind_to(Attend, "scale", "eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_take_rows, TakeRows, bind_to(TakeRows, "entries"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_move, Move, bind_to(Move));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_argmax, Argmax, bind_to(Argmax));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_draw, DrawTokens,
                              bind_to(DrawTokens, "vocabulary", "is_independent"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_children, FindChildren,
                              bind_to(FindChildren, "tau", "vocabulary",
                                      "is_independent"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_look_up, LookUp,
                              bind_to(LookUp, "min_probability"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_slots, RunSlots,
                              bind_to(RunSlots, "entries", "rank", "vocabulary",
                                      "is_independent"));

// The handlers below are generic lambdas: `bind_rows` and others bind their parameters.
using Pool = ffi::ThreadPool;
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spec_jax_step, RunStep,
    bind_model(bind_rows(bind<Pool, ffi::Result<Floats>, Result,
                              ffi::Span<const int64_t>>(ffi::Ffi::Bind(), "taps"))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_chains, RunChains,
                              bind_model(bind_chains(bind<Pool>(ffi::Ffi::Bind()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spec_jax_head_step, RunHeadStep,
    bind_head(bind_rows(bind<Pool, Any, ffi::Result<Floats>, Result>(ffi::Ffi::Bind()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spec_jax_head_chains, RunHeadChains,
    bind_head(bind_chains(bind<Pool, Any, Ints>(ffi::Ffi::Bind()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spec_jax_append_context, AppendContext,
    bind_model(bind_rows(bind<Pool, Any, Any, Any>(ffi::Ffi::Bind()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    spec_jax_blocks, RunBlocks,
    bind_model(bind_rows(bind<Pool, Result, ffi::Result<Floats>, int64_t>(
        ffi::Ffi::Bind(), "block_size"))));
