// The likeliest tokens of an output. Nothing is sorted: what is found so far is kept in order, and nearly every score is below its last one.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "picks.h"

namespace top_tokens {

struct Found {
  float score;
  int64_t id;
};

// The k largest of the scores in order, of equals the lowest id first; fewer where fewer are above -inf
inline void find(const float* scores, int64_t V, int64_t k, std::vector<Found>& found) {
  found.clear();
  float least = -INFINITE;
  for (int64_t v = 0; v < V; v += 16) {
    for (; v + 64 <= V; v += 64) {  // nearly always no score of the next 64 is above
      const float* at = scores + v;
      const Floats most = larger(larger(load(at), load(at + 16)), larger(load(at + 32), load(at + 48)));
      if (is_greater(most, floats(least))) break;
    }
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    for (Mask above = is_greater(some, floats(least)); above; above &= above - 1) {
      const int64_t id = v + __builtin_ctz(above);
      const float score = scores[id];
      if (score <= least) continue;  // so it is by now
      if (int64_t(found.size()) == k) found.pop_back();
      const auto place = std::find_if(found.begin(), found.end(), [&](const Found& one) { return one.score < score; });
      found.insert(place, {score, id});
      if (int64_t(found.size()) == k) least = found.back().score;
    }
  }
}

// Shares (k,) of what was found in the softmax of the scores at a temperature; 0 after the last one
inline void share(const float* scores, int64_t V, float temperature, const std::vector<Found>& found, int64_t k, float* shares) {
  thread_local std::vector<float> scaled;
  if (temperature != 1) {
    scaled.resize(V);
    for (int64_t v = 0; v < V; v += 16) {
      const Mask some = first16(V - v);
      store_some(some, scaled.data() + v, load_some(some, scores + v) / floats(temperature));
    }
    scores = scaled.data();
  }
  const float most = found.empty() ? 0 : scores[found[0].id];
  const double total = found.empty() ? 1 : picks::total_mass(scores, V, most, -INFINITE);
  for (int64_t rank = 0; rank < k; ++rank)
    shares[rank] = rank < int64_t(found.size()) ? float(std::exp(double(scores[found[rank].id]) - double(most)) / total) : 0;
}

}  // namespace top_tokens
