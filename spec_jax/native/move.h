// Keys and values that are copied to other places of their slots, in all layers.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "pages.h"

namespace spec_jax {

// The copies to make.
struct Moves {
  PageTable table;
  const int32_t* slots;  // [Q]
  const int32_t* sources;  // [Q]
  const int32_t* targets;  // [Q]
  const bool* moves;  // [Q]
  int64_t count;

  // Returns the row of a pool that holds a place of a slot; -1 if it has no page.
  int64_t row(int64_t slot, int64_t place) const {
    return table.holds(slot, place) ? table.of(slot, 1).at(place) : -1;
  }
};

// Copies rows within every pool [P * C, width]. All are read before any is written; a
// source that does not exist reads as 0, a target that does not exist is not written.
template <typename T>
void move_rows(const Moves& m, const std::vector<T*>& pools, int64_t width) {
  struct Copy {
    int64_t from, to;
  };
  std::vector<Copy> copies;
  for (int64_t q = 0; q < m.count; ++q) {
    if (!m.moves[q] || m.sources[q] == m.targets[q]) continue;
    int64_t to = m.row(m.slots[q], m.targets[q]);
    if (to >= 0) copies.push_back({m.row(m.slots[q], m.sources[q]), to});
  }
  std::vector<T> read(copies.size() * width);
  size_t bytes = width * sizeof(T);
  for (T* pool : pools) {
    T* at = read.data();
    for (const Copy& copy : copies) {
      if (copy.from >= 0) {
        std::memcpy(static_cast<void*>(at), pool + copy.from * width, bytes);
      } else {
        std::memset(static_cast<void*>(at), 0, bytes);
      }
      at += width;
    }
    at = read.data();
    for (const Copy& copy : copies) {
      std::memcpy(static_cast<void*>(pool + copy.to * width), at, bytes);
      at += width;
    }
  }
}

}  // namespace spec_jax
