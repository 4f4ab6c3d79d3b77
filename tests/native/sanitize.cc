// The kernels over a grid of shapes, in buffers of exactly their size, against double.
//
// Built with the address and undefined-behaviour sanitizers and run for each
// instruction set. `sanitize overrun`, `sanitize undefined` and `sanitize late` commit
// one fault each, that the sanitizers must stop.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "projection.h"
#include "row_attention.h"
#include "take_rows.h"

namespace spec_jax {
namespace {

// The worst pool: helpers begin when the caller has long gone.
struct LatePool {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F task) { tasks.push_back(task); }
  ~LatePool() {
    for (auto& task : tasks) task();
  }
};

// Memory of its own for every array, so that a step outside is seen.
template <typename T>
struct Array {
  std::unique_ptr<T[]> owned;
  int64_t size;
  explicit Array(int64_t n) : owned(new T[n]), size(n) {}
  T* data() { return owned.get(); }
  T& operator[](int64_t i) { return owned[i]; }
};

std::mt19937 generator(0);

template <typename T>
Array<T> normal(int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> draw(0.0f, scale);
  Array<T> out(n);
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<T>(draw(generator));
  return out;
}

void expect(bool fine, const std::string& what) {
  if (fine) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::exit(1);
}

// What T may lose of a value when it is rounded.
template <typename T>
double unit() { return sizeof(T) == 2 ? 1.0 / 256 : 0.0; }

template <typename T>
std::string shape(const char* name, std::vector<int64_t> sizes) {
  std::string out = std::string(name) + (sizeof(T) == 2 ? " bf16" : " f32");
  for (int64_t size : sizes) out += " " + std::to_string(size);
  return out;
}

template <typename T>
void check_project(int64_t rows, int64_t live, int64_t K, int64_t N) {
  auto x = normal<T>(rows * K), w = normal<T>(N * K), residual = normal<T>(rows * N);
  Array<T> y(rows * N);
  Array<float> plain(rows * N);
  {
    LatePool pool;
    const T* none = nullptr;
    project(pool, x.data(), none, w.data(), residual.data(), y.data(), rows, live, K, N,
            0.0f);
    project(pool, x.data(), none, w.data(), none, plain.data(), rows, live, K, N, 0.0f);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0, terms = 0;
      for (int64_t k = 0; k < K && r < live; ++k) {
        double term = double{to_float(x[r * K + k])} * to_float(w[n * K + k]);
        sum += term;
        terms += std::abs(term);
      }
      double added = r < live ? to_float(residual[r * N + n]) : 0.0;
      auto what = shape<T>("project", {rows, live, K, N, r, n});
      expect(std::abs(plain[r * N + n] - sum) <= 1e-6 * terms, what);
      double rounded = unit<T>() * (std::abs(sum) + std::abs(sum + added));
      double allowed = 1e-6 * (terms + std::abs(added)) + rounded;
      expect(std::abs(to_float(y[r * N + n]) - sum - added) <= allowed, what);
    }
  }
}

// Norm and gate: in bounds; values are compared in Python.
template <typename T>
void check_gate(int64_t rows, int64_t live, int64_t K, int64_t F) {
  auto x = normal<T>(rows * K), w = normal<T>(2 * F * K), norm = normal<T>(K);
  Array<T> y(rows * F);
  LatePool pool;
  gate(pool, x.data(), norm.data(), w.data(), y.data(), rows, live, K, F, 1e-6f);
  for (int64_t i = 0; i < rows * F; ++i) {
    float value = to_float(y[i]);
    expect(i < live * F ? std::isfinite(value) : value == 0,
           shape<T>("gate", {rows, live, K, F, i}));
  }
}

