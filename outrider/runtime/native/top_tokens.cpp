// The likeliest tokens behind outputs of a pass, for drafters that remember them or branch on them. Nothing is sorted: what is found so
// far is kept in order, and nearly every score is below its last one.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "picks.h"

namespace {

struct Found {
  float score;
  int64_t id;
};

// The k largest of the scores in order, of equals the lowest id first; fewer where fewer are above -inf
void find(const float* scores, int64_t V, int64_t k, std::vector<Found>& found) {
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
      const auto behind = std::find_if(found.begin(), found.end(), [&](const Found& one) { return one.score < score; });
      found.insert(behind, {score, id});
      if (int64_t(found.size()) == k) least = found.back().score;
    }
  }
}

}  // namespace

extern "C" {

// scores (., stride) fp32   shape: n, stride, V, k   outputs (n,): rows of the scores -> ids (n, k), -1 where there are no more.
// `temperatures` (n,) fp64, null: only ids are wanted; else `shares` (n, k): of each in the law at this temperature.
void outrider_top_tokens(const float* scores, const int64_t* shape, const int64_t* outputs, const double* temperatures, int64_t* ids,
                         float* shares) {
  const int64_t n = shape[0], stride = shape[1], V = shape[2], k = shape[3];
  std::vector<Found> found;
  std::vector<float> scaled;
  for (int64_t i = 0; i < n; ++i, ids += k) {
    const float* row = scores + outputs[i] * stride;
    find(row, V, k, found);
    for (int64_t rank = 0; rank < k; ++rank) ids[rank] = rank < int64_t(found.size()) ? found[rank].id : -1;
    if (!temperatures) continue;
    const float temperature = float(temperatures[i]);
    if (temperature != 1) {
      scaled.resize(V);
      for (int64_t v = 0; v < V; v += 16) {
        const Mask some = first16(V - v);
        store_some(some, scaled.data() + v, load_some(some, row + v) / floats(temperature));
      }
      row = scaled.data();
    }
    const float most = found.empty() ? 0 : row[found[0].id];
    const double total = found.empty() ? 1 : picks::total_mass(row, V, most, -INFINITE);
    for (int64_t rank = 0; rank < k; ++rank, ++shares)
      *shares = rank < int64_t(found.size()) ? float(std::exp(double(row[found[rank].id]) - double(most)) / total) : 0;
  }
}

}  // extern "C"
