// Looks up the tokens that most often followed where a text has ended like this, as
// `drafters/suffix.py` defines them. One thread does all of it, in microseconds.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace spec_jax {

constexpr int32_t kNoToken = -1;  // between texts

// The limits of a path: `budgets[m - 1]` tokens where `m` match, at most `most`, and no
// token of a probability below `least`. No budget is less than the one before.
struct PathRule {
  const int32_t* budgets;  // [match_max]
  int64_t match_max;
  int32_t most;
  float least;
};

// Tokens, their probabilities, and the sum of these.
struct Path {
  std::vector<int32_t> tokens;
  std::vector<float> survival;
  float score = 0;
};

// How often each token was counted, in a table that is at least half empty.
class Counts {
 public:
  // Makes room for `most` different tokens, and forgets all counts.
  void begin(size_t most) {
    size_t size = 16;
    while (size < 2 * most) size *= 2;
    table_.assign(size, {kNoToken, 0});
  }
  int32_t add(int32_t token) { return ++at(token).count; }
  int32_t of(int32_t token) { return at(token).count; }

 private:
  struct Entry {
    int32_t token, count;
  };
  Entry& at(int32_t token) {
    size_t mask = table_.size() - 1;
    size_t i = static_cast<uint32_t>(token) * size_t{2654435761u} >> 16 & mask;
    while (table_[i].token != token && table_[i].token != kNoToken) i = (i + 1) & mask;
    table_[i].token = token;
    return table_[i];
  }
  std::vector<Entry> table_;
};

// A body of text [0, size), and its places that follow the tokens a sequence ends with.
class Body {
 public:
  // `end` holds the last `match_max` tokens of the sequence, or all of a shorter one, the
  // last of them first.
  Body(const int32_t* text, int64_t size, const std::vector<int32_t>& end)
      : text_(text), size_(size) {
    for (int64_t j = 1; j < size; ++j) {
      if (text[j] == kNoToken) continue;
      int64_t most = std::min<int64_t>(j, end.size()), m = 0;
      while (m < most && end[m] != kNoToken && text[j - 1 - m] == end[m]) ++m;
      if (m > 0) places_.push_back({j, m});
    }
  }

  // Finds the path of the highest score, at equal scores that of the longest match.
  Path best(const PathRule& rule) const {
    Path best;
    size_t before = 0;
    std::vector<int64_t> places;
    for (int64_t m = rule.match_max; m >= 1; --m) {
      places.clear();
      for (const Place& place : places_) {
        if (place.matched >= m) places.push_back(place.at);
      }
      // The same places with no larger budget have no higher score.
      if (places.size() == before) continue;
      before = places.size();
      Path path = walk(places, std::min(rule.budgets[m - 1], rule.most), rule.least);
      if (path.score > best.score) best = path;
    }
    return best;
  }

 private:
  struct Place {
    int64_t at, matched;
  };

  // Follows, from these places on, the token that most often comes next.
  Path walk(std::vector<int64_t>& places, int32_t budget, float least) const {
    Path path;
    Counts counts;
    float probability = 1;
    for (int32_t step = 0; step < budget; ++step) {
      auto token_at = [&](int64_t place) {
        return place + step < size_ ? text_[place + step] : kNoToken;
      };
      auto ends = [&](int64_t place) { return token_at(place) == kNoToken; };
      places.erase(std::remove_if(places.begin(), places.end(), ends), places.end());
      if (places.empty()) break;
      counts.begin(places.size());
      int32_t most = 0;
      for (int64_t place : places) most = std::max(most, counts.add(token_at(place)));
      // The first of equally frequent tokens.
      auto first = std::find_if(places.begin(), places.end(), [&](int64_t place) {
        return counts.of(token_at(place)) == most;
      });
      int32_t token = token_at(*first);
      probability *= static_cast<float>(most) / static_cast<float>(places.size());
      if (!(probability >= least)) break;
      path.tokens.push_back(token);
      path.survival.push_back(probability);
      path.score += probability;
      auto differs = [&](int64_t place) { return token_at(place) != token; };
      places.erase(std::remove_if(places.begin(), places.end(), differs), places.end());
    }
    return path;
  }

  const int32_t* text_;
  int64_t size_;
  std::vector<Place> places_;
};

// Finds the better path of the sequence itself, tokens [0, length), and of a corpus.
inline Path look_up(const int32_t* tokens, int64_t length, const int32_t* corpus,
                    int64_t size, const PathRule& rule) {
  std::vector<int32_t> end;
  for (int64_t i = 1; i <= std::min(rule.match_max, length); ++i) {
    end.push_back(tokens[length - i]);
  }
  Path ours = Body(tokens, length, end).best(rule);
  Path earlier = Body(corpus, size, end).best(rule);
  return ours.score >= earlier.score ? ours : earlier;
}

}  // namespace spec_jax
