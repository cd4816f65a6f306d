// The words of `lanes.h` for AVX-512 with its products of bf16 and of bytes: one instruction each, most of them.

#pragma once

#include <cstdint>
#include <cstring>

#include "x86.h"

inline constexpr bool IS_WIDE = true;  // 32 registers of 64 bytes

using Floats = __m512;
using Doubles = __m512d;
struct Ints { __m512i all; };
struct Pairs { __m512bh all; };
struct Bytes { __m512i all; };

// ---------------------------------------------------------------- Floats: +, -, * and / are the language's own

inline Floats floats(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load_some(Mask some, const float* at) { return _mm512_maskz_loadu_ps(some, at); }
inline Floats load_some(Mask some, const float* at, Floats others) { return _mm512_mask_loadu_ps(others, some, at); }
inline void store(float* at, Floats x) { _mm512_storeu_ps(at, x); }
inline void store_some(Mask some, float* at, Floats x) { _mm512_mask_storeu_ps(at, some, x); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, 0); }
inline Floats root(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }  // n whole
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

inline Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_no_number(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Floats choose(Mask first, Floats a, Floats b) { return _mm512_mask_mov_ps(b, first, a); }
inline Floats keep(Mask some, Floats x) { return _mm512_maskz_mov_ps(some, x); }

// x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Floats x, Floats& mantissa, Floats& power) {
  mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  // getexp says floor(log2 x): one too few where the mantissa was taken from [0.75, 1)
  const Mask is_low = _mm512_cmp_ps_mask(mantissa, _mm512_set1_ps(1.f), _CMP_LT_OQ);
  power = _mm512_getexp_ps(x);
  power = _mm512_mask_add_ps(power, is_low, power, _mm512_set1_ps(1.f));
}

// ---------------------------------------------------------------- Doubles

inline Doubles doubles(double x) { return _mm512_set1_pd(x); }
inline Doubles load(const double* at) { return _mm512_loadu_pd(at); }
inline Doubles load_some(HalfMask some, const double* at) { return _mm512_maskz_loadu_pd(some, at); }
inline void store(double* at, Doubles x) { _mm512_storeu_pd(at, x); }
inline void store_some(HalfMask some, double* at, Doubles x) { _mm512_mask_storeu_pd(at, some, x); }
inline Doubles low_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
inline Doubles high_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0xee))); }

inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline Doubles larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
inline double sum_of(Doubles x) { return _mm512_reduce_add_pd(x); }
inline HalfMask is_greater(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
inline Doubles choose(HalfMask first, Doubles a, Doubles b) { return _mm512_mask_mov_pd(b, first, a); }

// Normal x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Doubles x, Doubles& mantissa, Doubles& power) {
  mantissa = _mm512_getmant_pd(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  power = _mm512_getexp_pd(x);
  power = _mm512_mask_add_pd(power, _mm512_cmp_pd_mask(mantissa, _mm512_set1_pd(1), _CMP_LT_OQ), power, _mm512_set1_pd(1));
}

// ---------------------------------------------------------------- Ints

inline Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints counting() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.all, b.all)}; }
inline Mask is_at_most(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a.all, b.all); }
inline Ints load(const int32_t* at) { return {_mm512_loadu_si512(at)}; }
inline void store(int32_t* at, Ints x) { _mm512_storeu_si512(at, x.all); }
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32(x.all); }
inline Ints truncated(Floats x) { return {_mm512_cvttps_epi32(x)}; }
inline Ints nearest(Floats x) { return {_mm512_cvtps_epi32(x)}; }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x.all); }
inline void store_bytes(int8_t* at, Ints x) { _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(x.all)); }

// ---------------------------------------------------------------- bf16

inline Floats widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }
inline Floats load(const bf16* at) { return widen(_mm256_loadu_si256((const __m256i*)at)); }
inline Floats load_some(Mask some, const bf16* at) { return widen(_mm256_maskz_loadu_epi16(some, at)); }
inline void store_some(Mask some, bf16* at, Floats x) { _mm256_mask_storeu_epi16(at, some, (__m256i)_mm512_cvtneps_pbh(x)); }

inline Pairs load_pairs(const bf16* at) { return {(__m512bh)_mm512_loadu_si512(at)}; }

// The first `count` numbers, zeros after them
inline Pairs load_pairs(const bf16* at, int64_t count) {
  const __mmask32 some = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  return {(__m512bh)_mm512_maskz_loadu_epi16(some, at)};
}

