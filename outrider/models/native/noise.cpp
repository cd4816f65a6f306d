// Gumbel noise of text positions (outrider/sampling/rng.py): -log(-log u), u the uniforms of NumPy's Philox generator.
//
//     positions (n,) int64   -> n tables (V,) fp64, each a function of seed, stream, position and V alone
//
// Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives four numbers per counter, so parts
// of a position are made by any thread in any order; the uniforms are NumPy's to the bit.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

using wide = unsigned __int128;

constexpr int64_t PART = 1024;       // numbers of a position that a thread makes at once; a multiple of 8
constexpr int64_t SERIAL = 1 << 11;  // numbers below which a second thread costs more than it does
constexpr double LEAST = 0x1p-54;    // of u, so that noise is finite
constexpr uint64_t MULTIPLIERS[] = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
constexpr uint64_t KEY_STEPS[] = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};

// The four numbers of counter (block, position, 0, 0) as doubles in [0, 1)
inline void uniforms(uint64_t seed, uint64_t stream, uint64_t block, uint64_t position, double* out) {
  uint64_t a = block, b = position, c = 0, d = 0;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, seed += KEY_STEPS[0], stream += KEY_STEPS[1]) {
    const wide first = wide(MULTIPLIERS[0]) * a, second = wide(MULTIPLIERS[1]) * c;
    a = uint64_t(second >> 64) ^ b ^ seed, b = uint64_t(second);
    c = uint64_t(first >> 64) ^ d ^ stream, d = uint64_t(first);
  }
  for (uint64_t number : {a, b, c, d}) *out++ = double(int64_t(number >> 11)) * 0x1p-53;
}

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

void make(uint64_t seed, uint64_t stream, uint64_t position, int64_t from, int64_t to, double* noise) {
  alignas(64) double u[PART];
  const __m512d none = _mm512_setzero_pd();
  const int64_t end = from + (to - from + 7) / 8 * 8;  // within PART
  for (int64_t v = from; v < end; v += 4) uniforms(seed, stream, v / 4 + 1, position, u + (v - from));  // NumPy counts first
  for (int64_t v = from; v < to; v += 8) {
    const __m512d some = _mm512_max_pd(_mm512_load_pd(u + (v - from)), _mm512_set1_pd(LEAST));
    const __m512d found = _mm512_sub_pd(none, logarithm(_mm512_sub_pd(none, logarithm(some))));
    _mm512_mask_storeu_pd(noise + v, __mmask8(to - v >= 8 ? 0xff : (1u << (to - v)) - 1), found);
  }
}

}  // namespace

extern "C" {

void outrider_noise(uint64_t seed, uint64_t stream, const int64_t* positions, double* const* noise, int64_t n, int64_t V) {
  const int64_t parts = (V + PART - 1) / PART;
#pragma omp parallel for schedule(static) if (n * V > SERIAL)
  for (int64_t i = 0; i < n * parts; ++i) {
    const int64_t from = i % parts * PART;
    make(seed, stream, uint64_t(positions[i / parts]), from, std::min(V, from + PART), noise[i / parts]);
  }
}

}  // extern "C"