// Softmax attention of one query in double, the pages being 0, 1, 2, ...
template <typename T>
void expect_attention(const float* q, T* k, T* v, int64_t position, int64_t stride,
                      int64_t H, const float* out, const std::string& what) {
  std::vector<double> scores(position + 1), sums(H);
  double maximum = -1e300, total = 0;
  for (int64_t t = 0; t <= position; ++t) {
    for (int64_t h = 0; h < H; ++h) scores[t] += q[h] * to_float(k[t * stride + h]);
    maximum = std::max(maximum, scores[t]);
  }
  for (double& score : scores) total += score = std::exp(score - maximum);
  for (int64_t t = 0; t <= position; ++t) {
    for (int64_t h = 0; h < H; ++h) sums[h] += scores[t] * to_float(v[t * stride + h]);
  }
  for (int64_t h = 0; h < H; ++h) {
    expect(std::abs(out[h] - sums[h] / total) < 1e-5, what);
  }
}

template <typename T>
void check_attend(int64_t G, int64_t H, int64_t page_size, int64_t position) {
  int64_t K = 2, num_pages = position / page_size + 1;
  int64_t size = num_pages * page_size * K * H;
  auto k = normal<T>(size), v = normal<T>(size);
  auto q = normal<float>(G * H, 0.2f);
  Array<int32_t> table(num_pages);
  for (int64_t m = 0; m < num_pages; ++m) table[m] = static_cast<int32_t>(m);
  Array<float> out(G * H);
  Queries queries(G, H);
  for (int64_t kv_head = 0; kv_head < K; ++kv_head) {
    Pages pages{table.data(), page_size, K * H, kv_head * H};
    queries.begin(G);
    for (int64_t g = 0; g < G; ++g) {
      queries.template set<T>(g, q.data() + g * H, position + 1);
    }
    for (int64_t start = 0; start <= position; start += kKeyBlock) {
      attend_block(queries, k.data(), v.data(), pages, start, position + 1);
    }
    for (int64_t g = 0; g < G; ++g) {
      queries.finish(g, out.data() + g * H);
      expect_attention(q.data() + g * H, k.data() + kv_head * H, v.data() + kv_head * H,
                       position, K * H, H, out.data() + g * H,
                       shape<T>("attend", {G, H, page_size, position}));
    }
  }
}

// A layer whose last active row has no page, and whose padding rows point anywhere.
template <typename T>
void check_layer(int64_t H, int64_t page_size, int32_t lost_slot, int32_t lost_at) {
  int64_t R = 5, live = 4, N = 4, K = 2, P = 3, S = 2, M = 2;
  auto heads = normal<T>(R * (N + 2 * K) * H), norm = normal<T>(H);
  auto angles = normal<float>(R * (H / 2));
  auto k = normal<T>(P * page_size * K * H), v = normal<T>(P * page_size * K * H);
  Array<T> out(R * N * H);
  Array<int32_t> table(S * M), slots(R), positions(R);
  int32_t pages[] = {2, 3, 0, 1}, at[] = {0, 0, 1, lost_at, 1 << 30};
  int32_t owners[] = {0, 1, 1, lost_slot, -7};
  std::memcpy(table.data(), pages, sizeof pages);
  std::memcpy(slots.data(), owners, sizeof owners);
  std::memcpy(positions.data(), at, sizeof at);
  Rows rows{table.data(), slots.data(), positions.data(), S, M, P, page_size, live};
  Layer<T> layer{heads.data(), norm.data(), norm.data(), angles.data(), angles.data(),
                 k.data(), v.data(), out.data(), N, K, H, 0.1f, 1e-6f};
  LatePool pool;
  attend_rows(pool, layer, rows, R);
  for (int64_t i = 0; i < R * N * H; ++i) {
    float value = to_float(out[i]);
    int64_t r = i / (N * H);
    expect(r < 3 ? std::isfinite(value) : r == 3 ? std::isnan(value) : value == 0,
           shape<T>("layer", {H, page_size, lost_slot, lost_at, i}));
  }
}

