// Threads that share the loops of one call: of XLA's pool, or of a test's.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx.h"

namespace spec_jax {

// Waiting costs nothing that another thread could use: at first the other half of a
// core, and after a while the core, since more threads may run than there are cores.
inline void relax(int64_t round) {
#if defined(__x86_64__)
  if (round < 1000) return _mm_pause();
#endif
  std::this_thread::yield();
}

// Indices of one loop that one thread takes from the front, in order, while others may
// take them from the back. The loop's number is part of what is compared: a thread that is
// late from an earlier loop gets nothing of a later one.
class alignas(64) IndexRange {
 public:
  void set(uint64_t loop, int64_t begin, int64_t end) {
    bounds_.store(pack(loop, begin, end), std::memory_order_release);
  }

  // Up to `grain` indices that no other thread gets; none left: an empty range.
  bool take(uint64_t loop, int64_t grain, bool from_front, int64_t& begin,
            int64_t& end) {
    uint64_t bounds = bounds_.load(std::memory_order_acquire);
    for (;;) {
      int64_t first = bounds >> kBits & kMask, last = bounds & kMask;
      if (first >= last || bounds >> 2 * kBits != (loop & 0xffff)) return false;
      int64_t count = std::min(grain, last - first);
      begin = from_front ? first : last - count;
      end = begin + count;
      uint64_t rest = from_front ? pack(loop, end, last) : pack(loop, first, begin);
      if (bounds_.compare_exchange_weak(bounds, rest, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
        return true;
      }
    }
  }

 private:
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (1 << kBits) - 1;
  static uint64_t pack(uint64_t loop, uint64_t begin, uint64_t end) {
    return (loop & 0xffff) << 2 * kBits | begin << kBits | end;
  }
  std::atomic<uint64_t> bounds_{0};
};

// The caller, and threads of a pool that come to help with one loop after the other
// until the team is gone. The caller never waits for a helper that has not begun, so a
// busy pool cannot stall it; and it never becomes one, though a pool whose queues are full
// runs what it is given at once, in the caller. Helpers are asked for once, when there is
// a loop to share: between loops they wait without sleeping, since the next one is
// microseconds away.
template <typename Pool>
class Team {
 public:
  explicit Team(Pool& pool) : pool_(pool), size_(std::max<int64_t>(pool.num_threads(), 1)) {}
  Team(const Team&) = delete;
  ~Team() {
    if (shared_) shared_->loop.store(kNoMore, std::memory_order_release);
  }

  // Workers, with numbers from 0: each is one thread as long as the team lives.
  int64_t size() const { return size_; }

  // Calls `body(begin, end, worker)`, with indices and the number of the worker, for all
  // of [0, count), fewer than 2^24, at most `grain` of them at a time, each once, on any
  // thread and in any order: calls must not depend on each other, and must not throw.
  // Returns when all are done. Each worker walks a range of its own, which it is given
  // again in the next loop of the same size, so that what it reads may still be in its
  // caches; then it helps with the others'.
  template <typename Body>
  void run(int64_t count, int64_t grain, const Body& body) {
    if (size_ == 1 || count <= grain) {
      TilesInUse tiles;
      for (int64_t i = 0; i < count; i += grain) body(i, std::min(i + grain, count), 0);
      return;
    }
    if (!shared_) gather();
    Shared& shared = *shared_;
    shared.body = &body;
    shared.call = [](const void* body, int64_t begin, int64_t end, int64_t worker) {
      (*static_cast<const Body*>(body))(begin, end, worker);
    };
    shared.grain.store(grain, std::memory_order_relaxed);
    shared.done.store(0, std::memory_order_relaxed);
    ++loop_;
    for (int64_t i = 0; i < size_; ++i) {
      shared.ranges[i].set(loop_, count * i / size_, count * (i + 1) / size_);
    }
    shared.loop.store(loop_, std::memory_order_release);
    shared.work(loop_, 0);
    for (int64_t round = 0; shared.done.load(std::memory_order_acquire) < count;) {
      relax(round++);
    }
  }

 private:
  static constexpr uint64_t kNoMore = ~uint64_t{0};

  // Helpers that begin late find nothing left, and must still find this. `body` is gone
  // by then: it lives until all indices are done, and is reached only for one. The word
  // that helpers wait for and the one that the caller waits for have a line of a cache
  // each.
  struct Shared {
    std::vector<IndexRange> ranges;
    const void* body = nullptr;
    void (*call)(const void*, int64_t, int64_t, int64_t) = nullptr;
    std::atomic<int64_t> grain{1}, joined{1};
    alignas(64) std::atomic<uint64_t> loop{0};
    alignas(64) std::atomic<int64_t> done{0};
    explicit Shared(int64_t workers) : ranges(workers) {}

    void work(uint64_t number, int64_t worker) {
      int64_t workers = ranges.size(), finished = 0, begin, end;
      int64_t most = grain.load(std::memory_order_relaxed);
      TilesInUse tiles;
      for (int64_t offset = 0; offset < workers; ++offset) {
        IndexRange& range = ranges[(worker + offset) % workers];
        while (range.take(number, most, offset == 0, begin, end)) {
          call(body, begin, end, worker);
          finished += end - begin;
        }
      }
      if (finished > 0) done.fetch_add(finished, std::memory_order_release);
    }

    void help() {
      int64_t worker = joined.fetch_add(1, std::memory_order_relaxed);
      uint64_t before = 0;
      for (int64_t round = 0;;) {
        uint64_t now = loop.load(std::memory_order_acquire);
        if (now == kNoMore) return;
        if (now == before) {
          relax(round++);
          continue;
        }
        work(now, worker);
        before = now;
        round = 0;
      }
    }
  };

  void gather() {
    shared_ = std::make_shared<Shared>(size_);
    // A helper waits until the team is gone: the caller must not, since it ends the team.
    // (XLA's pool keeps 1,024 tasks a thread, and a thread that the system gives no core
    // does not come to fetch them: that many calls later its queue is full.)
    auto caller = std::this_thread::get_id();
    try {
      for (int64_t i = 1; i < size_; ++i) {
        pool_.Schedule([shared = shared_, caller] {
          if (std::this_thread::get_id() != caller) shared->help();
        });
      }
    } catch (const std::bad_alloc&) {
      // Fewer helpers: they take the ranges of the missing ones.
    }
  }

  Pool& pool_;
  int64_t size_;
  uint64_t loop_ = 0;
  std::shared_ptr<Shared> shared_;
};

}  // namespace spec_jax
