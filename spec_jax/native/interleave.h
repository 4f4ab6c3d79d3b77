// Rows side by side: the first word of each, the second of each, and so on.
//
// Words of eight rows are turned at once, and where rows are fewer each eight are stored
// over the end of the eight before: word by word, this would take a tenth of a step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"
#include "simd.h"

namespace spec_jax {

// The type of rows for weights of type T: bf16 where products go by pairs of it, which
// loses nothing of a row that is bf16; else float.
#if defined(SPEC_JAX_AVX512BF16)
template <typename T>
using Row = T;
#else
template <typename T>
using Row = float;
#endif

// Whether rows for weights of type T are multiplied by tiles of AMX.
#if defined(SPEC_JAX_AMX)
template <typename T>
constexpr bool kByTiles = sizeof(T) == 2;
#else
template <typename T>
constexpr bool kByTiles = false;
#endif
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileWords = 16;  // of k

// Words of K elements in a row, with room for whole tiles.
template <typename T>
constexpr int64_t row_words(int64_t K) {
  constexpr int64_t kWhole = kByTiles<T> ? kTileWords : 1;
  return (words_of<T>(K) + kWhole - 1) / kWhole * kWhole;
}

// Rows for weights of type T, as a product reads them from word `first` on:
// [words, size, kWord] or, by tiles, [words / kTileWords, size, kTileWords, kWord].
template <typename T>
struct RowGroup {
  const Row<T>* words;
  int64_t size, first = 0;

  // Word `k` of row `r`. By tiles, those up to the next multiple of kTileWords follow.
  const Row<T>* at(int64_t k, int64_t r = 0) const {
    k += first;
    if (!kByTiles<T>) return words + (k * size + r) * kWord<T>;
    int64_t row = k / kTileWords * size + r;
    return words + (row * kTileWords + k % kTileWords) * kWord<T>;
  }
};

constexpr int64_t kBeside = 8;  // rows, at most

inline float row_of(float x, float) { return x; }
inline float row_of(bf16 x, float) { return to_float(x); }
inline bf16 row_of(bf16 x, bf16) { return x; }

// Word `k` of the rows x[r], of elements [0, K), zeros after; to [rows, kWord].
template <typename T>
inline void interleave_word(const T* const* x, int64_t rows, int64_t K, int64_t k,
                            Row<T>* to) {
  constexpr int64_t kSize = kWord<T>;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < kSize; ++i) {
      T value = k * kSize + i < K ? x[r][k * kSize + i] : T{};
      to[r * kSize + i] = row_of(value, Row<T>{});
    }
  }
}

// The rows x[r] [K] as those of a `RowGroup`; up to kBeside of them, or kTileRows.
template <typename T>
void interleave(const T* const* x, int64_t rows, int64_t K, Row<T>* to) {
  constexpr int64_t kSize = kWord<T>;
  if constexpr (kByTiles<T>) {
    constexpr int64_t kTile = kTileWords * kSize;
    for (int64_t k = 0; k < K; k += kTile) {
      for (int64_t r = 0; r < rows; ++r, to += kTile) {
        int64_t left = std::min(K - k, kTile);
        std::memcpy(static_cast<void*>(to), x[r] + k, left * sizeof(T));
        std::fill_n(to + left, kTile - left, T{});
      }
    }
    return;
  }
  int64_t k = 0, whole = K / kSize;
  if (rows == 1) {
    if constexpr (sizeof(Row<T>) == sizeof(T)) {
      std::memcpy(static_cast<void*>(to), x[0], whole * kSize * sizeof(T));
      k = whole;
    } else {
      constexpr int64_t kStep = kLanes / kSize;
      for (; k + kStep <= whole; k += kStep) store(to + k * kSize, load(x[0] + k * kSize));
    }
  }
#if defined(SPEC_JAX_AVX512) || defined(SPEC_JAX_AVX2)
  const char* from[kBeside];
  for (int64_t i = 0; i < kBeside; ++i) {
    from[i] = reinterpret_cast<const char*>(x[std::min(i, rows - 1)]);
  }
  for (; k + 4 <= whole && (k + 3) * rows + kBeside <= whole * rows; k += 4) {
    __m256 words[4];
    transpose_eight(from, k * int64_t{sizeof(float)}, words);
    for (int64_t j = 0; j < 4; ++j) {
      Row<T>* word = to + (k + j) * rows * kSize;
      if constexpr (sizeof(Row<T>) == sizeof(T)) {
        store_words(word, words[j]);
      } else {
        store_pairs_as_floats(word, words[j]);
      }
    }
  }
#endif
  for (; k < words_of<T>(K); ++k) interleave_word(x, rows, K, k, to + k * rows * kSize);
}

}  // namespace spec_jax
