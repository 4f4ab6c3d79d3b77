// One vector type for every instruction set: float lanes, and how weights become them.
//
// The instruction set is chosen by a macro, SPEC_JAX_AMX, SPEC_JAX_AVX512BF16,
// SPEC_JAX_AVX512, SPEC_JAX_AVX2 or none, beside the compiler's flags for it: this header
// is compiled once for each. Within one set, every function here has one fixed order of
// operations, so that a result depends on its inputs alone. Nothing here may depend on how
// many rows are live, on the number of threads, or on where an array lies.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(SPEC_JAX_AMX)
#define SPEC_JAX_AVX512BF16  // and products of bf16 by tiles
#endif
#if defined(SPEC_JAX_AVX512BF16)
#define SPEC_JAX_AVX512  // and products of bf16 by pairs
#endif

// Another header may stand in for the compiler's intrinsics: so an instruction set is
// tested where no processor has it.
#if defined(SPEC_JAX_INTRINSICS)
#include SPEC_JAX_INTRINSICS
#elif defined(SPEC_JAX_AVX512) || defined(SPEC_JAX_AVX2)
#include <immintrin.h>
#endif

namespace spec_jax {

// The bytes at `p` as another type.
template <typename To, typename From>
inline To load_as(const From* p) {
  To out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  return load_as<float>(&wide);
}
inline float to_float(float x) { return x; }

// Round to nearest, ties to even, as XLA and PyTorch do; NaN stays NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits = load_as<uint32_t>(&x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>(bits >> 16)};
}

template <typename T>
T round_to(float x);
template <>
inline float round_to<float>(float x) { return x; }
template <>
inline bf16 round_to<bf16>(float x) { return to_bf16(x); }

#if defined(SPEC_JAX_AVX512) || defined(SPEC_JAX_AVX2)

// Lane i of out[j] is the j-th 32-bit word at rows[i] + at.
inline void transpose_eight(const char* const* rows, int64_t at, __m256 (&out)[4]) {
  auto words = [&](int i) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
  };
  __m256d even[2], odd[2];
  for (int i = 0; i < 2; ++i) {
    __m256 first = _mm256_set_m128(words(2 * i + 4), words(2 * i));
    __m256 second = _mm256_set_m128(words(2 * i + 5), words(2 * i + 1));
    even[i] = _mm256_castps_pd(_mm256_unpacklo_ps(first, second));
    odd[i] = _mm256_castps_pd(_mm256_unpackhi_ps(first, second));
  }
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(even[0], even[1]));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(even[0], even[1]));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(odd[0], odd[1]));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(odd[0], odd[1]));
}
// Eight pairs of bf16, as 16 floats in their order.
inline void store_pairs_as_floats(float* p, __m256 pairs) {
  __m256i bits = _mm256_castps_si256(pairs);
  __m256i odd = _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  __m256i even = _mm256_slli_epi32(bits, 16);
  __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
  auto store = [](float* p, __m256i x) { _mm256_storeu_ps(p, _mm256_castsi256_ps(x)); };
  store(p, _mm256_permute2x128_si256(low, high, 0x20));
  store(p + 8, _mm256_permute2x128_si256(low, high, 0x31));
}

#endif

#if defined(SPEC_JAX_AVX512)
constexpr int kLanes = 16;
using Vec = __m512;
#elif defined(SPEC_JAX_AVX2)
constexpr int kLanes = 8;
using Vec = __m256;
#else
constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(4 * kLanes)));
#endif

