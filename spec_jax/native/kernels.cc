// CPU kernels of the row path, called through XLA's foreign function interface.
//
// Each computes its live rows independently of one another and stops after them: cost
// follows `num_live`. Dead rows of a result are zero. Work is split over weight rows or
// heads, never over the dimension that is summed, so that no result depends on the
// number of threads. Values are rounded to the model's dtype where the reference form
// of the op rounds, and nowhere else.

#include <vector>

#include "attention.h"
#include "gemm.h"
#include "parallel.h"
#include "simd.h"

namespace ffi = xla::ffi;

namespace spec_jax {
namespace {

template <typename T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

int64_t live_rows(const ffi::AnyBuffer& num_live, int64_t rows) {
  int64_t live = *data<int32_t>(num_live);
  return live < 0 ? 0 : live > rows ? rows : live;
}

// RMSNorm: the normalised value is rounded before it meets its weight.
template <typename T>
void rms_norm(const float* x, const T* weight, int64_t size, float eps, float* out) {
  Vec acc = zero();
  int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) acc = fma(load(x + i), load(x + i), acc);
  float square = sum(acc);
  for (int64_t i = whole; i < size; ++i) square = square + x[i] * x[i];
  float scale = 1.0f / std::sqrt(square / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) {
    float normed = to_float(round_to<T>(x[i] * scale));
    out[i] = to_float(round_to<T>(normed * to_float(weight[i])));
  }
}

// The live rows as the products read them: normed (unless `norm` is empty) and packed.
template <typename T>
std::vector<float> pack_rows(const T* x, const T* norm, bool has_norm, int64_t rows,
                             int64_t K, float eps) {
  std::vector<float> packed(rows * padded(K));
  std::vector<float> row(K), normed(K);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < K; ++k) row[k] = to_float(x[r * K + k]);
    if (has_norm) rms_norm(row.data(), norm, K, eps, normed.data());
    pack_row<T>(has_norm ? normed.data() : row.data(), K, &packed[r * padded(K)]);
  }
  return packed;
}

// Weight rows that one thread takes at a time: enough to be worth taking, few enough
// that the threads finish together.
int64_t chunk_size(int64_t N, int64_t K, int64_t item_bytes) {
  int64_t rows = 64 * 1024 / (K * item_bytes);
  rows = (rows + 7) / 8 * 8;
  return rows < 8 ? 8 : rows > N ? N : rows;
}

template <typename Body>
void over_columns(const ffi::ThreadPool& pool, int64_t N, int64_t K,
                  int64_t item_bytes, Body body) {
  int64_t chunk = chunk_size(N, K, item_bytes);
  parallel_for(pool, (N + chunk - 1) / chunk, [&](int64_t i) {
    body(i * chunk, std::min((i + 1) * chunk, N));
  });
}

template <typename T, typename Out>
void project(const ffi::ThreadPool& pool, const T* x, const T* norm, bool has_norm,
             const T* w, const T* residual, Out* y, int64_t rows, int64_t live,
             int64_t K, int64_t N, float eps) {
  std::vector<float> packed = pack_rows<T>(x, norm, has_norm, live, K, eps);
  over_columns(pool, N, K, sizeof(T), [&](int64_t n0, int64_t n1) {
    product(live, packed.data(), w, K, n0, n1, [&](int64_t r, int64_t n, float acc) {
      if (residual != nullptr) {
        float rounded = to_float(round_to<T>(acc));
        acc = to_float(residual[r * N + n]) + rounded;
      }
      y[r * N + n] = round_to<Out>(acc);
    });
  });
  std::memset(static_cast<void*>(y + live * N), 0, (rows - live) * N * sizeof(Out));
}

