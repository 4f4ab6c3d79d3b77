// Loops over threads, among them late ones, under the thread sanitizer.
//
// `sanitize_threads race` lets two threads count in one variable.

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "row_attention.h"
#include "step.h"
#include "team.h"

namespace spec_jax {
namespace {

// A thread for each task; they outlive the loop that scheduled them.
struct Threads {
  std::vector<std::thread> running;
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F task) { running.emplace_back(task); }
  ~Threads() {
    for (auto& thread : running) thread.join();
  }
};

bool loops_are_whole() {
  bool fine = true;
  for (int64_t grain : {1, 3}) {
    Threads threads;
    Team<Threads> team(threads);
    for (int round = 0; round < 60; ++round) {
      int64_t count = round * round % 51;  // Loops of all sizes, one after the other.
      std::vector<int> done(count + 1), by(team.size());
      team.run(count, grain, [&](int64_t i, int64_t end, int64_t worker) {
        by[worker] += 1;  // Each worker is one thread.
        for (; i < end; ++i) done[i] += 1;
      });
      for (int64_t i = 0; i < count; ++i) fine = fine && done[i] == 1;
      fine = fine && done[count] == 0;
    }
  }
  return fine;
}

// Makes a race of two threads for certain: each waits for the other to begin.
void race() {
  Threads threads;
  std::atomic<int> begun{0};
  int64_t total = 0;
  Team<Threads>(threads).run(2, 1, [&](int64_t i, int64_t, int64_t) {
    begun.fetch_add(1, std::memory_order_relaxed);
    while (begun.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    total += i;
  });
}

// Checks that rows of one slot attend to values of 0.5, whatever worker does what.
template <int64_t N, int64_t K, int64_t R>
bool attends_to_halves(const Rows& rows) {
  constexpr int64_t H = 16;
  std::vector<bf16> heads(R * (N + 2 * K) * H, to_bf16(0.5f)), norm(H, to_bf16(1.0f));
  const int64_t places = rows.table.num_pages * rows.table.page_size;
  std::vector<bf16> k(places * K * H, to_bf16(0.25f));
  std::vector<bf16> v(k.size(), to_bf16(0.5f)), out(R * N * H);
  std::vector<float> angles(R * H / 2, 0.5f);
  Layer<bf16> layer{heads.data(), norm.data(), norm.data(), angles.data(),
                    angles.data(), k.data(), v.data(), out.data(), N, K, H, 0.25f,
                    1e-6f};
  Threads threads;
  for (int round = 0; round < 5; ++round) {
    Team<Threads> team(threads);
    Attention<Threads, bf16>(team, rows, K, N / K, H).run(layer);
  }
  bool fine = true;
  for (bf16 value : out) fine = fine && to_float(value) == 0.5f;
  return fine;
}

// Checks that heads use their own parts of the pages, of the result and of the scratch.
bool heads_are_apart() {
  int32_t table[] = {1, 0}, slots[] = {0, 0, 0}, positions[] = {0, 1, 2};
  return attends_to_halves<16, 8, 3>({{table, 1, 2, 2, 4}, slots, positions, 3});
}

// Checks that workers attend to ranges of keys under one head, and that one of them
// then combines the ranges.
bool ranges_are_apart() {
  constexpr int32_t C = 3 * kRange;
  int32_t table[] = {0}, slots[] = {0, 0}, positions[] = {C - 2, C - 1};
  return attends_to_halves<2, 1, 2>({{table, 1, 1, 1, C}, slots, positions, 2});
}

// Runs loop after loop on one team, in which threads read the results of other threads.
bool steps_are_alike() {
  constexpr int64_t R = 5, D = 64, F = 640, V = 640, N = 16, K = 8, H = 16, P = 2, C = 8;
  constexpr int64_t kHeads = (N + 2 * K) * H;
  auto matrix = [](int64_t rows, int64_t columns) {
    std::vector<float> w(panels_of(rows) * kPanel * columns);
    for (size_t i = 0; i < w.size(); ++i) w[i] = (i * 7919 % 101 - 50.0f) / 400;
    return w;
  };
  auto embed = matrix(V, D), qkv = matrix(kHeads, D), o = matrix(D, N * H);
  auto gate_up = matrix(2 * F, D), down = matrix(D, F);
  std::vector<float> norm(F, 1.0f), angles(R * H / 2, 0.7f), first;
  int32_t tokens[] = {1, 2, 3, 4, 5}, table[] = {1, 0}, slots[] = {0, 0, 0, 0, 0};
  int32_t positions[] = {0, 1, 2, 3, 4};
  bool fine = true;
  for (int round = 0; round < 8; ++round) {
    std::vector<float> k(P * C * K * H), v(P * C * K * H), logits(R * V);
    StepLayer<float> layer{norm.data(), norm.data(), norm.data(), norm.data(),
                           {qkv.data(), kHeads, D}, {o.data(), D, N * H},
                           {gate_up.data(), 2 * F, D}, {down.data(), D, F},
                           k.data(), v.data()};
    Panels<float> head{embed.data(), V, D};
    Step<float> step{tokens, {nullptr, head}, {layer, layer}, norm.data(), head,
                     Rows{{table, 1, P, P, C}, slots, positions, R}, angles.data(),
                     angles.data(), N, K, H, 0.25f, 1e-6f, {}, logits.data(), nullptr};
    Threads threads;
    Team<Threads> team(threads);
    run_step(team, step);
    if (round == 0) first = logits;
    fine = fine && logits == first;
  }
  return fine;
}

}  // namespace
}  // namespace spec_jax

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "race") == 0) spec_jax::race();
  bool fine = spec_jax::loops_are_whole() && spec_jax::heads_are_apart() &&
              spec_jax::ranges_are_apart() && spec_jax::steps_are_alike();
  std::puts(fine ? "no races" : "wrong");
  return fine ? 0 : 1;
}
