// The attention of a layer on the row path: norm, rotate, write to pages, attend.
//
// All active rows write their keys and values, and attend after: a row sees no position
// past its own, nor before its first. Work is split over key/value heads, slots and ranges
// of kRange keys, whose sums are combined when all are there. Where one thread attends to
// all rows of a slot, in one range, it writes them first, and no thread waits in between.
//
// Rows of a tree may find the key of one position at different places. The blocks whose
// keys have the same places for all rows of a span are walked once for the span; from
// there on each row walks its own blocks, and continues its running softmax.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "side_by_side.h"
#include "simd.h"
#include "team.h"

namespace spec_jax {

// Where the rows live.
struct Rows {
  PageTable table;
  const int32_t* slots;  // [R]
  const int32_t* positions;  // [R]
  int64_t live;
  const int32_t* branch = nullptr;  // [R, width] in trees: places of a row's last keys
  int64_t width = 0;
  const int32_t* firsts = nullptr;  // [R] the first position that a row sees; null: 0
  int64_t window = 0;  // keys that each row sees, its own the last; 0: as `firsts` says

  int64_t first(int64_t r) const {
    int64_t own = std::max(positions[r], 0);
    if (window > 0) return std::max<int64_t>(own - window + 1, 0);
    return firsts == nullptr ? 0 : std::clamp<int64_t>(firsts[r], 0, own);
  }

  // Returns the first position whose key may be stored at a place of another number.
  int64_t common(int64_t r) const {
    int64_t end = positions[r] + int64_t{1};
    return branch == nullptr ? end : std::max<int64_t>(end - width, 0);
  }

  // Returns the place in row `r`'s slot of the key of a position that the row sees.
  int64_t place(int64_t r, int64_t position) const {
    if (position < common(r)) return position;
    return branch[r * width + position - (positions[r] + int64_t{1} - width)];
  }

  // Returns whether the page of every key up to the row's own exists, seen or not.
  bool is_mapped(int64_t r) const {
    int64_t slot = slots[r], position = positions[r], shared = common(r);
    if (position < 0) return false;
    for (int64_t p = shared; p <= position; ++p) {
      if (!table.holds(slot, place(r, p))) return false;
    }
    for (int64_t m = 0; m * table.page_size < shared; ++m) {
      if (!table.has(slot, m)) return false;
    }
    return true;
  }
};

// The arrays that a layer reads and writes.
template <typename T>
struct Layer {
  const T* heads;  // [R, (N + 2K) * H]: queries, keys, values
  const T* q_norm;  // [H]; null: queries and keys are not normed
  const T* k_norm;  // [H]
  const float* cos;  // [R, H / 2]
  const float* sin;  // [R, H / 2]
  T* k;  // [P, C, K, H]
  T* v;  // [P, C, K, H]
  T* out;  // [R, N * H]
  int64_t N, K, H;
  float scale, eps;

