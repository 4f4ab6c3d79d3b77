// The kernels over a grid of shapes, in buffers of exactly their size, against double.
//
// It is built with the address and undefined-behaviour sanitizers, for the machine's
// widest instruction set. `sanitize overrun`, `sanitize undefined` and `sanitize late`
// commit one fault each, which the sanitizers must stop, and `sanitize wait` one that
// the alarm must.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "block_step.h"
#include "children.h"
#include "head_step.h"
#include "look_up.h"
#include "move.h"
#include "projection.h"
#include "row_attention.h"
#include "step.h"
#include "take_rows.h"
#include "team.h"

namespace spec_jax {
namespace {

// The worst pool: helpers begin only after the caller has finished.
struct LatePool {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F task) { tasks.push_back(task); }
  ~LatePool() {
    for (auto& task : tasks) task();
  }
};

struct LateTeam {
  LatePool pool;
  Team<LatePool> team{pool};
};
template <typename T>
struct LateWorkers : LateTeam {
  Workers<LatePool, T> workers;
  LateWorkers(int64_t rows, int64_t K) : workers(team, rows, K) {}
};

// A pool whose queues are full: a task runs before `Schedule` returns, in the caller,
// as in XLA's. `elsewhere`: in another thread, which a helper cannot notice.
struct FullPool {
  bool elsewhere = false;
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F task) {
    if (elsewhere) return std::thread(task).join();
    task();
  }
};

// An array in memory of its own, so that the sanitizer sees a step outside.
template <typename T>
struct Array {
  std::unique_ptr<T[]> owned;
  int64_t size;
  explicit Array(int64_t n) : owned(new T[n]), size(n) {}
  Array(std::initializer_list<T> values) : Array(static_cast<int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), data());
  }
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

// Bounds the relative error of a value that is rounded to T.
template <typename T>
double unit() { return sizeof(T) == 2 ? 1.0 / 256 : 0.0; }

template <typename T>
std::string shape(const char* name, std::vector<int64_t> sizes) {
  std::string out = std::string(name) + (sizeof(T) == 2 ? " bf16" : " f32");
  for (int64_t size : sizes) out += " " + std::to_string(size);
  return out;
}

// Makes the panels of w [N, K], in memory of exactly their size.
template <typename T>
Array<T> pack(Array<T>& w, int64_t N, int64_t K) {
  constexpr int64_t kSize = kWord<T>;
  int64_t words = words_of<T>(K);
  Array<T> out(panels_of(N) * words * kPanel * kSize);
  for (int64_t i = 0; i < out.size; ++i) {
    int64_t n = i / (words * kPanel * kSize) * kPanel + i / kSize % kPanel;
    int64_t k = i / (kPanel * kSize) % words * kSize + i % kSize;
    out[i] = n < N && k < K ? w[n * K + k] : T{};
  }
  return out;
}

// Makes the panels of a random matrix.
template <typename T>
Array<T> matrix(int64_t N, int64_t K) {
  auto w = normal<T>(N * K, 0.3f);
  return pack(w, N, K);
}

// Makes a result with a value that its padding rows must keep.
template <typename T>
Array<T> untouched(int64_t n) {
  Array<T> out(n);
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<T>(-77.0f);
  return out;
}

// Checks a result of so many rows: the first are finite, those up to `live` NaN, and the
// rest are untouched.
template <typename T>
void expect_rows(Array<T>& y, int64_t rows, int64_t finite, int64_t live,
                 const std::string& what) {
  for (int64_t i = 0; i < y.size; ++i) {
    int64_t r = i / (y.size / rows);
    float value = to_float(y[i]);
    bool fine = r < finite ? std::isfinite(value) : std::isnan(value);
    expect(r < live ? fine : value == -77, what + " at " + std::to_string(i));
  }
}

// Checks y [rows, N] = residual + x w^T against double; `residual` may be null. Sums are
// off by `relative` of their terms' sizes, and by `absolute`. Padding rows are untouched.
template <typename T, typename Out>
void expect_products(Array<Out>& y, Array<T>& x, Array<T>& w, Array<T>* residual,
                     int64_t live, int64_t K, int64_t N, double relative, double absolute,
                     const std::string& what) {
  for (int64_t i = 0; i < y.size; ++i) {
    double sum = 0, added = residual ? to_float((*residual)[i]) : 0;
    double sizes = std::abs(added);
    for (int64_t k = 0; k < K && i / N < live; ++k) {
      double term = double{to_float(x[i / N * K + k])} * to_float(w[i % N * K + k]);
      sum += term;
      sizes += std::abs(term);
    }
    double rounded = unit<Out>() * (std::abs(sum) + std::abs(sum + added));
    double error = std::abs(to_float(y[i]) - sum - added);
    bool is_near = error <= relative * sizes + absolute + rounded;
    expect(i / N < live ? is_near : to_float(y[i]) == -77, what + std::to_string(i));
  }
}