// GCC and Clang compile what follows for any width, in whatever registers there are.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs are read as integers");
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// (GCC 12 takes several instructions to convert integers to another size, where one does.)
#if defined(SPEC_JAX_AVX512) && !defined(SPEC_JAX_INTRINSICS)
inline Bits widen(Halves x) { return (Bits)_mm512_cvtepu16_epi32((__m256i)x); }
inline Halves narrow(Bits x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(SPEC_JAX_AVX2)
inline Bits widen(Halves x) { return (Bits)_mm256_cvtepu16_epi32((__m128i)x); }
inline Halves narrow(Bits x) {
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                                  _mm256_extracti128_si256((__m256i)x, 1));
}
#else
inline Bits widen(Halves x) { return __builtin_convertvector(x, Bits); }
inline Halves narrow(Bits x) { return __builtin_convertvector(x, Halves); }
#endif
inline Vec zero() { return Vec{}; }
inline Vec load(const float* p) { return load_as<Vec>(p); }
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec subtract(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec divide(Vec a, Vec b) { return a / b; }
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
inline Vec load(const bf16* p) { return (Vec)(widen(load_as<Halves>(p)) << 16); }
inline Vec load_even(const bf16* p) { return (Vec)(load_as<Bits>(p) << 16); }
inline Vec load_odd(const bf16* p) { return (Vec)(load_as<Bits>(p) & 0xffff0000u); }
inline Vec round_to_bf16(Vec x) {
  Bits bits = (Bits)x, up = bits + 0x7fffu + ((bits >> 16) & 1u), quiet = bits | 0x400000u;
  Bits rounded = x != x ? quiet : up;
  return (Vec)(rounded & 0xffff0000u);
}
// Rounded: the even elements and the odd ones of kLanes pairs.
inline void store_pairs(bf16* p, Vec even, Vec odd) {
  Bits both = (Bits)round_to_bf16(even) >> 16 | (Bits)round_to_bf16(odd);
  std::memcpy(static_cast<void*>(p), &both, sizeof both);
}
inline void store(bf16* p, Vec x) {
  Halves high = narrow((Bits)round_to_bf16(x) >> 16);
  std::memcpy(static_cast<void*>(p), &high, sizeof high);
}
// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
constexpr float kShifter = 12582912.0f;
inline Vec round_even(Vec x) { return (x + kShifter) - kShifter; }
// (By way of those bits, since converting a NaN to an integer is undefined.)
inline Vec pow2(Vec n) { return (Vec)((Bits)(n + (kShifter + 127.0f)) << 23); }

#if defined(SPEC_JAX_AVX512)

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm512_min_ps(a, b); }
#if defined(SPEC_JAX_AVX512BF16)
// Elements 2i and 2i + 1 of bf16 in lane i.
using Pairs = __m512bh;
inline Pairs load_pairs(const bf16* p) { return (Pairs)load_as<Bits>(p); }
inline Pairs broadcast_pair(const bf16* p) {
  return (Pairs)(Bits{} + load_as<uint32_t>(p));
}
// c + a.odd * b.odd + a.even * b.even, in this order, each product added with one
// rounding, to nearest even. Denormal operands and results are zero, however the thread
// treats them elsewhere. (VDPBF16PS, Intel's manual, volume 2.)
inline Vec dot(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
#endif
// Lane i of out[j] is the j-th 32-bit word at rows[i] + at.
inline void transpose(const char* const* rows, int64_t at, Vec (&out)[4]) {
  auto words = [&](int i) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
  };
  __m512d even[2], odd[2];
  for (int i = 0; i < 2; ++i) {
    __m512 x[2];
    for (int j = 0; j < 2; ++j) {  // Four rows, each four after the one before.
      x[j] = _mm512_castps128_ps512(words(2 * i + j));
      x[j] = _mm512_insertf32x4(x[j], words(2 * i + j + 4), 1);
      x[j] = _mm512_insertf32x4(x[j], words(2 * i + j + 8), 2);
      x[j] = _mm512_insertf32x4(x[j], words(2 * i + j + 12), 3);
    }
    even[i] = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
    odd[i] = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
  }
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(even[0], even[1]));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(even[0], even[1]));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(odd[0], odd[1]));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(odd[0], odd[1]));
}
#if defined(SPEC_JAX_INTRINSICS)
template <typename V>
inline void keep_in_register(V&) {}  // No register is as wide.
#else
template <typename V>
inline void keep_in_register(V& x) { asm("" : "+v"(x)); }
#endif

#elif defined(SPEC_JAX_AVX2)

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec minimum(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline void transpose(const char* const* rows, int64_t at, Vec (&out)[4]) {
  transpose_eight(rows, at, out);
}
template <typename V>
inline void keep_in_register(V& x) { asm("" : "+x"(x)); }

#else

inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x}; }
// Two roundings, not one: built with contraction off, so that it stays so.
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
inline void transpose(const char* const* rows, int64_t at, Vec (&out)[4]) {
  float words[4][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) std::memcpy(&words[j][i], rows[i] + at + 4 * j, 4);
  }
  for (int j = 0; j < 4; ++j) out[j] = load(words[j]);
}
template <typename V>
inline void keep_in_register(V&) {}