  int64_t group() const { return N / K; }
  // Head `head` of row `r`, counted through queries, keys and values.
  const T* head(int64_t r, int64_t head) const {
    return heads + (r * (N + 2 * K) + head) * H;
  }
};

// `count` active rows of one slot from row `first` on, all with their pages. Their keys
// are walked in `pieces` pieces from number `piece` on; the first block of which a row
// sees a key begins at position `begin`.
struct Span {
  int64_t first, count, piece = 0, pieces = 0, begin = 0;
};

// Keys [start, end) of one range, which a span walks together.
struct Piece {
  int64_t span, start, end;
  bool is_whole() const { return end - start == kRange; }
};

// A piece under one key/value head: the least that a worker takes.
struct Task {
  int64_t piece, head;
};

// Groups the active rows that have pages in spans of `kSpan` at most, to share reads.
constexpr int64_t kSpan = 16;
inline std::vector<Span> spans(const Rows& rows) {
  std::vector<Span> out;
  for (int64_t r = 0; r < rows.live; ++r) {
    if (!rows.is_mapped(r)) continue;
    bool follows = !out.empty() && out.back().first + out.back().count == r &&
                   rows.slots[r] == rows.slots[r - 1] && out.back().count < kSpan;
    if (follows) {
      ++out.back().count;
    } else {
      out.push_back({r, 1});
    }
  }
  return out;
}

// Splits the keys of all spans into pieces, at least one each; notes them in the spans.
inline std::vector<Piece> pieces_of(const Rows& rows, std::vector<Span>& all) {
  std::vector<Piece> out;
  for (Span& span : all) {
    int64_t reach = 0, common = std::numeric_limits<int64_t>::max(), seen = common;
    for (int64_t r = span.first; r < span.first + span.count; ++r) {
      reach = std::max(reach, rows.positions[r] + int64_t{1});
      common = std::min(common, rows.common(r));
      seen = std::min(seen, rows.first(r));
    }
    if (rows.branch != nullptr) reach = common / kKeyBlock * kKeyBlock;
    span.piece = out.size();
    span.begin = seen / kKeyBlock * kKeyBlock;
    int64_t start = seen / kRange * kRange;
    do {
      out.push_back({&span - all.data(), start, std::min(start + kRange, reach)});
      start += kRange;
    } while (start < reach);
    span.pieces = out.size() - span.piece;
  }
  return out;
}

// Rotates one head, normed first unless `norm` is null, into out [H]. The caller rounds
// `cos` and `sin` to T; every product and sum is rounded, as in the reference.
template <typename T>
void rotate(const T* head, const T* norm, const float* cos, const float* sin, int64_t H,
            float eps, T* out) {
  // Room past the end: a whole vector may be loaded from any element of the head.
  alignas(64) float x[kMaxHead + kLanes] = {};
  Vec scale = norm == nullptr ? zero() : broadcast(inverse_rms(head, H, eps));
  for (int64_t h = 0; h < H; h += kLanes) {
    Vec value = load_lanes(head + h, H - h);
    if (norm != nullptr) {
      value = norm_lanes<T>(value, scale, load_lanes(norm + h, H - h));
    }
    store(x + h, value);
  }
  int64_t half = H / 2;
  for (int64_t h = 0; h < half; h += kLanes) {
    Vec a = load(x + h), b = load(x + h + half);
    Vec c = load_lanes(cos + h, half - h), s = load_lanes(sin + h, half - h);
    auto times = [](Vec x, Vec y) { return round_lanes<T>(mul(x, y)); };
    store_lanes(out + h, half - h, subtract(times(a, c), times(b, s)));
    store_lanes(out + half + h, half - h, add(times(b, c), times(a, s)));
  }
}

// The rows that attend, and the memory that each worker of a team needs for them, for
// all layers: bodies of a loop allocate nothing.
template <typename Pool, typename T>
struct Attention {
  Team<Pool>& team;
  const Rows& rows;
  std::vector<Span> all;
  std::vector<Piece> pieces;
  std::vector<Task> tasks;
  int64_t K, grain;  // key/value heads, and how many of them a worker takes at a time
  bool is_apart;     // whether each slot has one span, of one piece
  int64_t room = 0;  // queries that each of `queries` has room for
  std::vector<std::vector<Queries<T>>> queries;  // [workers, grain or more]
  std::vector<KeyPanels<T>> panels;              // [workers]
  Sums<T> parts;  // [pieces, K, room], where a span has several pieces
  // For one row of a tree, of each worker: its range of keys, and the ranges before.
  std::vector<Queries<T>> alone;
  std::vector<Sums<T>> before;

  Attention(Team<Pool>& team, const Rows& rows, int64_t K, int64_t group, int64_t H)
      : team(team), rows(rows), K(K), parts(0, H) {
    for (int64_t i = 0; i < team.size(); ++i) panels.emplace_back(H);
    begin(group, H);
    if (rows.branch == nullptr) return;
    for (int64_t i = 0; i < team.size(); ++i) {
      alone.emplace_back(group, H);
      before.emplace_back(group, H);
    }
  }

  // Reads the rows as they are now; keeps the memory of the workers if it suffices.
  void begin(int64_t group, int64_t H) {
    all = spans(rows);
    pieces = pieces_of(rows, all);
    is_apart = pieces.size() == all.size();
    int64_t most = 0, heads_of_all = all.size() * K;
    for (size_t i = 0; i < all.size(); ++i) {
      most = std::max(most, all[i].count);
      for (size_t j = 0; j < i; ++j) {
        is_apart &= rows.slots[all[i].first] != rows.slots[all[j].first];
      }
    }
    grain = std::clamp<int64_t>(heads_of_all / team.size(), 1, K);
    list_tasks();
    int64_t heads = queries.empty() ? 0 : queries.front().size();
    if (most * group > room || grain > heads) {
      room = most * group;
      queries.assign(team.size(), {});
      for (auto& of_worker : queries) {
        for (int64_t i = 0; i < grain; ++i) of_worker.emplace_back(room, H);
      }
    }
    size_t kept = pieces.size() > all.size() ? pieces.size() * K * room : 0;
    if (kept > parts.maximum.size()) parts = Sums<T>(kept, H);
  }

  // Lists the tasks: if heads suffice, each worker walks whole texts under its own.
  void list_tasks() {
    tasks.clear();
    for (const Span& span : all) {
      for (int64_t first = 0; first < K; first += grain) {
        for (int64_t p = span.piece; p < span.piece + span.pieces; ++p) {
          int64_t last = std::min(first + grain, K);
          for (int64_t head = first; head < last; ++head) tasks.push_back({p, head});
        }
      }
    }
  }

