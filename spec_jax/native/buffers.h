// XLA's buffers, as the types that the kernels work on.

#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "panels.h"
#include "row_attention.h"
#include "simd.h"
#include "take_rows.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace spec_jax {

using Scalar = ffi::BufferR0<ffi::S32>;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Any = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

template <typename T>
constexpr bool is_attribute = std::is_arithmetic_v<T>;
template <>
constexpr bool is_attribute<ffi::Span<const int64_t>> = true;
template <typename T>
constexpr bool is_result = false;
template <typename T>
constexpr bool is_result<ffi::Result<T>> = true;

// Binds one more parameter, by its type; the name is an attribute's.
template <typename T, typename Own>
auto bind_one(Own&& own, const char* name) {
  if constexpr (is_attribute<T>) {
    return std::move(own).template Attr<T>(name);
  } else if constexpr (std::is_same_v<T, ffi::ThreadPool>) {
    return std::move(own).template Ctx<T>();
  } else if constexpr (std::is_same_v<T, ffi::RemainingArgs>) {
    return std::move(own).RemainingArgs();
  } else if constexpr (std::is_same_v<T, ffi::RemainingRets>) {
    return std::move(own).RemainingRets();
  } else if constexpr (is_result<T>) {
    return std::move(own).template Ret<std::decay_t<decltype(*std::declval<T>())>>();
  } else {
    return std::move(own).template Arg<T>();
  }
}

template <typename T, typename... Rest, typename Own>
auto bind_all(Own&& own, const char* const* names) {
  if constexpr (sizeof...(Rest) == 0) {
    return bind_one<T>(std::move(own), *names);
  } else {
    return bind_all<Rest...>(bind_one<T>(std::move(own), *names),
                             names + is_attribute<T>);
  }
}

// Binds further parameters; the names are those of attributes among them, in order.
template <typename... Types, typename Own, typename... Names>
auto bind(Own&& own, Names... names) {
  static_assert((0 + ... + is_attribute<Types>) == sizeof...(Names));
  const char* each[] = {names..., nullptr};
  return bind_all<Types...>(std::move(own), each);
}

// Binds a handler by the parameters that it has.
template <typename... Types, typename... Names>
auto bind_to(ffi::Error (*)(Types...), Names... names) {
  return bind<Types...>(ffi::Ffi::Bind(), names...);
}

template <typename T>
const T* data(const Any& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <typename T>
const T* data_or_null(const Any& buffer) {
  return buffer.element_count() > 0 ? data<T>(buffer) : nullptr;
}

template <ffi::DataType kType>
auto* data_or_null(const ffi::Buffer<kType>& buffer) {
  return buffer.element_count() > 0 ? buffer.typed_data() : nullptr;
}

template <typename T>
T* data(Result& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

// The pools of pages that a kernel updates: its last arguments and its last results.
struct Pools {
  ffi::RemainingArgs arguments;
  ffi::RemainingRets results;

  int64_t size() const { return results.size(); }
  Any operator[](int64_t i) const {
    return *arguments.get<Any>(arguments.size() - size() + i);
  }
  template <typename T>
  T* data(int64_t i) const { return static_cast<T*>((*this)[i].untyped_data()); }

  ffi::Error check() const {
    for (int64_t i = 0; i < size(); ++i) {
      if ((*this)[i].untyped_data() != (*results.get<Any>(i))->untyped_data()) {
        return ffi::Error::Internal("the pages must be updated in place");
      }
    }
    return ffi::Error::Success();
  }
};

inline int64_t live_rows(const Scalar& num_active, int64_t rows) {
  return std::clamp<int64_t>(*num_active.typed_data(), 0, rows);
}

// Calls `f(T{})` with the type T of the model's arrays; `f` may run out of memory.
template <typename F>
ffi::Error by_dtype(ffi::DataType dtype, const F& f) {
  try {
    if (dtype == ffi::DataType::BF16) {
      f(bf16{});
    } else if (dtype == ffi::DataType::F32) {
      f(float{});
    } else {
      return ffi::Error::InvalidArgument("the kernels take float32 and bfloat16");
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "no memory for the rows of a native kernel");
  }
  return ffi::Error::Success();
}

// Calls `f(team, T{})` likewise, with a team of the pool's threads.
template <typename F>
ffi::Error with_team(ffi::ThreadPool& pool, ffi::DataType dtype, const F& f) {
  return by_dtype(dtype, [&](auto tag) {
    Team<ffi::ThreadPool> team(pool);
    f(team, tag);
  });
}

// Returns the panels [N, K] in a buffer; panels without data if the buffer is empty.
template <typename T>
Panels<T> panels(const Any& buffer, int64_t N, int64_t K) {
  if (buffer.element_type() != ffi::DataType::U8) return {data_or_null<T>(buffer), N, K};
  bool is_four = buffer.dimensions()[2] * kLineBytes == kPairBytes<true>;
  return {nullptr, N, K, data<uint8_t>(buffer), is_four};
}

// Returns the table [N, K] in a buffer of panels, or of rows.
template <typename T>
Table<T> table_of(const Any& buffer, int64_t N, int64_t K) {
  bool is_panels = buffer.dimensions().size() == 4;
  return {is_panels ? nullptr : data<T>(buffer), panels<T>(buffer, N, K)};
}

// Returns the table [S, M] of the pages of a pool [P, C, ..].
inline PageTable page_table(const Ints& table, const Any& pool) {
  return {table.typed_data(), table.dimensions()[0], table.dimensions()[1],
          pool.dimensions()[0], pool.dimensions()[1]};
}

// Returns rows; `branch` [R, width] is empty unless they are of trees.
inline Rows rows_of(const PageTable& table, const Ints& slots, const Ints& positions,
                    const Scalar& num_active, const Ints& branch) {
  return {table, slots.typed_data(), positions.typed_data(),
          live_rows(num_active, slots.element_count()), data_or_null(branch),
          branch.dimensions()[1]};
}

inline ffi::Error check_head_size(int64_t H) {
  if (H >= 1 && H <= kMaxHead && H % 2 == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("head sizes are even, and 256 at most");
}

}  // namespace spec_jax