template <typename T>
void gate(const ffi::ThreadPool& pool, const T* x, const T* norm, const T* w, T* y,
          int64_t rows, int64_t live, int64_t K, int64_t F, float eps) {
  std::vector<float> packed = pack_rows<T>(x, norm, true, live, K, eps);
  std::vector<float> gates(live * F);
  over_columns(pool, F, 2 * K, sizeof(T), [&](int64_t f0, int64_t f1) {
    product(live, packed.data(), w, K, f0, f1, [&](int64_t r, int64_t f, float acc) {
      gates[r * F + f] = to_float(round_to<T>(acc));
    });
    product(live, packed.data(), w + F * K, K, f0, f1,
            [&](int64_t r, int64_t f, float acc) {
              float g = gates[r * F + f];
              float silu = to_float(round_to<T>(g / (1.0f + exp(-g))));
              y[r * F + f] = round_to<T>(silu * to_float(round_to<T>(acc)));
            });
  });
  std::memset(static_cast<void*>(y + live * F), 0, (rows - live) * F * sizeof(T));
}

struct Rows {
  const int32_t* table;  // [S, M]
  const int32_t* slots;  // [R]
  const int32_t* positions;
  int64_t num_slots, table_width, num_pages, page_size, live;

  // Whether every page of the row's prefix, its own included, exists.
  bool is_mapped(int64_t r) const {
    int64_t slot = slots[r], position = positions[r];
    if (slot < 0 || slot >= num_slots || position < 0) return false;
    if (position / page_size >= table_width) return false;
    for (int64_t m = 0; m <= position / page_size; ++m) {
      int32_t page = table[slot * table_width + m];
      if (page < 0 || page >= num_pages) return false;
    }
    return true;
  }
};

// Norm and rotation of one head: out [H]. `cos` and `sin` are rounded to T by the
// caller, and every product and sum is rounded, as the reference does.
template <typename T>
void rotate(const T* head, const T* norm, const float* cos, const float* sin, int64_t H,
            float eps, float* out) {
  float wide[kMaxHead], normed[kMaxHead];
  for (int64_t h = 0; h < H; ++h) wide[h] = to_float(head[h]);
  rms_norm(wide, norm, H, eps, normed);
  auto round = [](float x) { return to_float(round_to<T>(x)); };
  int64_t half = H / 2;
  for (int64_t h = 0; h < half; ++h) {
    float a = normed[h], b = normed[h + half];
    out[h] = round(round(a * cos[h]) - round(b * sin[h]));
    out[h + half] = round(round(b * cos[h]) + round(a * sin[h]));
  }
}

template <typename T>
void attend_head(int64_t kv_head, const T* heads, const T* q_norm, const T* k_norm,
                 const float* cos, const float* sin, const Rows& rows, T* k, T* v,
                 T* out, int64_t N, int64_t K, int64_t H, float scale, float eps) {
  int64_t G = N / K, width = (N + 2 * K) * H, half = H / 2;
  auto pages_of = [&](int64_t r) {
    return Pages{rows.table + rows.slots[r] * rows.table_width, rows.page_size, K * H,
                 kv_head * H};
  };
  for (int64_t r = 0; r < rows.live; ++r) {
    if (!rows.is_mapped(r)) continue;  // Dropped, as in the reference.
    int64_t at = pages_of(r).at(rows.positions[r]);
    float rotated[kMaxHead];
    rotate(heads + r * width + (N + kv_head) * H, k_norm, cos + r * half,
           sin + r * half, H, eps, rotated);
    for (int64_t h = 0; h < H; ++h) k[at + h] = round_to<T>(rotated[h]);
    std::memcpy(v + at, heads + r * width + (N + K + kv_head) * H, H * sizeof(T));
  }
  std::vector<Running> runs(G);
  std::vector<float> q(G * H), result(G * H);
  for (int64_t r = 0; r < rows.live; ++r) {
    T* to = out + r * N * H + kv_head * G * H;
    if (!rows.is_mapped(r)) {
      for (int64_t i = 0; i < G * H; ++i) to[i] = round_to<T>(NAN);
      continue;
    }
    for (int64_t g = 0; g < G; ++g) {
      rotate(heads + r * width + (kv_head * G + g) * H, q_norm, cos + r * half,
             sin + r * half, H, eps, &q[g * H]);
    }
    for (float& x : q) x *= scale;
    attend(q.data(), k, v, pages_of(r), rows.positions[r], G, H, runs.data(),
           result.data());
    for (int64_t i = 0; i < G * H; ++i) to[i] = round_to<T>(result[i]);
  }
}

