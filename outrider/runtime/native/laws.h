// Laws of sampled rows: from scores to probabilities by temperature, top-k, top-p and min-p, one output at a time.
//
// torch takes a dozen operations for it, each of which finds its code driven out of the caches after a pass, and sorts whole
// vocabularies where a nucleus is large. Nothing is sorted here but one bucket of a histogram, the one that an edge falls into:
// what lies above it stays, what lies below goes. An output is summed up by one thread in one order: its bits depend on
// nothing but itself.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "lanes.h"

inline constexpr float INFINITE = std::numeric_limits<float>::infinity();
inline constexpr float FAR = 87.f;                       // scores so far below the largest have no mass in fp32
inline constexpr int64_t BUCKETS = 2048, PER_UNIT = 64;  // of how far a score is below the largest one; the last takes the rest

struct Options {
  double temperature, top_k, top_p, min_p;
};

// What stays: everything above `score`, and of those equal to it the ids up to `last`.
struct Edge {
  float score = -INFINITE;
  int64_t last = std::numeric_limits<int32_t>::max();
};

struct Scratch {
  std::vector<int32_t> counts;
  std::vector<double> masses;
  std::vector<std::pair<float, int64_t>> bucket;  // scores and ids
};

// e^(score - most) of sixteen scores, 0 where nothing is left of it
inline Floats mass(Floats scores, Floats most) {
  const Floats below = scores - most;
  return keep(is_at_least(below, floats(-FAR)), exponential(below));
}

// The first largest of the scores; -1 where they are no numbers, or all masked
inline int64_t largest(const float* scores, int64_t V) {
  Floats most = floats(-INFINITE);
  Mask broken = 0;
  for (int64_t v = 0; v < V; v += 16) {
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    broken |= is_no_number(some);
    most = larger(most, some);
  }
  const float peak = largest_of(most);
  if (broken || !std::isfinite(peak)) return -1;
  for (int64_t v = 0;; v += 16) {
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    const Mask found = is_equal(some, floats(peak));
    if (found) return v + __builtin_ctz(found);
  }
}

// Calls use(id, bucket) for every score that is not below `least` and not -inf
template <typename Use>
void each_bucket(const float* scores, int64_t V, float most, float least, Use use) {
  alignas(64) int32_t buckets[16];
  const Floats floor = floats(std::max(least, std::numeric_limits<float>::lowest()));
  for (int64_t v = 0; v < V; v += 16) {
    const Floats some = load_some(first16(V - v), scores + v, floats(-INFINITE));
    Mask stays = is_at_least(some, floor);
    const Floats below = (floats(most) - some) * floats(float(PER_UNIT));
    store(buckets, truncated(smaller(below, floats(float(BUCKETS - 1)))));
    for (; stays; stays &= stays - 1) {
      const int i = __builtin_ctz(stays);
      use(v + i, buckets[i]);
    }
  }
}

inline void collect(const float* scores, int64_t V, float most, float least, int64_t wanted, Scratch& scratch) {
  scratch.bucket.clear();
  each_bucket(scores, V, most, least, [&](int64_t v, int32_t bucket) {
    if (bucket == wanted) scratch.bucket.emplace_back(scores[v], v);
  });
}

// Everything down to the k-th largest score stays, and what is equal to it
inline Edge top_k_edge(const float* scores, int64_t V, float most, int64_t k, Scratch& scratch) {
  scratch.counts.assign(BUCKETS, 0);
  each_bucket(scores, V, most, -INFINITE, [&](int64_t, int32_t bucket) { ++scratch.counts[bucket]; });
  int64_t before = 0, bucket = 0;
  while (bucket < BUCKETS && before + scratch.counts[bucket] < k) before += scratch.counts[bucket++];
  if (bucket == BUCKETS) return {};  // fewer than k are allowed at all
  collect(scores, V, most, -INFINITE, bucket, scratch);
  auto& found = scratch.bucket;
  const auto nth = found.begin() + (k - before - 1);
  std::nth_element(found.begin(), nth, found.end(), std::greater<>());
  return {nth->first};
}

