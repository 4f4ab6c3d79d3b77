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

typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
inline IntVec broadcast_int(int32_t x) { return IntVec{} + x; }
inline Vec to_floats(IntVec x) { return __builtin_convertvector(x, Vec); }

// Stores the low bytes of kLanes integers, whose bits come as floats.
inline void store_low_bytes(int8_t* p, Vec x) {
#if defined(SPEC_JAX_AVX512) && !defined(SPEC_JAX_INTRINSICS)
  __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
#elif defined(SPEC_JAX_AVX2)
  __m128i halves = (__m128i)narrow((Bits)x & 255u);
  __m128i bytes = _mm_packus_epi16(halves, halves);
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes = __builtin_convertvector((Bits)x & 255u, Bytes);
#endif
  std::memcpy(p, &bytes, kLanes);
}

struct Nibbles {
  Bits value;
};
// Loads the lower halves of the bytes, or the upper ones.
inline Nibbles load_nibbles(const uint8_t* p, bool is_above) {
  return {load_as<Bits>(p) >> (is_above ? 4 : 0) & 0x0f0f0f0fu};
}

#if defined(SPEC_JAX_AVX512)
inline Vec load_float16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(SPEC_JAX_AVX2)
inline Vec load_float16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#else
// Works with integers but for one product: the thread may flush denormals to zero.
inline Vec load_float16(const uint8_t* p) {
  Bits half = widen(load_as<Halves>(p));
  Bits sign = (half & 0x8000u) << 16, bits = half & 0x7fffu;
  Bits normal = (bits << 13) + (112u << 23);
  normal += (Bits)(bits >= 0x7c00u) & (112u << 23);  // infinite, or NaN
  Vec small = __builtin_convertvector((IntVec)bits, Vec) * 0x1p-24f;
  return (Vec)((bits < 0x400u ? (Bits)small : normal) | sign);
}
#endif

#if (defined(SPEC_JAX_AVX512) && !defined(__AVX512VNNI__) && \
     !defined(SPEC_JAX_INTRINSICS)) || (defined(SPEC_JAX_AVX2) && !defined(__AVXVNNI__))

#if defined(SPEC_JAX_AVX512)
struct Bytes {
  __m512i magnitude;
  __mmask64 is_negative;
};
inline Bytes split(__m512i w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
inline __m512i negate(Bytes w, __m512i x) {
  return _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
}
inline __m512i add_bytes(__m512i w, __m512i x) { return _mm512_maddubs_epi16(w, x); }
inline __m512i add_halves(__m512i x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
#else
struct Bytes {
  __m256i magnitude, value;
};
inline Bytes split(__m256i w) { return {_mm256_abs_epi8(w), w}; }
inline __m256i negate(Bytes w, __m256i x) { return _mm256_sign_epi8(x, w.value); }
inline __m256i add_bytes(__m256i w, __m256i x) { return _mm256_maddubs_epi16(w, x); }
inline __m256i add_halves(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
#endif
using Register = decltype(Bytes::magnitude);
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
constexpr bool kSumsOffsets = false;
inline Bytes load_bytes(const uint8_t* p) {
  return split((Register)(load_as<Bits>(p) ^ 0x80808080u));
}
inline IntVec whole(IntVec sums) { return (IntVec)add_halves((Register)sums); }
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  Register x = negate(w, (Register)broadcast_int(four));
  // Two products are 2 * 128 * 127 at most, which 16 bits hold.
  return sums + (IntVec)add_halves(add_bytes(w.magnitude, x));
}
inline IntVec add_products(Nibbles w, int32_t four, IntVec sums) {
  Register pairs = add_bytes((Register)w.value, (Register)broadcast_int(four));
  return (IntVec)((Shorts)sums + (Shorts)pairs);
}

#else

using Bytes = Bits;
#if defined(SPEC_JAX_AVX512) || defined(SPEC_JAX_AVX2)
constexpr bool kSumsOffsets = true;
inline Bytes load_bytes(const uint8_t* p) { return load_as<Bits>(p); }
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  IntVec x = broadcast_int(four);
#if defined(SPEC_JAX_AVX512)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
}
#else
constexpr bool kSumsOffsets = false;
inline Bytes load_bytes(const uint8_t* p) { return load_as<Bits>(p) ^ 0x80808080u; }
inline IntVec add_products(Bytes w, int32_t four, IntVec sums) {
  for (int i = 0; i < 4; ++i) {
    IntVec byte = (IntVec)(w << (24 - 8 * i)) >> 24;
    sums += byte * static_cast<int8_t>(static_cast<uint32_t>(four) >> 8 * i);
  }
  return sums;
}
#endif
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