  // Returns a piece's first number in `parts` under key/value head `index`.
  int64_t part(int64_t piece, int64_t index) const { return (piece * K + index) * room; }

  Pages pages(const Span& span, const Layer<T>& layer) const {
    return rows.table.of(rows.slots[span.first], K * layer.H);
  }

  // Stores the key and the value of row `r`, in `span`, for key/value head `index`.
  void write(const Layer<T>& layer, const Span& span, int64_t r, int64_t index) const {
    int64_t H = layer.H, half = H / 2;
    int64_t at = pages(span, layer).at(rows.place(r, rows.positions[r])) + index * H;
    rotate(layer.head(r, layer.N + index), layer.k_norm, layer.cos + r * half,
           layer.sin + r * half, H, layer.eps, layer.k + at);
    const T* value = layer.head(r, layer.N + K + index);
    std::memcpy(static_cast<void*>(layer.v + at), value, H * sizeof(T));
  }

  // Sets `queries` to those of a span under key/value head `index`.
  void begin(const Layer<T>& layer, const Span& span, int64_t index,
             Queries<T>& queries) const {
    int64_t G = layer.group(), half = layer.H / 2;
    queries.begin(span.count * G);
    queries.rows.for_each_group([&](int64_t first, int64_t size) {
      T rotated[kMostRows<T>][kMaxHead];
      const T* group[kMostRows<T>];
      for (int64_t j = 0; j < size; ++j) {
        int64_t i = first + j, r = span.first + i / G;
        rotate(layer.head(r, index * G + i % G), layer.q_norm, layer.cos + r * half,
               layer.sin + r * half, layer.H, layer.eps, rotated[j]);
        group[j] = rotated[j];
        queries.starts[i] = rows.first(r);
        queries.ends[i] = rows.positions[r] + int64_t{1};
      }
      queries.rows.set(first, size, group);
    });
  }

  // Writes the results of a span's queries under key/value head `index`, which are
  // those of `queries` from number `at` on.
  void end(const Layer<T>& layer, const Span& span, int64_t index, const Sums<T>& queries,
           int64_t at) const {
    int64_t G = layer.group();
    for (int64_t i = 0; i < span.count * G; ++i) {
      int64_t head = (span.first + i / G) * layer.N + index * G + i % G;
      queries.finish(at + i, layer.out + head * layer.H);
    }
  }

  // Attends to a piece under key/value heads [first, last): to each block of keys under
  // all of them before the next block, since the heads' keys lie side by side.
  void attend(const Layer<T>& layer, int64_t number, int64_t first, int64_t last,
              int64_t worker) {
    const Piece& piece = pieces[number];
    const Span& span = all[piece.span];
    auto& own = queries[worker];
    int64_t H = layer.H, offsets[kKeyBlock], next[kKeyBlock];
    Pages where = pages(span, layer);
    for (int64_t i = first; i < last; ++i) {
      if (is_apart) write_rows(layer, span, i);
      begin(layer, span, i, own[i - first]);
    }
    int64_t begin = std::max(piece.start, span.begin);
    if (begin < piece.end) where.block(begin, piece.end, next);
    for (int64_t start = begin; start < piece.end; start += kKeyBlock) {
      bool more = start + kKeyBlock < piece.end;
      std::copy_n(next, kKeyBlock, offsets);
      if (more) where.block(start + kKeyBlock, piece.end, next);
      for (int64_t i = first; i < last; ++i) {
        const int64_t* later = more ? next : nullptr;
        Block<T> k{layer.k + i * H, offsets, later}, v{layer.v + i * H, offsets, later};
        attend_block(own[i - first], panels[worker], k, v, start, layer.scale);
      }
    }
    for (int64_t i = first; i < last; ++i) {
      if (span.pieces > 1) {
        parts.take(part(number, i), own[i - first], 0, own[i - first].count);
      } else if (rows.branch == nullptr) {
        end(layer, span, i, own[i - first], 0);
      } else {
        go_on_alone(layer, span, i, own[i - first], 0, worker);
      }
    }
  }

  // Combines the pieces of a span under key/value head `index`, in their order. A query
  // that sees nothing of a piece stays as it is.
  void combine(const Layer<T>& layer, const Span& span, int64_t index, int64_t worker) {
    int64_t G = layer.group(), first = part(span.piece, index);
    if (rows.branch != nullptr) {
      return go_on_alone(layer, span, index, parts, first, worker);
    }
    for (int64_t i = 0; i < span.count * G; ++i) {
      int64_t seen = rows.positions[span.first + i / G] + int64_t{1};
      for (int64_t p = span.piece + 1; p < span.piece + span.pieces; ++p) {
        if (pieces[p].start < seen) parts.combine(first + i, parts, part(p, index) + i);
      }
    }
    end(layer, span, index, parts, first);
  }

