// Races of drafter-invariant sampling (outrider/sampling/coupling.py): the token of the largest log p + g, the lowest id among equals.

#pragma once

#include <cstdint>
#include <limits>

#include "lanes.h"

inline constexpr double LOWEST = -std::numeric_limits<double>::infinity();

// ln x for x > 0: of the mantissa in [0.75, 1.5) by Cephes' polynomial, absolute error about 1e-7; -inf for 0
inline Floats logarithm(Floats x) {
  const Mask is_some = is_greater(x, floats(0));
  Floats mantissa, power;
  split(x, mantissa, power);
  const Floats r = mantissa - floats(1.f), square = r * r;
  Floats p = floats(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = multiply_add(p, r, floats(c));
  Floats found = p * r * square;
  found = multiply_add(power, floats(-2.12194440e-4f), found);
  found = subtract_product(square, floats(0.5f), found);
  found = found + r;
  found = multiply_add(power, floats(0.693359375f), found);
  return choose(is_some, found, floats(float(LOWEST)));
}

// The token of the largest log p + g
inline int64_t winner(const float* law, const double* noise, int64_t V) {
  Doubles most = doubles(LOWEST);
  Doubles first = doubles(0), ids = low_doubles(to_floats(counting()));
  const auto race = [&](Doubles logs, const double* g, HalfMask some) {
    const Doubles score = logs + load_some(some, g);
    const HalfMask leads = is_greater(score, most) & some;
    most = choose(leads, score, most);
    first = choose(leads, ids, first);
    ids = ids + doubles(8);
  };
  for (int64_t v = 0; v < V; v += 16) {
    const Mask some = first16(V - v);
    const Floats logs = logarithm(load_some(some, law + v));
    race(low_doubles(logs), noise + v, HalfMask(some));
    race(high_doubles(logs), noise + v + 8, HalfMask(some >> 8));
  }
  double scores[8], places[8];
  store(scores, most);
  store(places, first);
  int64_t best = 0;
  for (int64_t lane = 1; lane < 8; ++lane)
    if (scores[lane] > scores[best] || (scores[lane] == scores[best] && places[lane] < places[best])) best = lane;
  return int64_t(places[best]);
}
