// CPU kernels of the row path, called through XLA's foreign function interface.
//
// Each computes its active rows independently of one another and stops after them: cost
// follows `num_active`. Padding rows of a result are zero. Shapes are checked by the caller
// (`calls.py`); no exception leaves a handler.

#include <algorithm>
#include <new>

#include "argmax.h"
#include "projection.h"
#include "row_attention.h"
#include "take_rows.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace spec_jax {
namespace {

using Scalar = ffi::BufferR0<ffi::S32>;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Any = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <typename T>
const T* data(const Any& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <typename T>
const T* data_or_null(const Any& buffer) {
  return buffer.element_count() > 0 ? data<T>(buffer) : nullptr;
}

template <typename T>
T* data(Result& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

int64_t live_rows(const Scalar& num_active, int64_t rows) {
  return std::clamp<int64_t>(*num_active.typed_data(), 0, rows);
}

// Runs `f(T{})` for the type of the model's arrays. Allocations happen in there.
template <typename F>
ffi::Error by_dtype(ffi::DataType dtype, F f) {
  try {
    if (dtype == ffi::DataType::BF16) return f(bf16{});
    if (dtype == ffi::DataType::F32) return f(float{});
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "no memory for the rows of a native kernel");
  }
  return ffi::Error::InvalidArgument("the kernels take float32 and bfloat16");
}

ffi::Error Project(ffi::ThreadPool pool, Any x, Any norm, Any w, Any residual,
                   Scalar num_active, Result y, float eps) {
  int64_t rows = x.dimensions()[0], K = x.dimensions()[1], N = w.dimensions()[0];
  int64_t live = live_rows(num_active, rows);
  return by_dtype(x.element_type(), [&](auto tag) {
    using T = decltype(tag);
    auto run = [&](auto* out) {
      project(pool, data<T>(x), data_or_null<T>(norm), data<T>(w),
              data_or_null<T>(residual), out, rows, live, K, N, eps);
      return ffi::Error::Success();
    };
    if (y->element_type() == ffi::DataType::F32) return run(data<float>(y));
    if (y->element_type() == x.element_type()) return run(data<T>(y));
    return ffi::Error::InvalidArgument("the result is neither float32 nor of x's type");
  });
}

ffi::Error Gate(ffi::ThreadPool pool, Any x, Any norm, Any w, Scalar num_active, Result y,
                float eps) {
  int64_t rows = x.dimensions()[0], K = x.dimensions()[1], F = y->dimensions()[1];
  int64_t live = live_rows(num_active, rows);
  return by_dtype(x.element_type(), [&](auto tag) {
    using T = decltype(tag);
    gate(pool, data<T>(x), data_or_null<T>(norm), data<T>(w), data<T>(y), rows, live, K,
         F, eps);
    return ffi::Error::Success();
  });
}

ffi::Error Attend(ffi::ThreadPool pool, Any heads, Any q_norm, Any k_norm, Floats cos,
                  Floats sin, Ints table, Ints slots, Ints positions, Scalar num_active,
                  Any k_in, Any v_in, Result out, Result k, Result v, float scale,
                  float eps) {
  if (k_in.untyped_data() != k->untyped_data() ||
      v_in.untyped_data() != v->untyped_data()) {
    return ffi::Error::Internal("the pages must be updated in place");
  }
  auto shape = k->dimensions();
  int64_t K = shape[2], H = shape[3];
  if (H < 1 || H > kMaxHead || H % 2 != 0) {
    return ffi::Error::InvalidArgument("head sizes are even, and 256 at most");
  }
  int64_t num_rows = out->dimensions()[0], N = out->dimensions()[1] / H;
  Rows rows{table.typed_data(),    slots.typed_data(),    positions.typed_data(),
            table.dimensions()[0], table.dimensions()[1], shape[0],
            shape[1],              live_rows(num_active, num_rows)};
  return by_dtype(heads.element_type(), [&](auto tag) {
    using T = decltype(tag);
    Layer<T> layer{data<T>(heads),   data<T>(q_norm), data<T>(k_norm),
                   cos.typed_data(), sin.typed_data(), data<T>(k),
                   data<T>(v),       data<T>(out),     N,
                   K,                H,                scale,
                   eps};
    attend_rows(pool, layer, rows, num_rows);
    return ffi::Error::Success();
  });
}

// In one piece and on this thread: a slab's rows are a few kilobytes.
ffi::Error TakeRows(Any table, Ints index, Scalar num_active, Result y) {
  int64_t rows = index.element_count(), entries = table.dimensions()[0];
  int64_t live = live_rows(num_active, rows);
  return by_dtype(table.element_type(), [&](auto tag) {
    using T = decltype(tag);
    take_rows(data<T>(table), index.typed_data(), data<T>(y), rows, live, entries,
              table.dimensions()[1]);
    return ffi::Error::Success();
  });
}

ffi::Error Argmax(ffi::ThreadPool pool, Floats x, Scalar num_active,
                  ffi::Result<Ints> out) {
  int64_t rows = x.dimensions()[0], N = x.dimensions()[1];
  return by_dtype(ffi::DataType::F32, [&](auto) {
    argmax(pool, x.typed_data(), out->typed_data(), rows, live_rows(num_active, rows), N);
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace spec_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_project, spec_jax::Project,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // norm
                                  .Arg<ffi::AnyBuffer>()  // w
                                  .Arg<ffi::AnyBuffer>()  // residual
                                  .Arg<spec_jax::Scalar>()  // num_active
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_gate, spec_jax::Gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // norm
                                  .Arg<ffi::AnyBuffer>()  // w
                                  .Arg<spec_jax::Scalar>()  // num_active
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_attend, spec_jax::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // heads
                                  .Arg<ffi::AnyBuffer>()  // q_norm
                                  .Arg<ffi::AnyBuffer>()  // k_norm
                                  .Arg<spec_jax::Floats>()  // cos
                                  .Arg<spec_jax::Floats>()  // sin
                                  .Arg<spec_jax::Ints>()  // page_table
                                  .Arg<spec_jax::Ints>()  // slots
                                  .Arg<spec_jax::Ints>()  // positions
                                  .Arg<spec_jax::Scalar>()  // num_active
                                  .Arg<ffi::AnyBuffer>()  // k_pages
                                  .Arg<ffi::AnyBuffer>()  // v_pages
                                  .Ret<ffi::AnyBuffer>()  // attended
                                  .Ret<ffi::AnyBuffer>()  // k_pages
                                  .Ret<ffi::AnyBuffer>()  // v_pages
                                  .Attr<float>("scale")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_take_rows, spec_jax::TakeRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // table
                                  .Arg<spec_jax::Ints>()  // index
                                  .Arg<spec_jax::Scalar>()  // num_active
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_argmax, spec_jax::Argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<spec_jax::Floats>()  // x
                                  .Arg<spec_jax::Scalar>()  // num_active
                                  .Ret<spec_jax::Ints>());