  // Attends, for each row of a span of a tree, to its keys after the pieces that are walked
  // together; `sums` has the results of these, the first from number `first` on.
  void go_on_alone(const Layer<T>& layer, const Span& span, int64_t index,
                   const Sums<T>& sums, int64_t first, int64_t worker) {
    int64_t G = layer.group(), reach = pieces[span.piece + span.pieces - 1].end;
    Queries<T>& own = alone[worker];
    Sums<T>& whole = before[worker];
    for (int64_t r = span.first; r < span.first + span.count; ++r) {
      Span row{r, 1};
      begin(layer, row, index, own);
      int64_t ranges = 0;
      auto end_range = [&] {
        if (ranges++ == 0) {
          whole.take(0, own, 0, G);
        } else {
          for (int64_t i = 0; i < G; ++i) whole.combine(i, own, i);
        }
        own.clear(G);
      };
      for (int64_t p = 0; p < span.pieces; ++p) {
        own.take(0, sums, first + p * K * room + (r - span.first) * G, G);
        if (pieces[span.piece + p].is_whole()) end_range();
      }
      walk_alone(layer, row, index, reach, own, worker, end_range);
      if (ranges > 0) end_range();
      end(layer, row, index, ranges > 0 ? whole : own, 0);
    }
  }

  // Attends to the blocks of one row from position `start` on, wherever its keys lie;
  // calls `end_range` before another range begins.
  template <typename Body>
  void walk_alone(const Layer<T>& layer, const Span& row, int64_t index, int64_t start,
                  Queries<T>& queries, int64_t worker, const Body& end_range) {
    int64_t r = row.first, reach = rows.positions[r] + int64_t{1}, begun = start;
    Pages where = pages(row, layer);
    for (; start < reach; start += kKeyBlock) {
      if (start % kRange == 0 && start > begun) end_range();
      if (start + kKeyBlock <= rows.first(r)) continue;  // It sees none of them.
      int64_t offsets[kKeyBlock], count = std::min<int64_t>(reach - start, kKeyBlock);
      for (int64_t t = 0; t < count; ++t) offsets[t] = where.at(rows.place(r, start + t));
      std::fill(offsets + count, offsets + kKeyBlock, offsets[count - 1]);
      Block<T> k{layer.k + index * layer.H, offsets, nullptr};
      Block<T> v{layer.v + index * layer.H, offsets, nullptr};
      attend_block(queries, panels[worker], k, v, start, layer.scale);
    }
  }

  // Stores the keys and values of a span for key/value head `index`.
  void write_rows(const Layer<T>& layer, const Span& span, int64_t index) const {
    for (int64_t i = 0; i < span.count; ++i) write(layer, span, span.first + i, index);
  }

  // Stores the keys and values of all rows that have their pages.
  void write_all(const Layer<T>& layer) {
    constexpr int64_t kFew = 8;  // heads to write that are not worth a thread's while
    if (all.empty()) return;
    int64_t some = std::max<int64_t>(kFew / all.front().count, 1);
    team.run(all.size() * K, some, [&](int64_t i, int64_t last, int64_t) {
      for (; i < last; ++i) write_rows(layer, all[i / K], i % K);
    });
  }

  // Runs the whole layer. The result of an active row without its pages is NaN, and its
  // key and value are not written, as in the reference.
  void run(const Layer<T>& layer) {
    int64_t width = layer.N * layer.H, next = 0;
    T nan = round_to<T>(std::numeric_limits<float>::quiet_NaN());
    for (const Span& span : all) {
      std::fill(layer.out + next * width, layer.out + span.first * width, nan);
      next = span.first + span.count;
    }
    std::fill(layer.out + next * width, layer.out + rows.live * width, nan);
    if (!is_apart) write_all(layer);
    team.run(tasks.size(), grain, [&](int64_t i, int64_t end, int64_t worker) {
      while (i < end) {
        auto [piece, head] = tasks[i];
        int64_t count = 1;
        while (i + count < end && tasks[i + count].piece == piece &&
               tasks[i + count].head == head + count) {
          ++count;
        }
        attend(layer, piece, head, head + count, worker);
        i += count;
      }
    });
    if (pieces.size() == all.size()) return;
    team.run(all.size() * K, 1, [&](int64_t i, int64_t, int64_t worker) {
      if (all[i / K].pieces > 1) combine(layer, all[i / K], i % K, worker);
    });
  }
};

}  // namespace spec_jax