// Of what is not below `edge`, a token stays while the mass ranked before it is below top_p; ties are ranked by id
inline Edge top_p_edge(const float* scores, int64_t V, float most, Edge edge, double top_p, Scratch& scratch) {
  alignas(64) float masses[16];
  scratch.masses.assign(BUCKETS, 0.0);
  int64_t block = -1;
  each_bucket(scores, V, most, edge.score, [&](int64_t v, int32_t bucket) {
    if (v / 16 != block) {
      block = v / 16;
      const Floats some = load_some(first16(V - 16 * block), scores + 16 * block, floats(-INFINITE));
      store(masses, mass(some, floats(most)));
    }
    scratch.masses[bucket] += masses[v % 16];
  });
  double total = 0, before = 0;
  for (double part : scratch.masses) total += part;
  const double wanted = top_p * total;
  int64_t bucket = 0;
  while (bucket < BUCKETS && before + scratch.masses[bucket] < wanted) before += scratch.masses[bucket++];
  if (bucket == BUCKETS) return edge;
  collect(scores, V, most, edge.score, bucket, scratch);
  auto& found = scratch.bucket;
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  for (size_t i = 0; i < found.size(); ++i) {
    if (before >= wanted && i) break;
    edge = {found[i].first, found[i].second};
    before += std::exp(double(found[i].first) - double(most));
  }
  return edge;
}

inline Edge edge_of(const float* scores, int64_t V, float most, const Options& o, Scratch& scratch) {
  Edge edge;
  if (o.top_k >= 1 && o.top_k < double(V)) edge = top_k_edge(scores, V, most, int64_t(o.top_k), scratch);
  if (o.top_p < 1) edge = top_p_edge(scores, V, most, edge, o.top_p, scratch);
  const float least = most + float(std::log(o.min_p));  // -inf where it is off
  return o.min_p > 0 && least > edge.score ? Edge{least} : edge;
}

inline void point_mass(float* law, int64_t V, int64_t token) {
  std::memset(law, 0, V * sizeof(float));
  law[token] = 1;
}

inline bool make_law(const float* scores, int64_t V, const Options& o, float* law, Scratch& scratch) {
  if (o.temperature == 0) {
    const int64_t best = largest(scores, V);
    if (best < 0) return false;
    point_mass(law, V, best);
    return true;
  }
  const Floats temperature = floats(float(o.temperature));
  for (int64_t v = 0; v < V; v += 16) {
    const Mask some = first16(V - v);
    store_some(some, law + v, load_some(some, scores + v) / temperature);
  }
  const int64_t best = largest(law, V);
  if (best < 0) return false;
  const float most = law[best];
  const Edge edge = edge_of(law, V, most, o, scratch);
  const Floats floor = floats(edge.score), peak = floats(most);
  const Ints last = ints(int32_t(edge.last));
  Ints ids = counting();
  Doubles total = doubles(0);
  for (int64_t v = 0; v < V; v += 16, ids = ids + ints(16)) {
    const Mask some = first16(V - v);
    const Floats score = load_some(some, law + v, floats(-INFINITE));
    const Mask ties = is_equal(score, floor) & is_at_most(ids, last);
    const Mask stays = is_greater(score, floor) | ties;
    const Floats masses = keep(stays, mass(score, peak));
    store_some(some, law + v, masses);
    total = add_up(total, masses);
  }
  const Floats share = floats(float(1 / sum_of(total)));
  for (int64_t v = 0; v < V; v += 16) {
    const Mask some = first16(V - v);
    store_some(some, law + v, load_some(some, law + v) * share);
  }
  return true;
}

// scores (B, M, V) -> laws (B, M, V), by `options` (B, 4). False where an output that counts (up to lengths[b]) has scores that are
// no numbers, infinite or all masked; after output lengths[b] of row b some law, whatever the scores. Without `point_masses` greedy
// rows are left out.
inline bool make_laws(const float* scores, const int64_t* lengths, const double* options, int64_t B, int64_t M, int64_t V,
                      bool point_masses, float* laws) {
  constexpr int64_t SERIAL = 1 << 13;  // numbers below which a second thread costs more than it does
  int64_t whole = 1;
#pragma omp parallel if (B * M * V > SERIAL) reduction(&& : whole)
  {
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t output = 0; output < B * M; ++output) {
      const int64_t b = output / M;
      float* law = laws + output * V;
      Options row;
      std::memcpy(&row, options + 4 * b, sizeof row);
      if (row.temperature == 0 && !point_masses) continue;
      if (make_law(scores + output * V, V, row, law, scratch)) continue;
      whole = whole && output % M > lengths[b];
      point_mass(law, V, 0);
    }
  }
  return whole;
}
