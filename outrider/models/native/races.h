// Races of drafter-invariant sampling (outrider/sampling/coupling.py): the token of the largest log p + g, the lowest id among equals.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "lanes.h"

inline constexpr double LOWEST = -std::numeric_limits<double>::infinity();

// ln x for x > 0: of the mantissa in [0.75, 1.5) by Cephes' polynomial, absolute error about 1e-7; -inf for 0
inline __m512 logarithm(__m512 x) {
  const __mmask16 is_some = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  // getexp says floor(log2 x): one too few where the mantissa was taken from [0.75, 1)
  const __mmask16 is_low = _mm512_cmp_ps_mask(mantissa, _mm512_set1_ps(1.f), _CMP_LT_OQ);
  __m512 power = _mm512_getexp_ps(x);
  power = _mm512_mask_add_ps(power, is_low, power, _mm512_set1_ps(1.f));
  const __m512 r = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.f)), square = _mm512_mul_ps(r, r);
  __m512 p = _mm512_set1_ps(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  __m512 found = _mm512_mul_ps(_mm512_mul_ps(p, r), square);
  found = _mm512_fmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), found);
  found = _mm512_fnmadd_ps(square, _mm512_set1_ps(0.5f), found);
  found = _mm512_add_ps(found, r);
  found = _mm512_fmadd_ps(power, _mm512_set1_ps(0.693359375f), found);
  return _mm512_mask_mov_ps(_mm512_set1_ps(float(LOWEST)), is_some, found);
}

// The token of the largest log p + g
inline int64_t winner(const float* law, const double* noise, int64_t V) {
  __m512d most = _mm512_set1_pd(LOWEST);
  __m512i first = _mm512_set1_epi64(0), ids = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const auto race = [&](__m256 logs, const double* g, __mmask8 some) {
    const __m512d score = _mm512_add_pd(_mm512_cvtps_pd(logs), _mm512_maskz_loadu_pd(some, g));
    const __mmask8 leads = _mm512_cmp_pd_mask(score, most, _CMP_GT_OQ) & some;
    most = _mm512_mask_mov_pd(most, leads, score);
    first = _mm512_mask_mov_epi64(first, leads, ids);
    ids = _mm512_add_epi64(ids, _mm512_set1_epi64(8));
  };
  for (int64_t v = 0; v < V; v += 16) {
    const __mmask16 some = first16(V - v);
    const __m512 logs = logarithm(_mm512_maskz_loadu_ps(some, law + v));
    race(_mm512_castps512_ps256(logs), noise + v, __mmask8(some));
    race(_mm512_castps512_ps256(_mm512_shuffle_f32x4(logs, logs, 0xee)), noise + v + 8, __mmask8(some >> 8));
  }
  double scores[8];
  int64_t places[8];
  _mm512_storeu_pd(scores, most);
  _mm512_storeu_si512(places, first);
  int64_t best = 0;
  for (int64_t lane = 1; lane < 8; ++lane)
    if (scores[lane] > scores[best] || (scores[lane] == scores[best] && places[lane] < places[best])) best = lane;
  return places[best];
}
