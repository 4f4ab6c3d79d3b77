// Loads and stores of lanes where an array may end before a vector does.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace spec_jax {

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

}  // namespace spec_jax
