// What is left of a law once a draft token had its chance, and draws from it: what verdicts on chains and on trees share.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "philox.h"

inline constexpr int64_t PART = 256;  // numbers summed up at once where a token is drawn

// What a verdict keeps of a row's draft: the path that ends at this node (-1: nothing), and the token after it.
struct Kept {
  int64_t end, next;
};

// Those of a row's step (`Purpose` in outrider/sampling/rng.py numbers the streams).
struct Coins {
  uint64_t seed, start;
  double accept(int64_t node) const { return coin(seed, 0, start, uint64_t(node)); }
  double draw() const { return coin(seed, 1, start, 0); }
};

// The law that a draft token was drawn from; null: it was placed.
struct Node {
  const float* law;
  int64_t token;
};

// [scale p - q]+ of sixteen tokens
inline Floats excess(const float* p, const Node& node, float scale, int64_t v, Mask some) {
  const Floats scaled = floats(scale) * load_some(some, p + v);
  if (node.law) return larger(scaled - load_some(some, node.law + v), floats(0));
  const int64_t place = node.token - v;  // a point mass takes all of its own token
  return place >= 0 && place < 16 ? keep(Mask(~(1u << place)), scaled) : scaled;
}

inline double surplus(const float* p, const Node& node, float scale, int64_t V) {
  Doubles sum = doubles(0);
  for (int64_t v = 0; v < V; v += 16) sum = add_up(sum, excess(p, node, scale, v, first16(V - v)));
  return sum_of(sum);
}

// The first token whose cumulative weight exceeds uniform * total, never one without weight; -1 where there is no weight
inline int64_t drawn(const float* weights, int64_t V, double uniform) {
  std::vector<double> parts;
  parts.reserve(V / PART + 1);
  double total = 0, before = 0;
  for (int64_t begin = 0; begin < V; begin += PART) {
    const int64_t end = std::min(V, begin + PART);
    Doubles sum = doubles(0);
    for (int64_t v = begin; v < end; v += 16) sum = add_up(sum, load_some(first16(end - v), weights + v));
    parts.push_back(sum_of(sum));
    total += parts.back();
  }
  if (!(total > 0)) return -1;
  const double wanted = uniform * total;
  size_t part = 0;
  while (part + 1 < parts.size() && before + parts[part] <= wanted) before += parts[part++];
  int64_t found = -1;
  for (int64_t v = int64_t(part) * PART; v < std::min(V, int64_t(part + 1) * PART); ++v) {
    if (!(weights[v] > 0)) continue;
    found = v;
    before += weights[v];
    if (before > wanted) break;
  }
  for (int64_t v = int64_t(part) * PART; found < 0; --v)  // rounding led past the last weight
    if (weights[v] > 0) found = v;
  return found;
}
