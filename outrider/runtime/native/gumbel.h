// Gumbel noise of text positions (outrider/sampling/rng.py): -log(-log u), u uniform.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"
#include "philox.h"

namespace gumbel {

inline constexpr int64_t PART = 1024;     // numbers of a position that a thread makes at once; a multiple of 8
inline constexpr double LEAST = 0x1p-54;  // of u, so that noise is finite

// ln x for normal x > 0, relative error about 2^-52 also where x is close to 1: 2 artanh(r / (2 + r)) of the mantissa 1 + r in
// [0.75, 1.5), by its series up to the power 23
inline Doubles logarithm(Doubles x) {
  Doubles mantissa, power;
  split(x, mantissa, power);
  const Doubles r = mantissa - doubles(1), s = r / (r + doubles(2));
  const Doubles square = s * s;
  Doubles series = doubles(1. / 23);
  for (int odd = 21; odd > 1; odd -= 2) series = multiply_add(series, square, doubles(1. / odd));
  const Doubles twice = s + s, rest = twice * square * series;
  const Doubles low = multiply_add(power, doubles(1.9082149292705877e-10), rest);  // ln 2 in two parts
  return multiply_add(power, doubles(0.693147180369123816490), twice + low);
}

// Numbers from .. to, within a part
inline void make(uint64_t seed, uint64_t stream, uint64_t position, int64_t from, int64_t to, double* noise) {
  alignas(64) double u[PART];
  const Doubles none = doubles(0);
  const int64_t end = from + (to - from + 7) / 8 * 8;  // within PART
  for (int64_t v = from; v < end; v += 4) philox::uniforms(seed, stream, v / 4 + 1, position, 0, u + (v - from));
  for (int64_t v = from; v < to; v += 8) {
    const Doubles some = larger(load(u + (v - from)), doubles(LEAST));
    const Doubles found = none - logarithm(none - logarithm(some));
    store_some(HalfMask(first16(to - v)), noise + v, found);
  }
}

}  // namespace gumbel

// n positions' tables (V,) fp64, each a function of seed, stream, position and V alone
inline void make_noise(uint64_t seed, uint64_t stream, const int64_t* positions, double* const* noise, int64_t n, int64_t V) {
  constexpr int64_t SERIAL = 1 << 11;  // numbers below which a second thread costs more than it does
  const int64_t parts = (V + gumbel::PART - 1) / gumbel::PART;
#pragma omp parallel for schedule(static) if (n * V > SERIAL)
  for (int64_t i = 0; i < n * parts; ++i) {
    const int64_t from = i % parts * gumbel::PART;
    gumbel::make(seed, stream, uint64_t(positions[i / parts]), from, std::min(V, from + gumbel::PART), noise[i / parts]);
  }
}