// One pair for all lanes
inline Pairs same_pair(const bf16* at) {
  int32_t both;
  std::memcpy(&both, at, sizeof both);
  return {(__m512bh)_mm512_set1_epi32(both)};
}

// `sum` with the two products of each lane
inline Floats add_products(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a.all, b.all); }

// ---------------------------------------------------------------- fp16, int8

inline Floats load_halves(const uint16_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
inline Floats load_small(const int8_t* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
}

// 2^(e - 127) of sixteen bytes e
inline Floats load_powers(const uint8_t* at) {
  const __m512i exponents = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)), 23);
  return _mm512_castsi512_ps(_mm512_max_epi32(exponents, _mm512_set1_epi32(1 << 22)));  // 2^-127 has no exponent of its own
}

// ---------------------------------------------------------------- fp8

// Numbers e4m3 in the high half of each word, as bf16: exact. Those below 2^-6 are looked up.
inline Pairs widen_small(__m512i words) {
  const __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f00));
  const __m512i low = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_low = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(0x0800));
  __m512i found = _mm512_add_epi16(_mm512_srli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
  found = _mm512_mask_permutexvar_epi16(found, is_low, _mm512_srli_epi16(size, 8), low);
  return {(__m512bh)_mm512_ternarylogic_epi32(found, words, _mm512_set1_epi16(short(0x8000)), 0xf8)};  // found | words & sign
}
// The same where none is below 2^-6
inline Pairs widen_normal(__m512i words) {
  const __m512i moved = _mm512_and_si512(_mm512_srai_epi16(words, 4), _mm512_set1_epi16(short(0x87f0)));
  return {(__m512bh)_mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00))};
}
inline bool has_small(Bytes codes) { return _mm512_testn_epi8_mask(codes.all, _mm512_set1_epi8(0x78)) != 0; }
// Bytes 0 and 2 of each four, and 1 and 3
inline Pairs widen_evens(Bytes codes, bool is_normal) {
  const __m512i words = _mm512_slli_epi16(codes.all, 8);
  return is_normal ? widen_normal(words) : widen_small(words);
}
inline Pairs widen_odds(Bytes codes, bool is_normal) { return is_normal ? widen_normal(codes.all) : widen_small(codes.all); }
inline void store_pairs(bf16* at, Pairs x) { _mm512_storeu_si512(at, (__m512i)x.all); }

// ---------------------------------------------------------------- Bytes

inline Bytes load_bytes(const uint8_t* at) { return {_mm512_loadu_si512(at)}; }
inline void store(uint8_t* at, Bytes x) { _mm512_storeu_si512(at, x.all); }
inline Bytes low_halves(Bytes x) { return {_mm512_and_si512(x.all, _mm512_set1_epi8(15))}; }
inline Bytes high_halves(Bytes x) { return low_halves({_mm512_srli_epi16(x.all, 4)}); }

// Each byte less this amount: for matrix tiles, which no other processor has
inline Bytes less(Bytes x, int amount) { return {_mm512_sub_epi8(x.all, _mm512_set1_epi8(char(amount)))}; }

inline Bytes looked_up(const uint8_t* sixteen, Bytes codes) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)sixteen)), codes.all)};
}

// `codes` and above them, at bits 4 and higher, those bits of each byte of x that `mask` has once it is moved: up where `LEFT` > 0
template <int LEFT>
inline Bytes with_bits(Bytes codes, Bytes x, int mask) {
  const __m512i moved = LEFT >= 0 ? _mm512_slli_epi16(x.all, LEFT >= 0 ? LEFT : 0) : _mm512_srli_epi16(x.all, LEFT < 0 ? -LEFT : 0);
  return {_mm512_or_si512(codes.all, _mm512_and_si512(moved, _mm512_set1_epi8(char(mask))))};
}

// `sum` with the four products of each lane: unsigned codes times the same four signed inputs
inline Ints add_products(Ints sum, Bytes codes, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  return {_mm512_dpbusd_epi32(sum.all, codes.all, _mm512_set1_epi32(four))};
}

// The same where no code is above 127
inline Ints add_small_products(Ints sum, Bytes codes, const int8_t* inputs) { return add_products(sum, codes, inputs); }

// Low and high bytes put side by side: those of the first eight of each sixteen, and of the last eight
inline Pairs join_firsts(Bytes low, Bytes high) { return {(__m512bh)_mm512_unpacklo_epi8(low.all, high.all)}; }
inline Pairs join_lasts(Bytes low, Bytes high) { return {(__m512bh)_mm512_unpackhi_epi8(low.all, high.all)}; }