template <typename T>
void check_project(int64_t rows, int64_t live, int64_t K, int64_t N) {
  auto x = normal<T>(rows * K), w = normal<T>(N * K), residual = normal<T>(rows * N);
  auto packed = pack(w, N, K);
  auto y = untouched<T>(rows * N);
  auto plain = untouched<float>(rows * N);
  {
    LateWorkers<T> late(live, K);
    Input<T> input{x.data(), nullptr, 0.0f, live};
    Panels<T> panels{packed.data(), N, K};
    project(late.workers, input, panels, y.data(), residual.data());
    project(late.workers, input, panels, plain.data());
  }
  auto what = shape<T>("project", {rows, live, K, N});
  expect_products<T>(plain, x, w, nullptr, live, K, N, 1e-6, 0, what + " plain ");
  expect_products(y, x, w, &residual, live, K, N, 1e-6, 0, what + " added ");
}

// Checks products with weights of eight bits, or four, in memory of exactly their size.
template <bool kIsFour, typename T>
void check_bytes(int64_t rows, int64_t K, int64_t N) {
  auto x = normal<T>(rows * K);
  Array<uint8_t> packed(panels_of(N) * pairs_of(K) * kPairBytes<kIsFour>);
  for (int64_t i = 0; i < packed.size; ++i) {
    bool is_scale = i % kPairBytes<kIsFour> >= 2 * kBlockLines<kIsFour> * kLineBytes;
    uint8_t one = i % 2 ? 0x3c : 0x00;  // one of the two bytes of 1 in float16
    packed[i] = is_scale ? one : generator() % 256;
  }
  Panels<T> w{nullptr, N, K, packed.data(), kIsFour};
  auto table = untouched<T>(N * K), y = untouched<T>(rows * N);
  auto gates = untouched<T>(rows * (N / 2));
  for (int64_t n = 0; n < N; ++n) take_row(w, n, table.data() + n * K);
  {
    LateWorkers<T> late(rows, K);
    Input<T> input{x.data(), nullptr, 0.0f, rows};
    project(late.workers, input, w, y.data());
    if (N % 2 == 0) gate(late.workers, input, w, gates.data());
  }
  // A row's element is off by up to 1 / 254 of its block's largest.
  expect_products<T>(y, x, table, nullptr, rows, K, N, 0.02, 3.0 * K,
                     shape<T>("bytes", {rows, K, N, 0}));
}

// Checks segments: in bounds, the sums of all, and nothing written to padding rows;
// bits are compared in Python.
template <typename T>
void check_segments(int64_t count, int64_t K, int64_t N) {
  constexpr int64_t kRows = 11, kLive = 10;
  int64_t whole = count * K;
  auto x = normal<T>(kRows * whole), w = normal<T>(N * whole), segment = normal<T>(N * K);
  std::vector<Array<T>> packed;
  std::vector<Panels<T>> panels;
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t i = 0; i < N * K; ++i) segment[i] = w[i / K * whole + s * K + i % K];
    packed.push_back(pack(segment, N, K));
    panels.push_back({packed.back().data(), N, K});
  }
  auto y = untouched<float>(kRows * N);
  {
    LateWorkers<T> late(kLive, whole);
    Input<T> input{x.data(), nullptr, 0.0f, kLive};
    project_segments(late.workers, input, panels, y.data());
  }
  expect_products<T>(y, x, w, nullptr, kLive, whole, N, 1e-6, 0,
                     shape<T>("segments", {count, K, N, 0}));
}

// Checks norm and gate: in bounds; values are compared in Python.
template <typename T>
void check_gate(int64_t rows, int64_t live, int64_t K, int64_t F) {
  auto x = normal<T>(rows * K), w = normal<T>(2 * F * K), norm = normal<T>(K);
  auto packed = pack(w, 2 * F, K);
  auto y = untouched<T>(rows * F);
  LateWorkers<T> late(live, K);
  Input<T> input{x.data(), norm.data(), 1e-6f, live};
  gate(late.workers, input, Panels<T>{packed.data(), 2 * F, K}, y.data());
  expect_rows(y, rows, live, live, shape<T>("gate", {rows, live, K, F}));
}

// Checks softmax attention of one query against double; the pages are 0, 1, 2, ...
template <typename T>
void expect_attention(const float* q, T* k, T* v, int64_t position, int64_t stride,
                      int64_t H, const T* out, const std::string& what) {
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
    double truth = sums[h] / total;
    expect(std::abs(to_float(out[h]) - truth) < 1e-5 + unit<T>() * std::abs(truth), what);
  }
}