template <typename F>
ffi::Error by_dtype(ffi::DataType dtype, F f) {
  if (dtype == ffi::DataType::BF16) return f(bf16{});
  if (dtype == ffi::DataType::F32) return f(float{});
  return ffi::Error::InvalidArgument("the kernels take float32 and bfloat16");
}

ffi::Error Project(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm,
                   ffi::AnyBuffer w, ffi::AnyBuffer residual, ffi::AnyBuffer num_live,
                   ffi::Result<ffi::AnyBuffer> y, float eps) {
  int64_t rows = x.dimensions()[0], K = x.dimensions()[1], N = w.dimensions()[0];
  int64_t live = live_rows(num_live, rows);
  return by_dtype(x.element_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* added = residual.element_count() ? data<T>(residual) : nullptr;
    auto run = [&](auto* out) {
      project<T>(pool, data<T>(x), data<T>(norm), norm.element_count() > 0, data<T>(w),
                 added, out, rows, live, K, N, eps);
    };
    if (y->element_type() == ffi::DataType::F32) {
      run(static_cast<float*>(y->untyped_data()));
    } else {
      run(static_cast<T*>(y->untyped_data()));
    }
    return ffi::Error::Success();
  });
}

ffi::Error Gate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer norm,
                ffi::AnyBuffer w, ffi::AnyBuffer num_live,
                ffi::Result<ffi::AnyBuffer> y, float eps) {
  int64_t rows = x.dimensions()[0], K = x.dimensions()[1], F = y->dimensions()[1];
  int64_t live = live_rows(num_live, rows);
  return by_dtype(x.element_type(), [&](auto tag) {
    using T = decltype(tag);
    gate<T>(pool, data<T>(x), data<T>(norm), data<T>(w),
            static_cast<T*>(y->untyped_data()), rows, live, K, F, eps);
    return ffi::Error::Success();
  });
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::AnyBuffer q_norm,
                  ffi::AnyBuffer k_norm, ffi::Buffer<ffi::F32> cos,
                  ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> positions,
                  ffi::AnyBuffer num_live, ffi::AnyBuffer k_in, ffi::AnyBuffer v_in,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k,
                  ffi::Result<ffi::AnyBuffer> v, float scale, float eps) {
  if (k_in.untyped_data() != k->untyped_data() ||
      v_in.untyped_data() != v->untyped_data()) {
    return ffi::Error::Internal("the pages must be updated in place");
  }
  auto pool_shape = k->dimensions();
  int64_t K = pool_shape[2], H = pool_shape[3];
  int64_t count = out->dimensions()[0], N = out->dimensions()[1] / H;
  if (H > kMaxHead) return ffi::Error::InvalidArgument("head size above 256");
  Rows rows{table.typed_data(),     slots.typed_data(), positions.typed_data(),
            table.dimensions()[0],  table.dimensions()[1],
            pool_shape[0],          pool_shape[1],
            live_rows(num_live, count)};
  return by_dtype(heads.element_type(), [&](auto tag) {
    using T = decltype(tag);
    T* result = static_cast<T*>(out->untyped_data());
    parallel_for(pool, K, [&](int64_t kv_head) {
      attend_head<T>(kv_head, data<T>(heads), data<T>(q_norm), data<T>(k_norm),
                     cos.typed_data(), sin.typed_data(), rows,
                     static_cast<T*>(k->untyped_data()),
                     static_cast<T*>(v->untyped_data()), result, N, K, H, scale, eps);
    });
    std::memset(static_cast<void*>(result + rows.live * N * H), 0,
                (count - rows.live) * N * H * sizeof(T));
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace spec_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_project, spec_jax::Project,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_gate, spec_jax::Gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(spec_jax_attend, spec_jax::Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("eps"));
