// Gumbel noise keyed by seed and position, as `rules.sampling.noise` has it: the same
// random bits, and logarithms within a few units of the last place.
//
// Compilers vectorise the plain loops over stretches of tokens: every instruction set
// does the same operations in the same order, and so makes the same noise.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace spec_jax {

// Threefry-2x32 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405).
struct Key {
  uint32_t high, low;
};

inline uint32_t rotate(uint32_t x, int by) { return x << by | x >> (32 - by); }

// Encrypts the counter (high, low).
inline Key threefry(Key key, uint32_t high, uint32_t low) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[] = {key.high, key.low, key.high ^ key.low ^ 0x1bd11bdau};
  uint32_t x = high + keys[0], y = low + keys[1];
#pragma GCC unroll 5
  for (int turn = 0; turn < 5; ++turn) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x += y;
      y = rotate(y, kTurns[turn % 2][i]) ^ x;
    }
    x += keys[(turn + 1) % 3];
    y += keys[(turn + 2) % 3] + static_cast<uint32_t>(turn + 1);
  }
  return {x, y};
}

// Returns the key that `rules.sampling.noise_key` returns.
inline Key noise_key(uint32_t seed, uint32_t stream, uint32_t position, uint32_t offset) {
  Key key{0, seed};
  for (uint32_t part : {stream, position, offset}) key = threefry(key, 0, part);
  return key;
}

// Returns number `index` of a key, in [0, 1), made of 23 random bits.
inline float uniform(Key key, uint32_t index) {
  Key made = threefry(key, 0, index);
  uint32_t bits = (made.high ^ made.low) >> 9 | 0x3f800000u;
  return load_as<float>(&bits) - 1.0f;
}

// Returns the logarithm of a normal number, by the polynomial of Cephes `logf`.
inline float log_of(float x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3u;
  // x = m * 2^e, with m from the root of a half to that of two.
  uint32_t shifted = load_as<uint32_t>(&x) - kRootHalf;
  uint32_t bits = (shifted & 0x7fffffu) + kRootHalf;
  float exponent = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  float m = load_as<float>(&bits) - 1.0f;
  float square = m * m, y = 7.0376836292e-2f;
  for (float factor : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                       1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                       -2.4999993993e-1f, 3.3333331174e-1f}) {
    y = y * m + factor;
  }
  y = y * m * square + exponent * -2.12194440e-4f - 0.5f * square;
  return m + y + exponent * 0.693359375f;
}

// Returns -log(-log(1 - x)) for x in [0, 1): x is `high`, and below a half, where
// floats are finer, `high` + 2^-23 * `low`.
inline float gumbel(float high, float low) {
  constexpr float kTiny = 1.17549435e-38f;
  // Selects without a branch, which would keep compilers from vectorising the loop.
  float is_small = static_cast<float>(high < 0.5f);
  float x = high + 1.1920929e-7f * low * is_small + kTiny * is_small;
  // Adds the bits that 1 - x loses.
  float rest = 1.0f - x, lost = (1.0f - rest) - x;
  return -log_of(-(log_of(rest) + lost / rest));
}

constexpr int64_t kStretch = 64;  // tokens of one vectorised loop

// Adds to x [begin, end) the noise of as many tokens of a vocabulary: of the tokens
// `names` [begin, end), or of [begin, end) if `names` is null.
inline void add_noise(Key key, const int32_t* names, int64_t vocabulary, int64_t begin,
                      int64_t end, float* x) {
  for (; begin < end; begin += kStretch) {
    int64_t count = std::min(end - begin, kStretch);
    uint32_t token[kStretch];
    float high[kStretch], low[kStretch], made[kStretch];
    for (int64_t i = 0; i < kStretch; ++i) {
      int64_t at = begin + std::min(i, count - 1);
      token[i] = static_cast<uint32_t>(names == nullptr ? at : names[at]);
    }
    for (int64_t i = 0; i < kStretch; ++i) high[i] = uniform(key, token[i]);
    uint32_t after = static_cast<uint32_t>(vocabulary);
    for (int64_t i = 0; i < kStretch; ++i) low[i] = uniform(key, token[i] + after);
    for (int64_t i = 0; i < kStretch; ++i) made[i] = gumbel(high[i], low[i]);
    for (int64_t i = 0; i < count; ++i) x[begin + i] += made[i];
  }
}

}  // namespace spec_jax
