// Sharing a loop among the threads of XLA's own pool.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spec_jax {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Runs `body(i)` for every i in [0, count), each once, on any thread and in any order:
// bodies must not depend on each other. Returns when all are done. The caller works
// too and never waits for a thread that has not begun, so a busy pool cannot stall it.
template <typename Body>
void parallel_for(const xla::ffi::ThreadPool& pool, int64_t count, Body body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  // Helpers that begin late find nothing left, and must still find this.
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count](const auto& run) {
    for (;;) {
      int64_t i = shared->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      run(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = pool.num_threads() - 1;
  if (helpers > count - 1) helpers = count - 1;
  auto& schedule = const_cast<xla::ffi::ThreadPool&>(pool);
  // `body` lives until all indices are done, and is not touched by later helpers.
  const Body* shared_body = &body;
  for (int64_t h = 0; h < helpers; ++h) {
    schedule.Schedule([work, shared_body] { work(*shared_body); });
  }
  work(body);
  while (shared->done.load(std::memory_order_acquire) < count) relax();
}

}  // namespace spec_jax