#endif

// The lanes as they are, at a place for as many words.
template <typename T, typename V>
inline void store_words(T* p, V x) {
  std::memcpy(static_cast<void*>(p), &x, sizeof x);
}

// A hint to fetch what lies `bytes` past `p`, which may be past the end of the array:
// no pointer is formed to it. As far as the second cache: the first has half as many
// lines on their way, and they would be gone from it before their turn. (GCC leaves out
// calls of a function that only prefetches, unless it is inlined before it looks.)
[[gnu::always_inline]] inline void prefetch(const void* p, int64_t bytes) {
#if defined(SPEC_JAX_AVX512) || defined(SPEC_JAX_AVX2)
  uintptr_t address = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes);
  _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1);
#endif
}

// The elements number `part` of kLanes words at `p`, each one float or two of bf16.
inline Vec load_part(const float* p, int) { return load(p); }
inline Vec load_part(const bf16* p, int part) {
  return part == 0 ? load_even(p) : load_odd(p);
}

// Loads the lanes at `value`, of which the first `left` are in the array, the rest 0.
template <typename T>
inline Vec load_lanes(const T* value, int64_t left) {
  if (left >= kLanes) return load(value);
  T copy[kLanes];
  std::memset(static_cast<void*>(copy), 0, sizeof copy);
  std::memcpy(static_cast<void*>(copy), value, left * sizeof(T));
  return load(copy);
}

// Rounds the lanes to T, and stores the first `left` of them.
template <typename T>
inline void store_lanes(T* to, int64_t left, Vec lanes) {
  if (left >= kLanes) return store(to, lanes);
  T copy[kLanes];
  store(copy, lanes);
  std::memcpy(static_cast<void*>(to), copy, left * sizeof(T));
}

// Rounded to T, as floats.
template <typename T>
inline Vec round_lanes(Vec x) { return sizeof(T) == 2 ? round_to_bf16(x) : x; }

// Each lane is that which stands `kWidth` away, a power of two, in the other half of a
// pair of such stretches.
template <int kWidth>
inline Vec across(Vec x) {
#if defined(SPEC_JAX_AVX512) && !defined(SPEC_JAX_INTRINSICS)
  if (kWidth == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
  if (kWidth == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  return _mm512_permute_ps(x, kWidth == 2 ? 0x4e : 0xb1);
#elif defined(SPEC_JAX_AVX2)
  if (kWidth == 4) return _mm256_permute2f128_ps(x, x, 0x01);
  return _mm256_permute_ps(x, kWidth == 2 ? 0x4e : 0xb1);
#else
  float lane[kLanes], out[kLanes];
  store(lane, x);
  for (int i = 0; i < kLanes; ++i) out[i] = lane[i ^ kWidth];
  return load(out);
#endif
}

// All lanes by one operation: the upper half with the lower, and again.
template <int kWidth = kLanes / 2, typename Operation>
inline float reduce(Vec x, const Operation& operation) {
  x = operation(x, across<kWidth>(x));
  if constexpr (kWidth > 1) {
    return reduce<kWidth / 2>(x, operation);
  } else {
    return load_as<float>(&x);
  }
}

inline float sum(Vec x) { return reduce(x, add); }

// The largest lane, none of which is NaN.
inline float largest_lane(Vec x) { return reduce(x, maximum); }

// exp(x) within 2 ulp; below -87 it is 0, above 88 infinite, and NaN stays NaN: where
// either operand is NaN, `maximum` and `minimum` return the second.
// Cody-Waite reduction and the degree-6 polynomial of Cephes `expf`.
inline Vec exp(Vec x) {
  Vec lowest = broadcast(-87.0f), highest = broadcast(88.0f);
  Vec clamped = minimum(highest, maximum(lowest, x));
  Vec n = round_even(mul(clamped, broadcast(1.44269504088896341f)));
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, broadcast(1.0f)));
  p = where_less(x, lowest, zero(), mul(p, pow2(n)));
  return where_less(highest, x, broadcast(std::numeric_limits<float>::infinity()), p);
}

// As above for one value.
inline float exp(float x) {
  Vec lanes = exp(broadcast(x));
  return load_as<float>(&lanes);
}

}  // namespace spec_jax
