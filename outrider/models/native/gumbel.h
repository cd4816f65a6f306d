// Gumbel noise of text positions (outrider/sampling/rng.py): -log(-log u), u uniform.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "philox.h"

namespace gumbel {

inline constexpr int64_t PART = 1024;     // numbers of a position that a thread makes at once; a multiple of 8
inline constexpr double LEAST = 0x1p-54;  // of u, so that noise is finite

// ln x for normal x > 0, relative error about 2^-52 also where x is close to 1: 2 artanh(r / (2 + r)) of the mantissa 1 + r in
// [0.75, 1.5), by its series up to the power 23
inline __m512d logarithm(__m512d x) {
  const __m512d one = _mm512_set1_pd(1), mantissa = _mm512_getmant_pd(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  // getexp says floor(log2 x): one too few where the mantissa was taken from [0.75, 1)
  __m512d power = _mm512_getexp_pd(x);
  power = _mm512_mask_add_pd(power, _mm512_cmp_pd_mask(mantissa, one, _CMP_LT_OQ), power, one);
  const __m512d r = _mm512_sub_pd(mantissa, one), s = _mm512_div_pd(r, _mm512_add_pd(r, _mm512_set1_pd(2)));
  const __m512d square = _mm512_mul_pd(s, s);
  __m512d series = _mm512_set1_pd(1. / 23);
  for (int odd = 21; odd > 1; odd -= 2) series = _mm512_fmadd_pd(series, square, _mm512_set1_pd(1. / odd));
  const __m512d twice = _mm512_add_pd(s, s), rest = _mm512_mul_pd(_mm512_mul_pd(twice, square), series);
  const __m512d low = _mm512_fmadd_pd(power, _mm512_set1_pd(1.9082149292705877e-10), rest);  // ln 2 in two parts
  return _mm512_fmadd_pd(power, _mm512_set1_pd(0.693147180369123816490), _mm512_add_pd(twice, low));
}

// Numbers from .. to, within a part
inline void make(uint64_t seed, uint64_t stream, uint64_t position, int64_t from, int64_t to, double* noise) {
  alignas(64) double u[PART];
  const __m512d none = _mm512_setzero_pd();
  const int64_t end = from + (to - from + 7) / 8 * 8;  // within PART
  for (int64_t v = from; v < end; v += 4) philox::uniforms(seed, stream, v / 4 + 1, position, 0, u + (v - from));
  for (int64_t v = from; v < to; v += 8) {
    const __m512d some = _mm512_max_pd(_mm512_load_pd(u + (v - from)), _mm512_set1_pd(LEAST));
    const __m512d found = _mm512_sub_pd(none, logarithm(_mm512_sub_pd(none, logarithm(some))));
    _mm512_mask_storeu_pd(noise + v, __mmask8(to - v >= 8 ? 0xff : (1u << (to - v)) - 1), found);
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
