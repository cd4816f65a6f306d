// How a drafter picks its next token: laws as outrider/sampling/draft_filters.py filters them, and the token that a row takes by its law.
//
// What a draft's law leaves out need not be what the target's leaves out, as long as the law that travels is the one drawn from. So
// only the HEAD likeliest tokens are looked at: a filter that would keep more of them does nothing.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "laws.h"
#include "races.h"
#include "residuals.h"

namespace picks {

constexpr int64_t HEAD = 256;  // tokens that a filter looks at

// The HEAD largest scores, in order; -inf where fewer are allowed
inline void likeliest(const float* scores, int64_t V, float most, Scratch& scratch, std::vector<float>& found) {
  const int64_t count = std::min(HEAD, V);
  const Edge edge = top_k_edge(scores, V, most, count, scratch);
  const Floats least = floats(std::max(edge.score, std::numeric_limits<float>::lowest()));
  found.clear();
  for (int64_t v = 0; v < V; v += 16) {
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    for (Mask stays = is_at_least(some, least); stays; stays &= stays - 1) found.push_back(scores[v + __builtin_ctz(stays)]);
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  found.resize(count, -INFINITE);
}

// e^(score - most), summed up over all scores that are not below `least`
inline double total_mass(const float* scores, int64_t V, float most, float least) {
  Doubles total = doubles(0);
  const Floats peak = floats(most), floor = floats(least);
  for (int64_t v = 0; v < V; v += 16) {
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    total = add_up(total, keep(is_at_least(some, floor), mass(some, peak)));
  }
  return sum_of(total);
}

// The lowest score that stays
inline float floor_of(const float* scores, int64_t V, float most, const Options& o, Scratch& scratch) {
  thread_local std::vector<float> largest;
  likeliest(scores, V, most, scratch, largest);
  const int64_t head = int64_t(largest.size());
  float lowest = o.top_k >= 1 && o.top_k <= double(head) ? largest[int64_t(o.top_k) - 1] : -INFINITE;
  if (o.top_p < 1) {
    const double total = total_mass(scores, V, most, lowest);
    int64_t kept = 0;
    for (double before = 0; kept < head && largest[kept] >= lowest && before < o.top_p; ++kept)
      before += std::exp(double(largest[kept]) - double(most)) / total;
    // what the head leaves below the nucleus' mass, or tokens below the floor, keep the law whole
    if (kept < head) lowest = std::max(lowest, largest[std::max<int64_t>(kept, 1) - 1]);
  }
  return o.min_p > 0 ? std::max(lowest, most + float(std::log(o.min_p))) : lowest;
}

// scores (V,) -> law (V,). False where they are no numbers, infinite or all masked.
inline bool make_law(const float* scores, int64_t V, const Options& o, float* law, Scratch& scratch) {
  const Floats temperature = floats(float(o.temperature));
  for (int64_t v = 0; v < V; v += 16) {
    const Mask some = first16(V - v);
    store_some(some, law + v, load_some(some, scores + v) / temperature);
  }
  const int64_t best = largest(law, V);
  if (best < 0) return false;
  const float most = law[best];
  const bool is_filtered = o.top_k >= 1 || o.top_p < 1 || o.min_p > 0;
  const float lowest = is_filtered ? floor_of(law, V, most, o, scratch) : -INFINITE;
  const Floats share = floats(float(1 / total_mass(law, V, most, lowest))), peak = floats(most), floor = floats(lowest);
  for (int64_t v = 0; v < V; v += 16) {
    const Mask some = first16(V - v);
    const Floats score = load_some(some, law + v, floats(-INFINITE));
    store_some(some, law + v, keep(is_at_least(score, floor), mass(score, peak)) * share);
  }
  return true;
}

}  // namespace picks
