// Weight matrices in the order in which they are multiplied.
//
// A matrix [N, K] stands as panels of kPanel outputs, each with its words of k one after
// the other: [N / kPanel, K / kWord, kPanel, kWord], both divisions rounded up, zeros
// where there is no such element. A word is 32 bits: one float, or two of bf16, which
// are the even element and the odd one. So lanes are outputs, and a panel is one stream
// of memory. All instruction sets use this order.
//
// Weights of eight bits stand in blocks of kBlock along k, two by two: the bytes of the
// first, [kBlock / 4, kPanel, 4], those of the second, and the float16 scales of both,
// [2, kPanel]. So a panel is whole lines of a cache. Bytes are 128 too large; past the
// matrix weights and scales are zero. With four bits a byte holds the values k and
// k + kBlock / 2 of a block, the latter above, [kBlock / 8, kPanel, 4], and float16 minima
// follow the scales.

#pragma once

#include <algorithm>
#include <cstdint>

#include "byte_lanes.h"
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

// How far ahead weights are asked for, in each panel: a processor does not look far enough
// by itself, and not past the end of what it has read so far.
constexpr int64_t kAheadBytes = 4096;

constexpr int64_t kBlock = 32;                             // weights that share a scale
constexpr int64_t kLineBytes = 4 * kPanel;
template <bool kIsFour>
constexpr int64_t kBlockLines = kIsFour ? kBlock / 8 : kBlock / 4;  // of integers
template <bool kIsFour>                                             // of a panel's two blocks
constexpr int64_t kPairBytes = kLineBytes * (2 * kBlockLines<kIsFour> + (kIsFour ? 2 : 1));
constexpr int64_t pairs_of(int64_t K) { return (K + 2 * kBlock - 1) / (2 * kBlock); }

// For rows of type T: of T, or of eight bits, or four.
template <typename T>
struct Panels {
  const T* data;  // or null
  int64_t N, K;
  const uint8_t* blocks = nullptr;  // where weights are of eight bits or four
  bool is_four = false;

  explicit operator bool() const { return data != nullptr || blocks != nullptr; }
  int64_t words() const { return words_of<T>(K); }
  int64_t pairs() const { return pairs_of(K); }
  int64_t count() const { return panels_of(N); }
  int64_t panel_bytes() const {
    if (blocks) return pairs() * (is_four ? kPairBytes<true> : kPairBytes<false>);
    return words() * kPanel * int64_t{kWord<T> * sizeof(T)};
  }
  const T* panel(int64_t i) const { return data + i * words() * kPanel * kWord<T>; }
  const uint8_t* panel_of_blocks(int64_t i) const { return blocks + i * panel_bytes(); }
  // The outputs from `n`, with which a panel begins.
  Panels from(int64_t n) const {
    if (blocks) return {nullptr, N - n, K, panel_of_blocks(n / kPanel), is_four};
    return {panel(n / kPanel), N - n, K};
  }
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

template <bool kIsFour, typename T>
void take_row_of_blocks(const Panels<T>& w, int64_t n, T* to) {
  constexpr int64_t kLines = kBlockLines<kIsFour>;
  const uint8_t* panel = w.panel_of_blocks(n / kPanel);
  int64_t output = n % kPanel;
  float scales[kPanel], minima[kPanel] = {};
  for (int64_t k = 0; k < w.K; ++k) {
    const uint8_t* pair = panel + k / (2 * kBlock) * kPairBytes<kIsFour>;
    int64_t half = k / kBlock % 2, word = k % kBlock / 4;
    if (k % kBlock == 0) {
      const uint8_t* from = pair + 2 * kLines * kLineBytes + half * 2 * kPanel;
      for (int64_t i = 0; i < kPanel; i += kLanes) {
        store(scales + i, load_float16(from + 2 * i));
        if (kIsFour) store(minima + i, load_float16(from + kLineBytes + 2 * i));
      }
    }
    int value = pair[(half * kLines + word % kLines) * kLineBytes + 4 * output + k % 4];
    value = kIsFour ? value >> word / kLines * 4 & 15 : value - 128;
    float wide = static_cast<float>(value) * scales[output];
    to[k] = round_to<T>(kIsFour ? wide + minima[output] : wide);
  }
}

// Row `n` of the matrix: of weights of eight bits or four, rounded to T.
template <typename T>
void take_row(const Panels<T>& w, int64_t n, T* to) {
  if (w.blocks) return w.is_four ? take_row_of_blocks<true>(w, n, to)
                                 : take_row_of_blocks<false>(w, n, to);
  const T* from = w.panel(n / kPanel) + n % kPanel * kWord<T>;
  for (int64_t k = 0; k < w.K; ++k) {
    to[k] = from[k / kWord<T> * kPanel * kWord<T> + k % kWord<T>];
  }
}

}  // namespace spec_jax
