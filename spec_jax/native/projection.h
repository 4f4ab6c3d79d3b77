// Projections of the active rows: an optional norm before, a residual or a gate after.
//
// Work is split over outputs, never over the dimension that is summed, so that no result
// depends on the number of threads. Values are rounded to the model's dtype where the
// reference form of the op rounds, and nowhere else.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "byte_blocks.h"
#include "gemm.h"
#include "panels.h"
#include "scratch.h"
#include "side_by_side.h"
#include "simd.h"
#include "team.h"

namespace spec_jax {

// Rows of a product that each worker norms for itself, which takes less time than to wait
// for another; more are shared out, and multiplied by all.
constexpr int64_t kAlone = 2 * kGroup;

// A team, and the rows that it multiplies.
template <typename Pool, typename T>
struct Workers {
  struct Worker {
    SideBySide<T> rows;
    Scratch<T> normed;  // a group of them
    int64_t holds = 0;  // the product that `rows` were set for
  };

  Team<Pool>& team;
  std::vector<Worker> all;
  SideBySide<T> shared;
  int64_t products = 0;

  // For products of up to `rows` rows of up to K elements.
  Workers(Team<Pool>& team, int64_t rows, int64_t K)
      : team(team), shared(rows > kAlone ? rows : 0, K) {
    for (int64_t i = 0; i < team.size(); ++i) {
      all.push_back({SideBySide<T>(std::min(rows, kAlone), K), Scratch<T>(kMostRows<T> * K)});
    }
  }
};

constexpr int64_t kGrainBytes = 32 * 1024;  // of weights that are worth a thread's while
constexpr int64_t kMostGrain = 16;          // panels

// Calls `body(first, size, begin, end, rows)` for each group of the rows and the panels
// [0, count) of such as `w`, some at a time: groups innermost, so that all find the weights
// in a cache.
template <typename Pool, typename T, typename Body>
void over_panels(Workers<Pool, T>& workers, const Input<T>& input, const Panels<T>& w,
                 int64_t count, const Body& body) {
  if (input.rows == 0) return;
  bool shares = input.rows > kAlone, is_bytes = w.blocks != nullptr;
  if (shares) {
    workers.shared.begin(input.rows, w.K, is_bytes);
    workers.team.run(workers.shared.num_groups(), 1, [&](int64_t i, int64_t, int64_t number) {
      set_group(input, w.K, i, workers.all[number].normed.data(), workers.shared);
    });
  }
  int64_t panel = std::max<int64_t>(w.panel_bytes(), 1);
  int64_t grain = std::clamp<int64_t>(kGrainBytes / panel / 4 * 4, 4, kMostGrain);
  int64_t product = ++workers.products;
  workers.team.run(count, grain, [&](int64_t begin, int64_t end, int64_t number) {
    auto& worker = workers.all[number];
    SideBySide<T>& rows = shares ? workers.shared : worker.rows;
    if (!shares && worker.holds != product) {
      rows.begin(input.rows, w.K, is_bytes);
      for (int64_t i = 0; i < rows.num_groups(); ++i) {
        set_group(input, w.K, i, worker.normed.data(), rows);
      }
      worker.holds = product;
    }
    rows.for_each_group([&](int64_t first, int64_t size) {
      body(first, size, begin, end, rows);
    });
  });
}

// sums [size, stride] = the group of rows at `first` by the panels [begin, end) of w, after
// which those from `next` on are read.
template <typename T>
void multiply(const SideBySide<T>& rows, int64_t first, int64_t size, const Panels<T>& w,
              int64_t begin, int64_t end, float* sums, int64_t stride, int64_t next) {
  if (w.blocks == nullptr) {
    return multiply(rows.group(first, size), w.panel(begin), end - begin, w.words(), sums,
                    stride, w.panel(next));
  }
  auto multiply_blocks = w.is_four ? multiply_bytes<true> : multiply_bytes<false>;
  multiply_blocks(rows.group_of_bytes(first), size, w.panel_of_blocks(begin), end - begin,
                  w.pairs(), sums, stride, (next - end) * w.panel_bytes());
}

constexpr int64_t kStride = kMostGrain * kPanel;

// y [rows, N] = residual + round(sums); `make(rows, first, size, begin, end, sums)` makes
// those [size, kStride] of a group by panels such as `w` has. `residual` may be null, or y.
// The rows of y are `stride` apart, unless it is 0.
template <typename Pool, typename T, typename Out, typename Make>
void write_sums(Workers<Pool, T>& workers, const Input<T>& input, const Panels<T>& w,
                Out* y, const T* residual, int64_t stride, const Make& make) {
  if (stride == 0) stride = w.N;
  auto body = [&](int64_t first, int64_t size, int64_t begin, int64_t end,
                  const SideBySide<T>& rows) {
    alignas(64) float sums[kMostRows<T> * kStride];
    make(rows, first, size, begin, end, sums);
    int64_t from = begin * kPanel, to = std::min(end * kPanel, w.N);
    for (int64_t r = 0; r < size; ++r) {
      Out* out = y + (first + r) * stride;
      for (int64_t n = from; n < to; n += kLanes) {
        Vec value = load(sums + r * kStride + n - from);
        if (residual != nullptr) {
          Vec kept = load_lanes(residual + (first + r) * w.N + n, to - n);
          value = add(kept, round_lanes<T>(value));
        }
        store_lanes(out + n, to - n, value);
      }
    }
  };
  over_panels(workers, input, w, w.count(), body);
}

// y [rows, N] = residual + round(norm(x) w^T), as `write_sums` has it. (T is deduced from
// the weights, so that a residual may be `nullptr`.)
template <typename Pool, typename T, typename Out>
void project(Workers<Pool, T>& workers, const Input<T>& input, const Panels<T>& w, Out* y,
             const std::common_type_t<T>* residual = nullptr, int64_t stride = 0) {
  write_sums(workers, input, w, y, residual, stride,
             [&](const SideBySide<T>& rows, int64_t first, int64_t size, int64_t begin,
                 int64_t end, float* sums) {
    multiply(rows, first, size, w, begin, end, sums, kStride, end);
  });
}

// sums [rows, kStride] = the products of `count` segments of the rows' words, by the panels
// [begin, end) of as many matrices, added in a balanced tree.
template <typename T>
void add_segments(const RowGroup<T>& x, const Panels<T>* w, int64_t count, int64_t begin,
                  int64_t end, float* sums) {
  if (count == 1) {
    return multiply(x, w->panel(begin), end - begin, w->words(), sums, kStride);
  }
  int64_t half = count / 2;
  alignas(64) float others[kMostRows<T> * kStride];
  add_segments(x, w, half, begin, end, sums);
  RowGroup<T> rest{x.words, x.size, x.first + half * w->words()};
  add_segments(rest, w + half, half, begin, end, others);
  for (int64_t r = 0; r < x.size; ++r) {
    for (int64_t n = 0; n < (end - begin) * kPanel; n += kLanes) {
      float* at = sums + r * kStride + n;
      store(at, add(load(at), load(others + r * kStride + n)));
    }
  }
}

// y [rows, N] = sum_s x_s w_s^T in a balanced tree: each matrix has N outputs, and its own
// K elements, whole words, of each row. Their number is a power of two.
template <typename Pool, typename T>
void project_segments(Workers<Pool, T>& workers, const Input<T>& input,
                      const std::vector<Panels<T>>& w, float* y) {
  Panels<T> all = w[0];  // Its sizes are those of all segments beside each other.
  all.K *= static_cast<int64_t>(w.size());
  const T* none = nullptr;
  write_sums(workers, input, all, y, none, 0,
             [&](const SideBySide<T>& rows, int64_t first, int64_t size, int64_t begin,
                 int64_t end, float* sums) {
    add_segments(rows.group(first, size), w.data(), w.size(), begin, end, sums);
  });
}

// y [rows, F] = swiglu(round(norm(x) w^T)); the gate's weights are the first F of w.
template <typename Pool, typename T>
void gate(Workers<Pool, T>& workers, const Input<T>& input, const Panels<T>& w, T* y) {
  int64_t F = w.N / 2;
  auto body = [&](int64_t first, int64_t size, int64_t begin, int64_t end,
                  const SideBySide<T>& rows) {
    constexpr int64_t kStride = (kMostGrain + 1) * kPanel;
    alignas(64) float gates[kMostRows<T> * kStride], ups[kMostRows<T> * kStride];
    int64_t from = begin * kPanel, to = std::min(end * kPanel, F);
    // The weights of `up` need not begin with a panel.
    int64_t up = (F + from) / kPanel, last = panels_of(F + to);
    int64_t shift = (F + from) % kPanel;
    multiply(rows, first, size, w, begin, end, gates, kStride, up);
    multiply(rows, first, size, w, up, last, ups, kStride, end);
    for (int64_t r = 0; r < size; ++r) {
      T* out = y + (first + r) * F;
      for (int64_t f = from; f < to; f += kLanes) {
        int64_t at = r * kStride + f - from;
        Vec g = round_lanes<T>(load(gates + at));
        Vec u = round_lanes<T>(load_lanes(ups + at + shift, to - f));
        Vec silu = divide(g, add(broadcast(1.0f), exp(subtract(zero(), g))));
        store_lanes(out + f, to - f, mul(round_lanes<T>(silu), u));
      }
    }
  };
  over_panels(workers, input, w, panels_of(F), body);
}

}  // namespace spec_jax
