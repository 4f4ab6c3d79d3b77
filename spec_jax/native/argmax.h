// The index of the largest value of a row: the first of several, and the first NaN
// before any number, as `jnp.argmax`.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"
#include "team.h"

namespace spec_jax {

constexpr int64_t kArgmaxPiece = 16384;  // values that one thread takes at a time
constexpr int64_t kArgmaxBlock = 512;    // values whose maximum is kept in registers

struct Largest {
  float value;
  int64_t index;
  // Whether a later value goes before it.
  bool yields_to(float next) const {
    return value == value && (next > value || next != next);
  }
};

// Of x [begin, end), one after the other.
inline Largest largest_of(const float* x, int64_t begin, int64_t end) {
  Largest best{x[begin], begin};
  for (int64_t i = begin + 1; i < end; ++i) {
    if (best.yields_to(x[i])) best = {x[i], i};
  }
  return best;
}

// The largest of a block, without its index; NaN where a value is NaN or infinite, and
// must be looked at.
inline float block_maximum(const float* x) {
  Vec most = load(x), spoilt = mul(load(x), zero());
  for (int64_t i = kLanes; i < kArgmaxBlock; i += kLanes) {
    most = maximum(most, load(x + i));
    spoilt = fma(load(x + i), zero(), spoilt);
  }
  float lane[kLanes];
  store(lane, most);
  return *std::max_element(lane, lane + kLanes) + sum(spoilt);
}

// Of x [begin, end), a block at a time: a block that has nothing larger is passed over.
inline Largest largest_of_piece(const float* x, int64_t begin, int64_t end) {
  Largest best{x[begin], begin};
  for (int64_t start = begin; start < end; start += kArgmaxBlock) {
    int64_t stop = std::min(start + kArgmaxBlock, end);
    bool whole = stop - start == kArgmaxBlock;
    if (whole && !best.yields_to(block_maximum(x + start))) continue;
    Largest next = largest_of(x, start, stop);
    if (best.yields_to(next.value)) best = next;
  }
  return best;
}

// out [rows] of x [rows, N], N at least 1; 0 for rows from `live` on.
template <typename Pool>
void argmax(Pool& pool, const float* x, int32_t* out, int64_t rows, int64_t live,
            int64_t N) {
  int64_t pieces = (N + kArgmaxPiece - 1) / kArgmaxPiece;
  std::vector<Largest> found(live * pieces);
  Team<Pool>(pool).run(live * pieces, 1, [&](int64_t i, int64_t end, int64_t) {
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