// A layer of R rows, and `places` for keys and values.
template <typename T>
struct SomeLayer {
  int64_t R, N, K, H;
  Array<T> heads, norm, k, v, out;
  Array<float> angles;

  SomeLayer(int64_t R, int64_t N, int64_t K, int64_t H, int64_t places)
      : R(R), N(N), K(K), H(H), heads(normal<T>(R * (N + 2 * K) * H)), norm(normal<T>(H)),
        k(normal<T>(places * K * H)), v(normal<T>(places * K * H)),
        out(untouched<T>(R * N * H)), angles(normal<float>(R * (H / 2))) {}

  Layer<T> layer() {
    return {heads.data(), norm.data(), norm.data(), angles.data(), angles.data(),
            k.data(), v.data(), out.data(), N, K, H, 0.1f, 1e-6f};
  }

  void run(const Layer<T>& layer, const Rows& rows) {
    LateTeam late;
    Attention<LatePool, T>(late.team, rows, K, N / K, H).run(layer);
  }
};

// Checks a row whose heads are neither normed nor turned, and the keys before it.
template <typename T>
void check_attend(int64_t G, int64_t H, int64_t page_size, int64_t position) {
  int64_t K = 2, num_pages = position / page_size + 1;
  SomeLayer<T> made(1, G * K, K, H, num_pages * page_size);
  Layer<T> layer = made.layer();
  Array<float> cos(H / 2), sin(H / 2), q(G * K * H);
  std::fill_n(cos.data(), H / 2, 1.0f);
  std::fill_n(sin.data(), H / 2, 0.0f);
  layer.q_norm = layer.k_norm = nullptr;
  layer.cos = cos.data();
  layer.sin = sin.data();
  layer.scale = 0.2f;
  for (int64_t i = 0; i < q.size; ++i) q[i] = layer.scale * to_float(made.heads[i]);
  Array<int32_t> table(num_pages), slots{0}, positions{static_cast<int32_t>(position)};
  for (int64_t m = 0; m < num_pages; ++m) table[m] = static_cast<int32_t>(m);
  made.run(layer, {{table.data(), 1, num_pages, num_pages, page_size}, slots.data(),
                   positions.data(), 1});
  for (int64_t n = 0; n < G * K; ++n) {
    expect_attention(q.data() + n * H, made.k.data() + n / G * H,
                     made.v.data() + n / G * H, position, K * H, H,
                     made.out.data() + n * H,
                     shape<T>("attend", {G, H, page_size, position, n}));
  }
}

// Checks a layer whose last active row has no page; the padding row has no slot.
template <typename T>
void check_layer(int64_t H, int64_t page_size, int32_t lost_slot, int32_t lost_at) {
  constexpr int64_t R = 5, live = 4, P = 3, S = 2, M = 2;
  SomeLayer<T> made(R, 4, 2, H, P * page_size);
  Array<int32_t> table{2, 3, 0, 1}, slots{0, 1, 1, lost_slot, -7};
  Array<int32_t> positions{0, 0, 1, lost_at, 1 << 30};
  made.run(made.layer(), {{table.data(), S, M, P, page_size}, slots.data(),
                          positions.data(), live});
  expect_rows(made.out, R, 3, live,
              shape<T>("layer", {H, page_size, lost_slot, lost_at}));
}

// Checks rows of several ranges of keys: of a chain, or of a tree with branches there.
template <typename T>
void check_ranges(int64_t H, int64_t position, bool is_tree) {
  constexpr int64_t R = 3, width = 4;
  int64_t page_size = position + R;
  SomeLayer<T> made(R, 2, 1, H, page_size);
  Array<int32_t> table{0}, slots{0, 0, 0}, positions(R), branch(R * width);
  for (int64_t r = 0; r < R; ++r) {
    positions[r] = static_cast<int32_t>(position + r);
    for (int64_t i = 0; i < width; ++i) {
      branch[r * width + i] = static_cast<int32_t>(position + r + i + 1 - width);
    }
  }
  Rows rows{{table.data(), 1, 1, 1, page_size}, slots.data(), positions.data(), R};
  if (is_tree) {
    rows.branch = branch.data();
    rows.width = width;
  }
  made.run(made.layer(), rows);
  expect_rows(made.out, R, R, R, shape<T>("ranges", {H, position, is_tree}));
}

// Checks active and padding rows that point past either end of the table.
template <typename T>
void check_take_rows(int64_t D, bool is_packed) {
  auto table = normal<T>(3 * D);
  auto packed = pack(table, 3, D);
  Array<int32_t> index{2, -1, 3, 0, 1 << 30};
  auto out = untouched<T>(5 * D);
  Table<T> from{is_packed ? nullptr : table.data(), {packed.data(), 3, D}};
  take_rows(from, index.data(), out.data(), 4);
  for (int64_t i = 0; i < 5 * D; ++i) {
    int64_t r = i / D;
    float value = to_float(out[i]), from = to_float(table[(r == 0 ? 2 * D : 0) + i % D]);
    bool fine = r == 4 ? value == -77 : r % 3 == 0 ? value == from : std::isnan(value);
    expect(fine, shape<T>("take_rows", {D, is_packed, i}));
  }
}

