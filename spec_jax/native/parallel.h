// Sharing a loop among the threads of a pool: XLA's own, or a test's.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spec_jax {

// Waiting costs nothing that another thread could use: at first the other half of a
// core, and after a while the core, since more threads may run than there are cores.
inline void relax(int64_t round) {
#if defined(__x86_64__)
  if (round < 1000) return _mm_pause();
#endif
  std::this_thread::yield();
}

// Runs `body(i)` for every i in [0, count), each once, on any thread and in any order:
// bodies must not depend on each other, and must not throw. Returns when all are done.
// The caller works too and never waits for a thread that has not begun, so a busy pool
// cannot stall it.
template <typename Pool>
void parallel_for(Pool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  // Helpers that begin late find nothing left, and must still find this. `body` is
  // gone by then: it lives until all indices are done, and is reached only for one.
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, address = &body] {
    for (;;) {
      int64_t i = shared->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      (*address)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  try {
    for (int64_t h = 0; h < helpers; ++h) pool.Schedule([work] { work(); });
  } catch (const std::bad_alloc&) {
    // Fewer helpers. Leaving would take `body` away from those that have begun.
  }
  work();
  for (int64_t round = 0; shared->done.load(std::memory_order_acquire) < count;) {
    relax(round++);
  }
}

}  // namespace spec_jax
