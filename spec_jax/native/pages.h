// Where the keys and values of slots lie: in pages of a pool, each of as many positions.

#pragma once

#include <algorithm>
#include <cstdint>

namespace spec_jax {

constexpr int kKeyBlock = 32;  // positions that attention takes at a time

// The pages of one slot.
struct Pages {
  const int32_t* table;  // [M]
  int64_t page_size;     // C
  int64_t row_stride;    // K * H

  int64_t at(int64_t position) const {
    int64_t page = table[position / page_size];
    return (page * page_size + position % page_size) * row_stride;
  }

  // Sets the offsets of a block's positions from `start`, without a division for each.
  // Offsets from `last` on repeat that of `last - 1`: such keys may be read, not used.
  void block(int64_t start, int64_t last, int64_t (&offsets)[kKeyBlock]) const {
    int64_t count = std::min<int64_t>(last - start, kKeyBlock), left = 0, next = 0;
    for (int64_t t = 0; t < count; ++t, --left, next += row_stride) {
      if (left == 0) {
        next = at(start + t);
        left = page_size - (start + t) % page_size;
      }
      offsets[t] = next;
    }
    std::fill(offsets + count, offsets + kKeyBlock, offsets[count - 1]);
  }
};

// The pages of all slots.
struct PageTable {
  const int32_t* pages;  // [S, M]
  int64_t num_slots, width, num_pages, page_size;

  // Returns whether page number `m` of a slot exists.
  bool has(int64_t slot, int64_t m) const {
    if (slot < 0 || slot >= num_slots || m < 0 || m >= width) return false;
    int32_t page = pages[slot * width + m];
    return page >= 0 && page < num_pages;
  }
  // Returns whether a place of a slot is in a page.
  bool holds(int64_t slot, int64_t place) const {
    return place >= 0 && has(slot, place / page_size);
  }

  Pages of(int64_t slot, int64_t row_stride) const {
    return {pages + slot * width, page_size, row_stride};
  }
};

}  // namespace spec_jax