// Checks moves within a pool, and from and to places that do not exist.
template <typename T>
void check_move(int64_t width) {
  constexpr int64_t kPages = 2, kPageSize = 3;
  int64_t size = kPages * kPageSize * width;
  Array<T> before = normal<T>(size), pool(size);
  for (int64_t i = 0; i < size; ++i) pool[i] = before[i];
  Array<int32_t> table{1, kPages}, slots{0, 0, 0, 0}, sources{2, -1, 0, 1};
  Array<int32_t> targets{0, 1, 3, 1 << 30};
  Array<bool> moves{true, true, true, true};
  Moves which{{table.data(), 1, 2, kPages, kPageSize}, slots.data(), sources.data(),
              targets.data(), moves.data(), 4};
  move_rows<T>(which, {pool.data()}, width);
  for (int64_t i = 0; i < size; ++i) {
    int64_t row = i / width;
    float expected = row == 3   ? to_float(before[5 * width + i % width])
                     : row == 4 ? 0
                                : to_float(before[i]);
    expect(to_float(pool[i]) == expected, shape<T>("move", {width, i}));
  }
}

// The settings of three slots: the first takes the highest logit, the second draws from
// few tokens, the third from all; and room for the log weights that they draw from.
struct SomeDraws {
  float temperature[3] = {0.0f, 0.7f, 1.0f}, top_p[3] = {1, 0.6f, 1}, min_p[3] = {0, 0.1f, 0};
  int32_t top_k[3] = {1 << 30, 5, 1 << 30}, seeds[3] = {0, -1, 7}, positions[3] = {0, 9, 1 << 30};
  int64_t most, N;
  Array<float> log_weights;

  SomeDraws(int64_t most, int64_t N)
      : most(most), N(N), log_weights(untouched<float>(3 * most * N)) {}

  Draws draws(int64_t vocabulary, bool is_independent) {
    return {temperature, top_p, min_p, top_k, seeds, positions, vocabulary, is_independent,
            log_weights.data(), most};
  }

  // Checks that in each draft that was made the heaviest token weighs 1.
  void check(const int32_t* counts, int64_t num_slots, const std::string& what) {
    for (int64_t i = 0; i < num_slots * most; ++i) {
      const float* row = log_weights.data() + i * N;
      bool is_made = i % most < counts[i / most];
      float most_weight = *std::max_element(row, row + N);
      int64_t kept = std::count_if(row, row + N, [](float x) { return x > -kInfinity; });
      bool is_few = i / most != 0 || kept == 1;
      expect(is_made ? most_weight == 0 && is_few : row[0] == -77, what);
    }
  }
};

// Checks a row that takes the highest logit, one that is not asked for, one that draws.
void check_draws(int64_t N) {
  auto logits = normal<float>(3 * N, 3.0f);
  bool asked[] = {true, false, true};
  Array<int32_t> tokens(3);
  SomeDraws how(1, N);
  Draws draws = how.draws(N, false);
  draws.log_weights = nullptr;
  LateTeam late;
  draw_tokens(late.team, draws, logits.data(), asked, 3, N, tokens.data());
  const float* highest = std::max_element(logits.data(), logits.data() + N);
  auto what = "draws " + std::to_string(N);
  expect(tokens[0] == highest - logits.data() && tokens[1] == 0, what);
  expect(tokens[2] >= 0 && tokens[2] < N, what);
}

// Checks rows of two slots, of which the last is all -inf; a third slot sits out.
void check_children(int64_t N, int64_t most) {
  constexpr int64_t S = 3, width = 2, V = 5000;
  auto logits = normal<float>(S * width * N, 3.0f), scores = untouched<float>(S * width * most);
  for (int64_t n = 0; n < N; ++n) logits[3 * N + n] = -kInfinity;
  int32_t counts[] = {2, 9, 0}, numbers[] = {4, 5};
  Array<int32_t> names(N), tokens(S * width * most);
  for (int64_t n = 0; n < N; ++n) names[n] = static_cast<int32_t>(V - 1 - n);
  SomeDraws how(width, N);
  for (bool draws : {false, true}) {
    ChildRows rows{logits.data(), counts, numbers, names.data(), S, width, N, most, 0.5f,
                   scores.data(), tokens.data(), {}};
    if (draws) rows.draws = how.draws(V, false);
    rows.draws.log_weights = nullptr;
    LateTeam late;
    best_children(late.team, rows);
    for (int64_t i = 0; i < S * width * most; ++i) {
      int64_t row = i / most, token = tokens[i];
      auto what = "children " + std::to_string(N) + " " + std::to_string(i);
      bool is_first = i % most == 0;
      expect(is_first || scores[i] <= scores[i - 1], what);
      if (row < 3) expect(token > V - 1 - N - 1 && token < V, what);
      if (row < 3 && is_first) expect(std::isfinite(scores[i]) && scores[i] <= 0, what);
      if (row >= 3) expect(scores[i] == -kInfinity, what);
      if (row > 3) expect(token == 0, what);
      if (row > 1 || draws) continue;
      int64_t n = V - 1 - token, before = 0;
      for (int64_t j = 0; j < N; ++j) before += logits[row * N + j] > logits[row * N + n];
      expect(before == i % most, what);
    }
  }
}

