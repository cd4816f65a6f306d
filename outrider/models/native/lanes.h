// Sixteen numbers at a time: what attention, laws and verdicts share.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

// e^x for x <= 0: 2^n times a degree-6 polynomial on [-ln 2 / 2, ln 2 / 2], relative error about 1e-7
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// A mask of the first `count` lanes, all of them where there are more
inline __mmask16 first16(int64_t count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }

// `sum` with sixteen more numbers in it
inline __m512d add_up(__m512d sum, __m512 values) {
  const __m512 upper = _mm512_shuffle_f32x4(values, values, 0xee);
  sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(values)));
  return _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(upper)));
}
