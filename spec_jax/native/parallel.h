// Sharing a loop among the threads of a pool: XLA's own, or a test's.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

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

// Indices that one thread takes from the front, in order, while others may take them
// from the back: 32 bits each of where they begin and end.
class alignas(64) IndexRange {
 public:
  void set(int64_t begin, int64_t end) { bounds_ = pack(begin, end); }

  // An index that nobody else gets, or -1 when none is left.
  int64_t take(bool from_front) {
    uint64_t bounds = bounds_.load(std::memory_order_relaxed);
    for (;;) {
      int64_t begin = bounds >> 32, end = bounds & 0xffffffffu;
      if (begin >= end) return -1;
      uint64_t rest = from_front ? pack(begin + 1, end) : pack(begin, end - 1);
      if (bounds_.compare_exchange_weak(bounds, rest, std::memory_order_relaxed)) {
        return from_front ? begin : end - 1;
      }
    }
  }

 private:
  static uint64_t pack(uint64_t begin, uint64_t end) { return begin << 32 | end; }
  std::atomic<uint64_t> bounds_{0};
};

// Runs `body(i)` for every i in [0, count), fewer than 2^32, each once, on any thread
// and in any order: bodies must not depend on each other, and must not throw. Returns
// when all are done. Each thread walks a range of its own, so that what follows in
// memory is mostly its own too, and then helps with the others'. The caller works too
// and never waits for a thread that has not begun, so a busy pool cannot stall it.
template <typename Pool>
void parallel_for(Pool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  struct Shared {
    std::vector<IndexRange> ranges;
    std::atomic<int64_t> joined{0}, done{0};
    explicit Shared(int64_t workers) : ranges(workers) {}
  };
  int64_t workers = std::max<int64_t>(std::min<int64_t>(pool.num_threads(), count), 1);
  // Helpers that begin late find nothing left, and must still find this. `body` is
  // gone by then: it lives until all indices are done, and is reached only for one.
  auto shared = std::make_shared<Shared>(workers);
  for (int64_t i = 0; i < workers; ++i) {
    shared->ranges[i].set(count * i / workers, count * (i + 1) / workers);
  }
  auto work = [shared, workers, address = &body] {
    int64_t done = 0, own = shared->joined.fetch_add(1, std::memory_order_relaxed);
    for (int64_t offset = 0; offset < workers; ++offset) {
      IndexRange& range = shared->ranges[(own + offset) % workers];
      for (int64_t i; (i = range.take(offset == 0)) >= 0; ++done) (*address)(i);
    }
    shared->done.fetch_add(done, std::memory_order_release);
  };
  try {
    for (int64_t h = 1; h < workers; ++h) pool.Schedule([work] { work(); });
  } catch (const std::bad_alloc&) {
    // Fewer helpers. Leaving would take `body` away from those that have begun.
  }
  work();
  for (int64_t round = 0; shared->done.load(std::memory_order_acquire) < count;) {
    relax(round++);
  }
}

}  // namespace spec_jax