// Checks three slots of a model, or of a head whose own tokens are the target's last:
// two slots draft, the second past its pages in the end; the third sits out.
template <typename T>
void check_chains(const Step<T>& step, const Head<T>* head, bool draws) {
  constexpr int64_t S = 3, width = 2, most = 3;
  int32_t tokens[] = {3, 1, 2, 1 << 30, -1, -1}, starts[] = {0, 1, 1 << 30};
  int32_t pending[] = {2, 1, 9}, counts[] = {3, 2, 0}, table[] = {2, 0, 1, 3, -7, 99};
  Array<int32_t> drafts(S * most);
  auto angles = normal<float>(S * (width + most - 1) * (step.H / 2));
  Chains chains{tokens, starts, pending, counts, S, width, most, drafts.data()};
  SomeDraws how(most, head == nullptr ? step.head.N : head->step.head.N);
  if (draws) chains.draws = how.draws(step.head.N, head != nullptr);
  Step<T> model = head == nullptr ? step : head->step;
  model.rows = {{table, S, 2, step.rows.table.num_pages, step.rows.table.page_size}};
  model.cos = model.sin = angles.data();
  model.taps.clear();
  LateTeam late;
  int64_t first = 0;
  if (head == nullptr) {
    run_chains(late.team, model, chains);
  } else {
    int64_t N = model.head.N;
    auto features = normal<T>(S * width * head->size());
    Array<int32_t> names(N);
    for (int64_t n = 0; n < N; ++n) names[n] = static_cast<int32_t>(step.head.N - N + n);
    Head<T> own = *head;
    own.step = model;
    run_head_chains(late.team, own, chains, features.data(), names.data());
    first = step.head.N - N;
  }
  for (int64_t i = 0; i < S * most; ++i) {
    bool is_made = i % most < counts[i / most];
    bool fine = is_made ? drafts[i] >= first && drafts[i] < step.head.N : drafts[i] == 0;
    expect(fine, shape<T>("chains", {i, head != nullptr}));
  }
  // The second slot ends in NaN, past its pages, and is left out.
  int32_t whole[] = {counts[0], 0, 0};
  if (draws) how.check(whole, 1, shape<T>("draws", {head != nullptr}));
}

// Checks a head of the step's layer: in bounds, results finite or NaN as they should.
template <typename T>
void check_head(const Step<T>& step, bool is_normed) {
  constexpr int64_t kOwn = 9;
  int64_t D = step.head.K, R = 4, live = step.rows.live;
  auto qkv = matrix<T>((step.N + 2 * step.K) * step.H, 2 * D), lm_head = matrix<T>(kOwn, D);
  auto norm = normal<T>(D), features = normal<T>(live * D);
  auto logits = untouched<float>(R * kOwn);
  auto next = untouched<T>(R * D);
  Head<T> head{step, norm.data(), is_normed, is_normed};
  head.step.layers.resize(1);
  head.step.layers[0].qkv = {qkv.data(), (step.N + 2 * step.K) * step.H, 2 * D};
  if (is_normed) head.step.layers[0].q_norm = head.step.layers[0].k_norm = nullptr;
  head.step.head = {lm_head.data(), kOwn, D};
  head.step.logits = logits.data();
  LateTeam late;
  run_head(late.team, head, features.data(), next.data());
  expect_rows(logits, R, 2, live, shape<T>("head", {D, is_normed}));
  expect_rows(next, R, 2, live, shape<T>("features of a head", {D, is_normed}));
  for (bool draws : {false, true}) check_chains(step, &head, draws);
}

