// AVX-512 and AMX for machines without them: what `simd.h` and `amx.h` use, from SIMD
// Everywhere, and what is missing there or rounds otherwise. Included in the place of the
// compiler's intrinsics.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// First, where there is one: its names cannot be declared after they are replaced.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
// Only what `simd.h` uses: all of avx512.h takes three times as long to compile.
#include <simde/x86/avx512/cast.h>
#include <simde/x86/avx512/setzero.h>  // for the next one
#include <simde/x86/avx512/insert.h>
#include <simde/x86/avx512/max.h>
#include <simde/x86/avx512/min.h>
#include <simde/x86/avx512/set1.h>
#include <simde/x86/avx512/types.h>
#include <simde/x86/avx512/unpackhi.h>
#include <simde/x86/avx512/unpacklo.h>

// f(i) for each of 16 lanes of 32 bits.
template <typename To, typename F>
inline To emulate_lanes(F f) {
  decltype(f(0)) lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = f(i);
  To out;
  static_assert(sizeof lane == sizeof out, "16 lanes");
  std::memcpy(&out, lane, sizeof out);
  return out;
}

// Lane `i` of an array of lanes of type T.
template <typename T, typename V>
inline T emulated_lane(const V& x, int i) {
  T out;
  std::memcpy(&out, reinterpret_cast<const char*>(&x) + i * sizeof(T), sizeof out);
  return out;
}

inline __m512 emulate_cvtph_ps(__m256i x) {
  return emulate_lanes<__m512>([&](int i) {
    int bits = emulated_lane<uint16_t>(x, i), exponent = bits >> 10 & 31;
    int whole = (bits & 1023) + (exponent ? 1024 : 0);
    float size = std::ldexp(static_cast<float>(whole), (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = whole == 1024 ? INFINITY : NAN;
    return bits >> 15 ? -size : size;
  });
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulate_cvtph_ps

// Bytes without a sign by bytes with one.
inline __m512i emulate_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  return emulate_lanes<__m512i>([&](int i) {
    int32_t sum = emulated_lane<int32_t>(sums, i);
    for (int at = 4 * i; at < 4 * i + 4; ++at) {
      sum += emulated_lane<uint8_t>(a, at) * emulated_lane<int8_t>(b, at);
    }
    return sum;
  });
}
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 emulate_dpbusd_epi32

// One rounding: SIMD Everywhere rounds the product too where the machine has no FMA.
inline __m512 emulate_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return emulate_lanes<__m512>([&](int i) {
    return std::fma(emulated_lane<float>(a, i), emulated_lane<float>(b, i),
                    emulated_lane<float>(c, i));
  });
}
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulate_fmadd_ps

// Denormals as zeros of their sign. (By their bits: a thread may take them for zeros.)
inline float emulate_flush(float x) {
  uint32_t bits = emulated_lane<uint32_t>(x, 0);
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  return emulated_lane<float>(bits, 0);
}
// Element `i` of bf16, as the high half of a float.
template <typename V>
inline float emulate_widen(const V& x, int i) {
  uint32_t bits = uint32_t{emulated_lane<uint16_t>(x, i)} << 16;
  return emulate_flush(emulated_lane<float>(bits, 0));
}

// As Intel's manual has it: the odd elements first, each product added with one
// rounding, denormals flushed before and after. (SIMD Everywhere: even first, the
// product rounded on its own, nothing flushed.)
inline __m512 emulate_dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  return emulate_lanes<__m512>([&](int i) {
    float sum = emulate_flush(emulated_lane<float>(c, i));
    for (int at : {2 * i + 1, 2 * i}) {
      sum = emulate_flush(std::fma(emulate_widen(a, at), emulate_widen(b, at), sum));
    }
    return sum;
  });
}
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulate_dpbf16_ps

// Tiles of AMX, of the thread: 16 rows of 64 bytes each, and their shapes.
struct EmulatedTiles {
  uint8_t rows[8];
  uint16_t row_bytes[8];
  alignas(64) char data[8][16][64];
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline void emulate_loadconfig(const void* shapes) {
  auto& tiles = emulated_tiles();
  const char* at = static_cast<const char*>(shapes);
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.row_bytes, at + 16, sizeof tiles.row_bytes);
  std::memcpy(tiles.rows, at + 48, sizeof tiles.rows);
}
inline void emulate_release() { std::memset(&emulated_tiles(), 0, sizeof(EmulatedTiles)); }
inline void emulate_zero(int tile) {
  std::memset(emulated_tiles().data[tile], 0, sizeof emulated_tiles().data[tile]);
}
inline void emulate_loadd(int tile, const void* from, int64_t stride) {
  auto& tiles = emulated_tiles();
  emulate_zero(tile);
  for (int r = 0; r < tiles.rows[tile]; ++r) {
    std::memcpy(tiles.data[tile][r], static_cast<const char*>(from) + r * stride,
                tiles.row_bytes[tile]);
  }
}
inline void emulate_stored(int tile, void* to, int64_t stride) {
  auto& tiles = emulated_tiles();
  for (int r = 0; r < tiles.rows[tile]; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[tile][r],
                tiles.row_bytes[tile]);
  }
}
inline void emulate_dpbf16ps_tiles(int sums, int a, int b) {
  auto& tiles = emulated_tiles();
  for (int r = 0; r < tiles.rows[sums]; ++r) {
    for (int n = 0; n < tiles.row_bytes[sums] / 4; ++n) {
      float half[2] = {0.0f, 0.0f};
      for (int k = 0; k < tiles.rows[b]; ++k) {
        for (int odd = 0; odd < 2; ++odd) {
          float x = emulate_widen(tiles.data[a][r], 2 * k + odd);
          float w = emulate_widen(tiles.data[b][k], 2 * n + odd);
          half[odd] = emulate_flush(std::fma(x, w, half[odd]));
        }
      }
      float sum = emulate_flush(emulated_lane<float>(tiles.data[sums][r], n));
      sum = emulate_flush(sum + emulate_flush(half[0] + half[1]));
      std::memcpy(tiles.data[sums][r] + 4 * n, &sum, sizeof sum);
    }
  }
}
// The compiler's are macros of its own.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulate_loadconfig
#define _tile_release emulate_release
#define _tile_zero emulate_zero
#define _tile_loadd emulate_loadd
#define _tile_stored emulate_stored
#define _tile_dpbf16ps emulate_dpbf16ps_tiles
