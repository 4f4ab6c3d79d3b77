// Loops over threads, among them late ones, under the thread sanitizer.
//
// `sanitize_threads race` lets two threads count in one variable.

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "row_attention.h"

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
  for (int64_t count : {0, 1, 2, 3, 50}) {
    Threads threads;
    for (int round = 0; round < 20; ++round) {
      std::vector<int> done(count + 1);
      parallel_for(threads, count, [&](int64_t i) { done[i] += 1; });
      for (int64_t i = 0; i < count; ++i) fine = fine && done[i] == 1;
      fine = fine && done[count] == 0;
    }
  }
  return fine;
}

// Two threads, certainly: each waits for the other to begin.
void race() {
  Threads threads;
  std::atomic<int> begun{0};
  int64_t total = 0;
  parallel_for(threads, 2, [&](int64_t i) {
    begun.fetch_add(1, std::memory_order_relaxed);
    while (begun.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    total += i;
  });
}

// Heads share the pages, the result and the scratch, each its own part.
bool heads_are_apart() {
  constexpr int64_t R = 3, N = 16, K = 8, H = 16, P = 2, C = 4;
  std::vector<bf16> heads(R * (N + 2 * K) * H, to_bf16(0.5f)), norm(H, to_bf16(1.0f));
  std::vector<bf16> k(P * C * K * H), v(P * C * K * H), out(R * N * H);
  std::vector<float> angles(R * H / 2, 0.5f);
  int32_t table[] = {1, 0}, slots[] = {0, 0, 0}, positions[] = {0, 1, 2};
  Rows rows{table, slots, positions, 1, P, P, C, R};
  Layer<bf16> layer{heads.data(), norm.data(), norm.data(), angles.data(),
                    angles.data(), k.data(), v.data(), out.data(), N, K, H, 0.25f,
                    1e-6f};
  Threads threads;
  for (int round = 0; round < 5; ++round) attend_rows(threads, layer, rows, R);
  bool fine = true;
  for (bf16 value : out) fine = fine && to_float(value) == 0.5f;
  return fine;
}

}  // namespace
}  // namespace spec_jax

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "race") == 0) spec_jax::race();
  bool fine = spec_jax::loops_are_whole() && spec_jax::heads_are_apart();
  std::puts(fine ? "no races" : "wrong");
  return fine ? 0 : 1;
}