// Checks the gates of one row against double.
template <typename T>
void check_gates(int64_t r, int64_t D, const Mix<T>& mix) {
  Mixer<T> mixer(mix, 1, r);
  auto made = normal<float>(3 * r, 4.0f), state = normal<float>(r);
  auto before = normal<T>(r);
  std::vector<double> expected;
  auto gate = [&](int64_t n) {
    return double{to_float(mix.bias[n])} + made[n];
  };
  for (int64_t n = 0; n < r; ++n) {
    double kept = 1 / (1 + std::exp(-gate(n)));
    expected.push_back(kept * state[n] + (1 - kept) * std::tanh(gate(r + n)));
  }
  mixer.gate(made.data(), state.data(), before.data());
  for (int64_t n = 0; n < r; ++n) {
    auto what = shape<T>("gates", {D, n});
    expect(std::abs(state[n] - expected[n]) <= 1e-6, what);
    double out = std::tanh(gate(2 * r + n));
    expect(std::abs(to_float(before[n]) - out) <= 1e-6 + unit<T>() * std::abs(out), what);
  }
  for (float x : {-INFINITY, -100.0f, 100.0f, INFINITY}) {
    float lane[kLanes];
    store(lane, tanh(broadcast(x)));
    expect(lane[0] == std::copysign(1.0f, x), "tanh far away");
    store(lane, sigmoid(broadcast(x)));
    expect(lane[0] == (x > 0 ? 1.0f : 0.0f), "sigmoid far away");
  }
}

// The weights and pages of a small model of two layers, which are the same.
template <typename T>
struct SmallModel {
  static constexpr int64_t R = 4, V = 21, N = 4, K = 2, H = 6, P = 3, C = 2;
  int64_t D, F, num_heads;  // of `q`: queries alone, or keys and values too
  Array<T> embed, q, kv, o, gate_up, down, norm, k, v;
  Array<float> angles;

  SmallModel(int64_t D, int64_t F, bool is_apart)
      : D(D), F(F), num_heads(is_apart ? N : N + 2 * K), embed(matrix<T>(V, D)),
        q(matrix<T>(num_heads * H, D)), kv(matrix<T>(2 * K * H, D)),
        o(matrix<T>(D, N * H)), gate_up(matrix<T>(2 * F, D)), down(matrix<T>(D, F)),
        norm(normal<T>(std::max(D, H))), k(normal<T>(P * C * K * H)),
        v(normal<T>(P * C * K * H)), angles(normal<float>(R * (H / 2))) {}

  Step<T> step(const int32_t* tokens, const int32_t* table, const int32_t* slots,
               const int32_t* positions, int64_t live) {
    StepLayer<T> layer{norm.data(), norm.data(), norm.data(), norm.data(),
                       {q.data(), num_heads * H, D}, {o.data(), D, N * H},
                       {gate_up.data(), 2 * F, D}, {down.data(), D, F}, k.data(),
                       v.data()};
    if (num_heads == N) layer.kv = {kv.data(), 2 * K * H, D};
    Panels<T> head{embed.data(), V, D};
    return {tokens, {nullptr, head}, {layer, layer}, norm.data(), head,
            Rows{{table, 2, 2, P, C}, slots, positions, live}, angles.data(),
            angles.data(), N, K, H, 0.4f, 1e-6f, {}, nullptr, nullptr};
  }
};

// Checks two blocks of two rows, the second without pages, after context of the first:
// in bounds; results are finite or NaN as they should. Then it checks two blocks, of
// which one drafts in one slot and the other in both, with each kind of head.
template <typename T>
void check_blocks(int64_t D, int64_t F) {
  constexpr int64_t R = 4, V = 21, Vd = 9, rank = 5;
  SmallModel<T> model(D, F, true);
  auto fc = matrix<T>(D, 2 * D), lm_head = matrix<T>(Vd, D), out = matrix<T>(Vd, rank);
  auto features = normal<T>(2 * 2 * D), before = normal<T>(V * rank);
  int32_t tokens[] = {0, V - 1, 3, 4}, slots[] = {0, 0, 1, 1}, positions[] = {2, 3, 0, 1};
  int32_t context[] = {0, 1}, table[] = {2, 0, 3, 3};
  auto logits = untouched<float>(R * Vd);
  Step<T> blocks = model.step(tokens, table, slots, context, 2);
  blocks.head = {lm_head.data(), Vd, D};
  blocks.logits = logits.data();
  LateTeam late;
  append_context(late.team, blocks, features.data(), Panels<T>{fc.data(), D, 2 * D},
                 model.norm.data());
  blocks.rows.positions = positions;
  blocks.rows.live = R;
  auto hidden = untouched<T>(R * D);
  run_blocks(late.team, blocks, 2, hidden.data());
  expect_rows(hidden, R, 2, R, shape<T>("blocks", {D, F}));
  expect_rows(logits, R, 2, R, shape<T>("logits of blocks", {D, F}));
  int32_t anchors[] = {V - 1, 0}, counts[] = {1, 2}, drafts[] = {-7, -7, -7, -7};
  Array<int32_t> names(Vd);
  for (int64_t n = 0; n < Vd; ++n) names[n] = static_cast<int32_t>(V - 1 - n);
  auto scores = normal<float>(2 * 2 * Vd);
  SlotChains chains{scores.data(), anchors, counts, names.data(), 2, 2, Vd, drafts};
  Table<T> known{before.data(), {nullptr, V, rank}};
  Panels<T> product{out.data(), Vd, rank};
  auto gates = matrix<T>(rank, D + rank), gates_of_state = matrix<T>(3 * rank, D + 2 * rank);
  auto bias = normal<T>(3 * rank), read = normal<T>(2 * 3 * D);
  const Mix<T> heads[] = {
      {},
      {{gates.data(), rank, D + rank}, bias.data(), read.data(), D, 0},
      {{gates_of_state.data(), 3 * rank, D + 2 * rank}, bias.data(), read.data(), D, 1}};
  for (const Mix<T>& head : heads) {
    SomeDraws how(2, Vd);
    for (bool draws : {false, true}) {
      chains.draws = draws ? how.draws(V, true) : Draws{};
      run_slots(late.team, known, product, head, chains);
      for (int i = 0; i < 4; ++i) {
        bool fine = i == 1 ? drafts[i] == 0 : drafts[i] >= V - Vd && drafts[i] < V;
        expect(fine, shape<T>("slots", {D, head.w.N, i, draws}));
      }
    }
    how.check(counts, 2, shape<T>("slots' draws", {D, head.w.N}));
  }
  check_gates<T>(rank, D, heads[2]);
}