// Rows that point past either end of the table, live and dead.
template <typename T>
void check_take_rows(int64_t D) {
  auto table = normal<T>(3 * D);
  Array<int32_t> index(5);
  int32_t entries[] = {2, -1, 3, 0, 1 << 30};
  std::memcpy(index.data(), entries, sizeof entries);
  Array<T> out(5 * D);
  take_rows(table.data(), index.data(), out.data(), 5, 4, 3, D);
  for (int64_t i = 0; i < 5 * D; ++i) {
    int64_t r = i / D;
    float value = to_float(out[i]), from = to_float(table[(r == 0 ? 2 * D : 0) + i % D]);
    bool fine = r == 4 ? value == 0 : r % 3 == 0 ? value == from : std::isnan(value);
    expect(fine, shape<T>("take_rows", {D, i}));
  }
}

// Distance to the truth in units of the last place.
void check_exp() {
  double worst = 0;
  for (float x = -87.0f; x <= 0.0f; x += 0.00037f) {
    double truth = std::exp(double{x});
    float near = static_cast<float>(truth);
    double ulp = double{std::nextafter(near, 2.0f)} - near;
    worst = std::max(worst, std::abs(exp(x) - truth) / ulp);
  }
  expect(worst <= 2.0, "exp is off by " + std::to_string(worst) + " ulp");
  expect(exp(0.0f) == 1.0f, "exp of 0");
  float infinity = std::numeric_limits<float>::infinity();
  expect(exp(-infinity) == 0 && exp(-87.1f) == 0, "exp far below");
  expect(exp(infinity) == infinity && exp(89.0f) == infinity, "exp far above");
  expect(std::isnan(exp(std::nanf(""))), "exp of NaN");
}

template <typename T>
void check_grid() {
  for (int64_t K : {1, 7, 33, 80, 256}) {
    for (int64_t N : {1, 5, 13, 64}) {
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17}) {
        check_project<T>(rows, rows - (N == 5 && rows > 1), K, N);
      }
      check_gate<T>(3, 2, K, N);
    }
  }
  for (int64_t D : {1, 7, 64}) check_take_rows<T>(D);
  check_project<T>(3, 0, 7, 5);
  check_project<T>(3, 3, 0, 5);
  check_project<T>(3, 3, 7, 0);
  check_project<T>(2, 2, 48, 1500);  // several chunks
  for (int64_t H : {2, 16, 80, 128, 256}) {
    for (int64_t page_size : {1, 8, 16, 64}) {
      for (int64_t at : {int64_t{0}, page_size - 1, page_size, page_size + 1}) {
        check_attend<T>(H == 16 ? 16 : 2, H, page_size, at);
      }
      for (int64_t at : {30, 31, 32, 33, 70}) check_attend<T>(1, H, page_size, at);
    }
  }
  for (int64_t H : {16, 80}) {
    check_layer<T>(H, 8, 0, 9);  // page 3 of 3
    check_layer<T>(H, 8, 1, 16);  // past the table
    check_layer<T>(H, 8, 1, -1);
    check_layer<T>(H, 8, 2, 0);
    check_layer<T>(H, 8, -1, 0);
    check_layer<T>(H, 8, 1, std::numeric_limits<int32_t>::max());
  }
}

// A weight matrix that is one element short.
void overrun() {
  auto x = normal<float>(2 * 32), w = normal<float>(5 * 32 - 1);
  float y[kGroup * kPanel];
  const float* none = nullptr;
  multiply(pack_rows(x.data(), none, 2, 32, 0.0f), 0, w.data(), 32, 5,
           false, y);
}

// Arithmetic that overflows.
void undefined(volatile int32_t most) { std::printf("%d\n", most + 1); }

// A helper that reaches for the body of a loop that has ended.
void late() {
  LatePool pool;
  {
    auto body = std::make_unique<int>(1);
    pool.Schedule([address = body.get()] { *address = 2; });
  }
}

}  // namespace
}  // namespace spec_jax

int main(int count, char** arguments) {
  std::string fault = count > 1 ? arguments[1] : "";
  if (fault == "overrun") spec_jax::overrun();
  if (fault == "undefined") spec_jax::undefined(std::numeric_limits<int32_t>::max());
  if (fault == "late") spec_jax::late();
  if (!fault.empty()) return 0;
  spec_jax::check_exp();
  spec_jax::check_grid<float>();
  spec_jax::check_grid<spec_jax::bf16>();
  std::puts("all in bounds");
}
