// Laws of sampled rows: from scores to probabilities by temperature, top-k, top-p and min-p, one output at a time.
//
// torch takes a dozen operations for it, each of which finds its code driven out of the caches behind a pass, and sorts whole
// vocabularies where a nucleus is large. Nothing is sorted here but one bucket of a histogram, the one that an edge falls into:
// what lies above it stays, what lies below goes. An output is summed up by one thread in one order: its bits depend on
// nothing but itself.

#pragma once

#include <immintrin.h>

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
inline constexpr float FAR = 87.f;                       // scores so far behind the largest have no mass in fp32
inline constexpr int64_t BUCKETS = 2048, PER_UNIT = 64;  // of how far a score is behind the largest one; the last takes the rest

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
inline __m512 mass(__m512 scores, __m512 most) {
  const __m512 behind = _mm512_sub_ps(scores, most);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(behind, _mm512_set1_ps(-FAR), _CMP_GE_OQ), exponential(behind));
}

// The first largest of the scores; -1 where they are no numbers, or all masked
inline int64_t largest(const float* scores, int64_t V) {
  __m512 most = _mm512_set1_ps(-INFINITE);
  __mmask16 broken = 0;
  for (int64_t v = 0; v < V; v += 16) {
    const __m512 some = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITE), first16(V - v), scores + v);
    broken |= _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, some);
  }
  const float peak = _mm512_reduce_max_ps(most);
  if (broken || !std::isfinite(peak)) return -1;
  for (int64_t v = 0;; v += 16) {
    const __m512 some = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITE), first16(V - v), scores + v);
    const __mmask16 found = _mm512_cmp_ps_mask(some, _mm512_set1_ps(peak), _CMP_EQ_OQ);
    if (found) return v + __builtin_ctz(found);
  }
}

// Calls use(id, bucket) for every score that is not below `least` and not -inf
template <typename Use>
void each_bucket(const float* scores, int64_t V, float most, float least, Use use) {
  alignas(64) int32_t buckets[16];
  const __m512 floor = _mm512_set1_ps(std::max(least, std::numeric_limits<float>::lowest()));
  for (int64_t v = 0; v < V; v += 16) {
    const __m512 some = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITE), first16(V - v), scores + v);
    __mmask16 stays = _mm512_cmp_ps_mask(some, floor, _CMP_GE_OQ);
    const __m512 behind = _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(most), some), _mm512_set1_ps(float(PER_UNIT)));
    _mm512_store_si512(buckets, _mm512_cvttps_epi32(_mm512_min_ps(behind, _mm512_set1_ps(float(BUCKETS - 1)))));
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
      const __m512 some = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITE), first16(V - 16 * block), scores + 16 * block);
      _mm512_store_ps(masses, mass(some, _mm512_set1_ps(most)));
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
  const __m512 temperature = _mm512_set1_ps(float(o.temperature));
  for (int64_t v = 0; v < V; v += 16) {
    const __mmask16 some = first16(V - v);
    _mm512_mask_storeu_ps(law + v, some, _mm512_div_ps(_mm512_maskz_loadu_ps(some, scores + v), temperature));
  }
  const int64_t best = largest(law, V);
  if (best < 0) return false;
  const float most = law[best];
  const Edge edge = edge_of(law, V, most, o, scratch);
  const __m512 floor = _mm512_set1_ps(edge.score), peak = _mm512_set1_ps(most);
  const __m512i last = _mm512_set1_epi32(int32_t(edge.last));
  __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512d total = _mm512_setzero_pd();
  for (int64_t v = 0; v < V; v += 16, ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16))) {
    const __mmask16 some = first16(V - v);
    const __m512 score = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITE), some, law + v);
    const __mmask16 ties = _mm512_cmp_ps_mask(score, floor, _CMP_EQ_OQ) & _mm512_cmple_epi32_mask(ids, last);
    const __mmask16 stays = _mm512_cmp_ps_mask(score, floor, _CMP_GT_OQ) | ties;
    const __m512 masses = _mm512_maskz_mov_ps(stays, mass(score, peak));
    _mm512_mask_storeu_ps(law + v, some, masses);
    total = add_up(total, masses);
  }
  const __m512 share = _mm512_set1_ps(float(1 / _mm512_reduce_add_pd(total)));
  for (int64_t v = 0; v < V; v += 16) {
    const __mmask16 some = first16(V - v);
    _mm512_mask_storeu_ps(law + v, some, _mm512_mul_ps(_mm512_maskz_loadu_ps(some, law + v), share));
  }
  return true;
}

// scores (B, M, V) -> laws (B, M, V), by `options` (B, 4). False where an output that counts (up to lengths[b]) has scores that are
// no numbers, infinite or all masked; behind output lengths[b] of row b some law, whatever the scores. Without `point_masses` greedy
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