// Checks a model of two layers, the last active row without a page: in bounds; results
// are finite or NaN as they should be.
template <typename T>
void check_step(int64_t D, int64_t F) {
  constexpr int64_t R = 4, live = 3, V = 21, L = 2;
  SmallModel<T> model(D, F, false);
  int32_t tokens[] = {0, V - 1, 3, 1 << 30}, slots[] = {0, 0, 1, -5};
  int32_t positions[] = {1, 2, 0, 99}, table[] = {2, 0, 3, 3};
  auto logits = untouched<float>(R * V);
  auto features = untouched<T>(R * 2 * D);
  Step<T> step = model.step(tokens, table, slots, positions, live);
  step.taps = {L, 0};
  step.logits = logits.data();
  step.features = features.data();
  LateTeam late;
  run_step(late.team, step);
  expect_rows(logits, R, 2, live, shape<T>("step", {D, F}));
  for (int64_t d = 0; d < D; ++d) {
    int64_t at = d / kWord<T> * kPanel * kWord<T> + d % kWord<T>;
    expect(to_float(features[D + d]) == to_float(model.embed[at]),
           shape<T>("features", {D, F, d}));
  }
  const Head<T>* none = nullptr;
  for (bool draws : {false, true}) check_chains(step, none, draws);
  for (bool is_normed : {false, true}) check_head(step, is_normed);
  check_blocks<T>(D, F);
}

// Checks that the caller does the helpers' part, and does not wait for them.
void check_full_pool(bool elsewhere) {
  alarm(elsewhere ? 2 : 60);
  FullPool pool{elsewhere};
  Team<FullPool> team(pool);
  int64_t done = 0;
  for (int round = 0; round < 3; ++round) {
    team.run(50, 7, [&](int64_t i, int64_t end, int64_t) { done += end - i; });
  }
  expect(done == 150, "a full pool: " + std::to_string(done) + " of 150 indices");
  alarm(0);
}

// Checks the distance to the truth in units of the last place.
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

// Checks known answers of Threefry (Random123), and the distance of noise to the truth.
void check_noise() {
  Key first = threefry({0, 0}, 0, 0), last = threefry({~0u, ~0u}, ~0u, ~0u);
  expect(first.high == 0x6b200159u && first.low == 0x99ba4efeu, "threefry of zeros");
  expect(last.high == 0x1cb996fcu && last.low == 0xbb002be7u, "threefry of ones");
  float worst = 0;
  for (uint32_t i = 0; i < 1 << 16; ++i) {
    Key bits = threefry({3, 4}, 0, i);
    // The numbers cover all magnitudes.
    float high = std::ldexp(static_cast<float>(bits.high >> 9), -23);
    float low = std::ldexp(static_cast<float>(bits.low >> 9), -23);
    if (i % 2 == 0) high = std::ldexp(static_cast<float>(bits.high >> 30), -23);
    if (i % 1024 == 0) high = low = 0;
    float tiny = std::numeric_limits<float>::min();
    float x = high >= 0.5f ? high : high + std::ldexp(low, -23) + tiny;
    double truth = -std::log(-std::log1p(-double{x}));
    double unit = std::max(std::abs(truth), 0.5) * std::ldexp(1.0, -23);
    double off = std::abs(gumbel(high, low) - truth) / unit;
    worst = std::max(worst, static_cast<float>(off));
  }
  expect(worst < 3, "noise is off by " + std::to_string(worst) + " units");
}

