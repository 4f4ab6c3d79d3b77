// The index of the largest value of a row: the first of equal ones; a row with NaN
// gives its first NaN, as `jnp.argmax` does.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"
#include "team.h"

namespace spec_jax {

constexpr int64_t kArgmaxPiece = 32768;  // values that one thread takes at a time
constexpr int64_t kArgmaxBlock = 512;    // values whose maximum is kept in registers

struct Largest {
  float value;
  int64_t index;
  // Returns whether a later value, `next`, replaces this one.
  bool yields_to(float next) const {
    return value == value && (next > value || next != next);
  }
};

// Finds the largest of x [begin, end), value by value.
inline Largest largest_of(const float* x, int64_t begin, int64_t end) {
  Largest best{x[begin], begin};
  for (int64_t i = begin + 1; i < end; ++i) {
    if (best.yields_to(x[i])) best = {x[i], i};
  }
  return best;
}

// Returns the largest value of a block; NaN where a value is NaN or infinite: then the
// caller must look at each value.
inline float block_maximum(const float* x) {
  constexpr int kBeside = 4;  // independent accumulators
  Vec most[kBeside], spoilt[kBeside];
  for (int j = 0; j < kBeside; ++j) {
    most[j] = load(x + j * kLanes);
    spoilt[j] = mul(most[j], zero());
  }
  for (int64_t i = kBeside * kLanes; i < kArgmaxBlock; i += kBeside * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kBeside; ++j) {
      Vec value = load(x + i + j * kLanes);
      most[j] = maximum(most[j], value);
      spoilt[j] = fma(value, zero(), spoilt[j]);
    }
  }
  for (int j = 1; j < kBeside; ++j) {
    most[0] = maximum(most[0], most[j]);
    spoilt[0] = add(spoilt[0], spoilt[j]);
  }
  // (Where a lane is NaN, so is the sum.)
  return largest_lane(most[0]) + sum(spoilt[0]);
}

// Finds the largest of x [begin, end), block by block. The index of a number is
// searched for at the end, in the block that has it.
inline Largest largest_of_piece(const float* x, int64_t begin, int64_t end) {
  Largest best{x[begin], begin};
  for (int64_t start = begin; start < end; start += kArgmaxBlock) {
    int64_t stop = std::min(start + kArgmaxBlock, end);
    Largest next{0.0f, start};
    if (stop - start == kArgmaxBlock) next.value = block_maximum(x + start);
    if (stop - start < kArgmaxBlock || next.value != next.value) {
      next = largest_of(x, start, stop);
    }
    if (best.yields_to(next.value)) best = next;
  }
  if (best.value == best.value) {
    // The value is in the block; the bound guards against flushed denormal numbers.
    while (best.index + 1 < end && x[best.index] != best.value) ++best.index;
  }
  return best;
}

// Writes the indices of x [rows, N], N at least 1, to out [rows]; 0 from row `live` on.
template <typename Pool>
void argmax(Team<Pool>& team, const float* x, int32_t* out, int64_t rows, int64_t live,
            int64_t N) {
  int64_t pieces = (N + kArgmaxPiece - 1) / kArgmaxPiece;
  int64_t grain = std::max<int64_t>(kArgmaxPiece / N, 1);
  std::vector<Largest> found(live * pieces);
  team.run(live * pieces, grain, [&](int64_t i, int64_t end, int64_t) {
    for (; i < end; ++i) {
      int64_t begin = i % pieces * kArgmaxPiece;
      found[i] = largest_of_piece(x + i / pieces * N, begin,
                                  std::min(begin + kArgmaxPiece, N));
    }
  });
  std::fill(out, out + rows, 0);
  for (int64_t r = 0; r < live; ++r) {
    Largest best = found[r * pieces];
    for (int64_t i = 1; i < pieces; ++i) {
      const Largest& next = found[r * pieces + i];
      if (best.yields_to(next.value)) best = next;
    }
    out[r] = static_cast<int32_t>(best.index);
  }
}

}  // namespace spec_jax
