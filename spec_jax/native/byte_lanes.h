// Lanes of 32-bit integers, to each of which four products of bytes are added: exactly,
// so that all instruction sets have the same sums. And float16 as floats.
//
// Weights are stored as bytes 0 .. 255, 128 too large, since VNNI's instruction takes
// them without a sign; its sums begin with minus what the 128 add. Without VNNI the
// bytes are made signed again.
//
// Weights of four bits are stored as they are, 0 .. 15. Without VNNI each half of a
// lane sums 16 products of a block, each 15 * 127 at most; `whole` adds the halves.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace spec_jax {

// Loads four bytes of a row as one integer.
inline int32_t four_bytes(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return four;
}

#if defined(SPEC_JAX_AVX512)

using IntVec = __m512i;
struct Nibbles {
  __m512i value;
};
inline IntVec broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec to_floats(IntVec x) { return _mm512_cvtepi32_ps(x); }
inline Vec load_float16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Loads the lower halves of the bytes, or the upper ones.
inline Nibbles load_nibbles(const uint8_t* p, bool is_above) {
  __m512i w = _mm512_loadu_si512(p);
  return {_mm512_and_si512(is_above ? _mm512_srli_epi32(w, 4) : w, _mm512_set1_epi8(15))};
}
// Stores the low bytes of kLanes integers, whose bits come as floats.
inline void store_low_bytes(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
}
#if defined(__AVX512VNNI__) || defined(SPEC_JAX_INTRINSICS)
using Bytes = __m512i;
constexpr bool kSumsOffsets = true;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  return _mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(four));
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  return add_products(w.value, four, sums);
}
inline IntVec whole(IntVec sums) { return sums; }
#else
struct Bytes {
  __m512i magnitude;
  __mmask64 is_negative;
};
constexpr bool kSumsOffsets = false;
inline Bytes load_bytes(const uint8_t* p) {
  __m512i w = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  __m512i x = _mm512_set1_epi32(four);
  x = _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
  // Two products are 2 * 128 * 127 at most, which 16 bits hold.
  __m512i pairs = _mm512_maddubs_epi16(w.magnitude, x);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(w.value, _mm512_set1_epi32(four)));
}
inline IntVec whole(IntVec sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#endif

#elif defined(SPEC_JAX_AVX2)

using IntVec = __m256i;
struct Nibbles {
  __m256i value;
};
inline IntVec broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Vec to_floats(IntVec x) { return _mm256_cvtepi32_ps(x); }
inline Vec load_float16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Nibbles load_nibbles(const uint8_t* p, bool is_above) {
  __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_and_si256(is_above ? _mm256_srli_epi32(w, 4) : w, _mm256_set1_epi8(15))};
}
inline void store_low_bytes(int8_t* p, Vec x) {
  __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(255));
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low),
                                   _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
#if defined(__AVXVNNI__)
using Bytes = __m256i;
constexpr bool kSumsOffsets = true;
inline Bytes load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  return _mm256_dpbusd_avx_epi32(sums, w, _mm256_set1_epi32(four));
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  return add_products(w.value, four, sums);
}
inline IntVec whole(IntVec sums) { return sums; }
#else
struct Bytes {
  __m256i magnitude, value;
};
constexpr bool kSumsOffsets = false;
inline Bytes load_bytes(const uint8_t* p) {
  __m256i w = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                               _mm256_set1_epi8(-128));
  return {_mm256_abs_epi8(w), w};
}
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(four), w.value);
  __m256i pairs = _mm256_maddubs_epi16(w.magnitude, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w.value, _mm256_set1_epi32(four)));
}
inline IntVec whole(IntVec sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif

#else

typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
inline IntVec broadcast_int(int32_t x) { return IntVec{x, x, x, x, x, x, x, x}; }
inline Vec to_floats(IntVec x) { return __builtin_convertvector(x, Vec); }
// Works with integers but for one product: the thread may flush denormals to zero.
inline Vec load_float16(const uint8_t* p) {
  Bits half = __builtin_convertvector(load_as<Halves>(p), Bits);
  Bits sign = (half & 0x8000u) << 16, bits = half & 0x7fffu;
  Bits normal = (bits << 13) + (112u << 23);
  normal += (Bits)(bits >= 0x7c00u) & (112u << 23);  // infinite, or NaN
  Vec small = __builtin_convertvector((IntVec)bits, Vec) * 0x1p-24f;
  return (Vec)((bits < 0x400u ? (Bits)small : normal) | sign);
}
inline void store_low_bytes(int8_t* p, Vec x) {
  typedef uint8_t Low __attribute__((vector_size(kLanes)));
  Low low = __builtin_convertvector((Bits)x & 255u, Low);
  std::memcpy(p, &low, sizeof low);
}
using Bytes = Bits;
constexpr bool kSumsOffsets = false;
inline Bytes load_bytes(const uint8_t* p) { return load_as<Bits>(p) ^ 0x80808080u; }
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  for (int i = 0; i < 4; ++i) {
    IntVec byte = (IntVec)(w << (24 - 8 * i)) >> 24;
    sums += byte * static_cast<int8_t>(static_cast<uint32_t>(four) >> 8 * i);
  }
  return sums;
}
struct Nibbles {
  Bytes value;
};
inline Nibbles load_nibbles(const uint8_t* p, bool is_above) {
  return {load_as<Bits>(p) >> (is_above ? 4 : 0) & 0x0f0f0f0fu};
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  return add_products(w.value, four, sums);
}
inline IntVec whole(IntVec sums) { return sums; }

#endif

// Loads weights as `add_products` takes them.
template <bool kIsFour>
auto load_weights(const uint8_t* p, bool is_above) {
  if constexpr (kIsFour) return load_nibbles(p, is_above);
  else return load_bytes(p);
}

}  // namespace spec_jax
