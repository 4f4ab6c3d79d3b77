// Memory for what one call computes, which the next call on the same thread uses again.
//
// Memory that was given back to the system must be mapped again, with a fault and zeros
// for each page: for the rows of a prompt that took a sixteenth of its time.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace spec_jax {

// Blocks that a thread does not use at present, by the logarithm of their bytes.
class KeptBlocks {
 public:
  static constexpr int kLeast = 14, kMost = 24;  // 16 KiB to 16 MiB; malloc keeps less
  static constexpr size_t kEach = 8;             // blocks of one size

  ~KeptBlocks() {
    for (auto& blocks : blocks_) {
      for (void* block : blocks) std::free(block);
    }
  }

  void* take(int size) {
    auto& blocks = blocks_[size - kLeast];
    if (blocks.empty()) return std::malloc(size_t{1} << size);
    void* block = blocks.back();
    blocks.pop_back();
    return block;
  }
  void give(int size, void* block) {
    auto& blocks = blocks_[size - kLeast];
    if (blocks.capacity() == 0) blocks.reserve(kEach);
    if (blocks.size() == kEach) return std::free(block);
    blocks.push_back(block);
  }

  // Returns the logarithm of the size of a block for `bytes`; 0: it is not to be kept.
  static int size_of(size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)  // It sees faults only in blocks of malloc's own.
    for (int size = kLeast; size <= kMost; ++size) {
      if (bytes > size_t{1} << (kLeast - 1) && bytes <= size_t{1} << size) return size;
    }
#endif
    return 0;
  }

  static KeptBlocks& of_thread() {
    static thread_local KeptBlocks kept;
    return kept;
  }

 private:
  std::vector<void*> blocks_[kMost - kLeast + 1];
};

template <typename T>
struct ScratchAllocator {
  using value_type = T;
  ScratchAllocator() = default;
  template <typename U>
  ScratchAllocator(const ScratchAllocator<U>&) {}

  T* allocate(size_t n) {
    int size = KeptBlocks::size_of(n * sizeof(T));
    void* block = size ? KeptBlocks::of_thread().take(size) : std::malloc(n * sizeof(T));
    if (block == nullptr) throw std::bad_alloc();
    return static_cast<T*>(block);
  }
  void deallocate(T* block, size_t n) {
    int size = KeptBlocks::size_of(n * sizeof(T));
    if (size == 0) return std::free(block);
    KeptBlocks::of_thread().give(size, block);
  }

  // Elements made without a value hold anything: users write before they read.
  template <typename U>
  void construct(U* at) { ::new (static_cast<void*>(at)) U; }

  template <typename U>
  bool operator==(const ScratchAllocator<U>&) const { return true; }
  template <typename U>
  bool operator!=(const ScratchAllocator<U>&) const { return false; }
};

// A vector of what one call computes, for the thread that makes the call.
template <typename T>
using Scratch = std::vector<T, ScratchAllocator<T>>;

}  // namespace spec_jax
