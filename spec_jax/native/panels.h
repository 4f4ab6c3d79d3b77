// Weight matrices in the order in which they are multiplied.
//
// A matrix [N, K] stands as panels of kPanel outputs, each with its words of k one after
// the other: [N / kPanel, K / kWord, kPanel, kWord], both divisions rounded up, zeros
// where there is no such element. A word is 32 bits: one float, or two of bf16, which
// are the even element and the odd one. So lanes are outputs, and a panel is one stream
// of memory. One order for all instruction sets.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace spec_jax {

constexpr int64_t kPanel = 16;                      // outputs
constexpr int64_t kVectors = kPanel / kLanes;       // of sums, in a panel
template <typename T>
constexpr int64_t kWord = 4 / sizeof(T);            // elements of k in a word

// Words of K elements.
template <typename T>
constexpr int64_t words_of(int64_t K) {
  return (K + kWord<T> - 1) / kWord<T>;
}
// Panels of N outputs.
constexpr int64_t panels_of(int64_t N) { return (N + kPanel - 1) / kPanel; }

template <typename T>
struct Panels {
  const T* data;
  int64_t N, K;

  int64_t words() const { return words_of<T>(K); }
  int64_t count() const { return panels_of(N); }
  const T* panel(int64_t i) const { return data + i * words() * kPanel * kWord<T>; }
  // The outputs from `n`, with which a panel begins.
  Panels from(int64_t n) const { return {panel(n / kPanel), N - n, K}; }
};

// Writes panel `i` of w [N, K] to `to`.
template <typename T>
void pack_panel(const T* w, int64_t N, int64_t K, int64_t i, T* to) {
  constexpr int64_t kSize = kWord<T>;
  std::fill_n(to, words_of<T>(K) * kPanel * kSize, T{});
  int64_t outputs = std::min(kPanel, N - i * kPanel);
  for (int64_t n = 0; n < outputs; ++n) {
    const T* row = w + (i * kPanel + n) * K;
    for (int64_t k = 0; k < K; ++k) {
      to[k / kSize * kPanel * kSize + n * kSize + k % kSize] = row[k];
    }
  }
}

// Row `n` of the matrix.
template <typename T>
void take_row(const Panels<T>& w, int64_t n, T* to) {
  const T* from = w.panel(n / kPanel) + n % kPanel * kWord<T>;
  for (int64_t k = 0; k < w.K; ++k) {
    to[k] = from[k / kWord<T> * kPanel * kWord<T> + k % kWord<T>];
  }
}

}  // namespace spec_jax
