// Products of bf16 by tiles (AMX): up to 16 rows by 16 outputs by 32 elements of k in one
// instruction, so that 16 rows take as long as one.
//
// A sum is a lane of a tile, to which the products of each 32 elements are added: those of
// the even elements one after the other, from zero, and those of the odd ones likewise;
// then both sums to each other, and the result to the lane. Each addition is rounded once,
// to nearest even; denormal operands and results are zero. Past the end of k stand zeros.
// (TDPBF16PS, Intel's manual, volume 2.)

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "interleave.h"
#include "panels.h"
#include "simd.h"

namespace spec_jax {

// As `multiply_tile` in `gemm.h`.
template <int P, bool kAsks>
void multiply_tiles(const RowGroup<bf16>& x, const bf16* w, int64_t words, float* sums,
                    int64_t stride, int64_t skipped);

#if defined(SPEC_JAX_AMX)

constexpr int64_t kWide = 32;  // elements: a word of a panel, and a row of a tile
constexpr int64_t kWideBytes = kWide * int64_t{sizeof(bf16)};

// The tiles of a thread for one loop of a team: 0 to 3 are sums, 4 is of rows, and 5 to 7
// are of weights. They are shaped when a product first needs them, and then for groups of
// another size: that takes as long as some thirty products. Between loops the thread is
// XLA's, which may shape them for itself.
class TilesInUse {
 public:
  TilesInUse() { rows() = 0; }
  TilesInUse(const TilesInUse&) = delete;
  ~TilesInUse() {
    if (rows() > 0) _tile_release();
    rows() = 0;
  }

  // Shapes sums and rows for a group of `size` rows.
  static void shape(int64_t size) {
    if (rows() == size) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = kWideBytes;
      shapes.rows[i] = static_cast<uint8_t>(i < 5 ? size : kTileWords);
    }
    _tile_loadconfig(&shapes);
    rows() = size;
  }

 private:
  static int64_t& rows() {
    static thread_local int64_t rows = 0;
    return rows;
  }
};

// Adds the products of 32 elements: of rows that follow one another, by P panels.
template <int P>
inline void add_tiles(const bf16* x, const bf16* const (&w)[P]) {
  asm volatile("" ::: "memory");  // GCC does not know that these instructions read it.
  _tile_loadd(4, x, kWideBytes);
  _tile_loadd(5, w[0], kWideBytes);
  _tile_dpbf16ps(0, 4, 5);
  if constexpr (P > 1) {
    _tile_loadd(6, w[1], kWideBytes);
    _tile_dpbf16ps(1, 4, 6);
  }
  if constexpr (P > 2) {
    _tile_loadd(7, w[2], kWideBytes);
    _tile_dpbf16ps(2, 4, 7);
  }
  if constexpr (P > 3) {
    _tile_loadd(5, w[3], kWideBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
}

// Adds the products of `count` words from `k` on, which are no tile as they lie: at most 16,
// of panels of `words`.
template <int P>
void add_words(const RowGroup<bf16>& x, const bf16* w, int64_t words, int64_t k,
               int64_t count) {
  bf16 row[kTileRows][kWide] = {}, panel[P][kTileWords][kWide] = {};
  const bf16* panels[P];
  for (int64_t r = 0; r < x.size; ++r) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(row[r] + i * kWord<bf16>, x.at(k + i, r), sizeof(float));
    }
  }
  for (int j = 0; j < P; ++j) {
    std::memcpy(panel[j], w + (j * words + k) * kWide, count * kWideBytes);
    panels[j] = panel[j][0];
  }
  add_tiles(row[0], panels);
}

template <int P, bool kAsks>
void multiply_tiles(const RowGroup<bf16>& x, const bf16* w, int64_t words, float* sums,
                    int64_t stride, int64_t skipped) {
  TilesInUse::shape(x.size);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t k = 0, jump = (P - 1) * words * kWideBytes + skipped;
  for (; x.first % kTileWords == 0 && k + kTileWords <= words; k += kTileWords) {
    // Past the end of a panel lies what is read with the next ones.
    int64_t ahead = kAheadBytes + (k < words - kAheadBytes / kWideBytes ? 0 : jump);
    const bf16* panels[P];
#pragma GCC unroll 4
    for (int j = 0; j < P; ++j) {
      panels[j] = w + (j * words + k) * kWide;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTileWords; ++i) {
        if (kAsks) prefetch(panels[j] + i * kWide, ahead);
      }
    }
    add_tiles(x.at(k), panels);
  }
  for (; k < words; k += kTileWords) {
    add_words<P>(x, w, words, k, std::min(words - k, kTileWords));
  }
  stride *= sizeof(float);
  _tile_stored(0, sums, stride);
  if constexpr (P > 1) _tile_stored(1, sums + kPanel, stride);
  if constexpr (P > 2) _tile_stored(2, sums + 2 * kPanel, stride);
  if constexpr (P > 3) _tile_stored(3, sums + 3 * kPanel, stride);
}

#else

struct TilesInUse {
  TilesInUse() {}  // No variable of this type is unused.
};

#endif

}  // namespace spec_jax