template <typename T>
void check_grid() {
  for (int64_t K : {1, 7, 33, 80, 256}) {
    for (int64_t N : {1, 5, 13, 64}) {
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17}) {
        check_project<T>(rows, rows - (N == 5 && rows > 1), K, N);
      }
      check_gate<T>(3, 2, K, N);
      for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 17}) {
        check_bytes<false, T>(rows, K, N);
        check_bytes<true, T>(rows, K, N);
      }
    }
  }
  for (int64_t D : {1, 7, 64}) {
    for (bool is_packed : {false, true}) check_take_rows<T>(D, is_packed);
  }
  for (int64_t width : {1, 24}) check_move<T>(width);
  check_step<T>(10, 7);
  check_step<T>(32, 48);
  check_project<T>(3, 0, 7, 5);
  check_project<T>(3, 3, 0, 5);
  check_project<T>(3, 3, 7, 0);
  check_project<T>(2, 2, 48, 1500);  // more panels than a worker takes at a time
  for (int64_t count : {1, 2, 8}) check_segments<T>(count, 6, 290);
  for (int64_t H : {2, 16, 80, 128, 256}) {
    for (int64_t page_size : {1, 8, 16, 64}) {
      for (int64_t at : {int64_t{0}, page_size - 1, page_size, page_size + 1}) {
        check_attend<T>(H == 16 ? 16 : 2, H, page_size, at);
      }
      for (int64_t at : {30, 31, 32, 33, 70}) check_attend<T>(1, H, page_size, at);
    }
  }
  for (int64_t H : {16, 80}) {
    check_layer<T>(H, 8, 0, 9);  // page 3, where pages are 0 .. 2
    check_layer<T>(H, 8, 1, 16);  // past the table
    check_layer<T>(H, 8, 1, -1);
    check_layer<T>(H, 8, 2, 0);
    check_layer<T>(H, 8, -1, 0);
    check_layer<T>(H, 8, 1, std::numeric_limits<int32_t>::max());
    check_ranges<T>(H, 2 * kRange - 1, false);
    check_ranges<T>(H, kRange - 2, true);
    check_ranges<T>(H, kRange + 40, true);
  }
}

// Checks a text of few words, and an earlier one: one of them holds what is found.
void check_look_up(int64_t length, int64_t size) {
  Array<int32_t> text(length), corpus(size), budgets(8);
  for (int64_t i = 0; i < length; ++i) text[i] = generator() % 3;
  for (int64_t i = 0; i < size; ++i) corpus[i] = i % 7 == 0 ? kNoToken : generator() % 3;
  for (int32_t i = 0; i < 8; ++i) budgets[i] = i + 1;
  Path path = look_up(text.data(), length, corpus.data(), size, {budgets.data(), 8, 5, 0.1f});
  std::vector<int32_t> whole{text[length - 1]};
  whole.insert(whole.end(), path.tokens.begin(), path.tokens.end());
  auto holds = [&](const int32_t* begin, int64_t count) {
    return std::search(begin, begin + count, whole.begin(), whole.end()) != begin + count;
  };
  bool followed = holds(text.data(), length) || holds(corpus.data(), size);
  expect(path.tokens.size() <= 5 && (path.tokens.empty() || followed), "look up");
}

// Reads panels that are one element short.
void overrun() {
  auto x = normal<float>(2 * 32), w = normal<float>(2 * kPanel * 32 - 1);
  float sums[2 * 2 * kPanel];
  SideBySide<float> rows(2, 32);
  std::vector<float> scratch(kMostRows<float> * 32);
  rows.begin(2, 32);
  set_group(Input<float>{x.data(), nullptr, 0.0f, 2}, 32, 0, scratch.data(), rows);
  multiply(rows.group(0, 2), w.data(), 2, rows.words(), sums, 2 * kPanel);
}

// Adds integers so that they overflow.
void undefined(volatile int32_t most) { std::printf("%d\n", most + 1); }

// Lets a helper write to the body of a loop that has ended.
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
  if (fault == "wait") spec_jax::check_full_pool(true);
  if (!fault.empty()) return 0;
  spec_jax::check_full_pool(false);
  spec_jax::check_exp();
  spec_jax::check_noise();
  for (int64_t N : {1, 7, 1024, 2049}) spec_jax::check_draws(N);
  for (int64_t N : {1, 7, 1024, 2049}) spec_jax::check_children(N, std::min<int64_t>(N, 4));
  for (int64_t length : {1, 2, 40}) {
    for (int64_t size : {1, 60}) spec_jax::check_look_up(length, size);
  }
  spec_jax::check_grid<float>();
  spec_jax::check_grid<spec_jax::bf16>();
  std::puts("all in bounds");
}
