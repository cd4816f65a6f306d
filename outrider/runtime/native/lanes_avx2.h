// The words of `lanes.h` for AVX2 and FMA: two registers each, and what AVX-512 has an instruction for in a few.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "x86.h"

inline constexpr bool IS_WIDE = false;  // 16 registers of 32 bytes

struct Floats { __m256 low, high; };
struct Doubles { __m256d low, high; };
struct Ints { __m256i low, high; };
struct Pairs { __m256i low, high; };
struct Bytes { __m256i low, high; };

// All bits of the lanes of a mask
inline __m256i lanes8(unsigned mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(mask)), bits), bits);
}
inline __m256i lanes4(unsigned mask) {
  const __m256i bits = _mm256_setr_epi64x(1, 2, 4, 8);
  return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(int64_t(mask)), bits), bits);
}

// ---------------------------------------------------------------- Floats

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }

inline Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
inline void store(float* at, Floats x) {
  _mm256_storeu_ps(at, x.low);
  _mm256_storeu_ps(at + 8, x.high);
}
inline Floats load_some(Mask some, const float* at) {
  if (some == 0xffff) return load(at);
  return {_mm256_maskload_ps(at, lanes8(some)), _mm256_maskload_ps(at + 8, lanes8(some >> 8))};
}
inline void store_some(Mask some, float* at, Floats x) {
  if (some == 0xffff) return store(at, x);
  _mm256_maskstore_ps(at, lanes8(some), x.low);
  _mm256_maskstore_ps(at + 8, lanes8(some >> 8), x.high);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats subtract_product(Floats a, Floats b, Floats c) {  // c - a b
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats rounded(Floats x) {
  constexpr int to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, to_nearest), _mm256_round_ps(x.high, to_nearest)};
}
inline Floats root(Floats x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
inline float sum_of(Floats x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float largest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return two[0] > two[1] ? two[0] : two[1];
}

template <int KIND>
inline Mask compare(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, KIND));
  return Mask(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, KIND)) << 8);
}
inline Mask is_greater(Floats a, Floats b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask is_at_least(Floats a, Floats b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask is_equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask is_no_number(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
inline Floats choose(Mask first, Floats a, Floats b) {
  const __m256 low = _mm256_castsi256_ps(lanes8(first)), high = _mm256_castsi256_ps(lanes8(first >> 8));
  return {_mm256_blendv_ps(b.low, a.low, low), _mm256_blendv_ps(b.high, a.high, high)};
}
inline Floats keep(Mask some, Floats x) {
  const __m256 low = _mm256_castsi256_ps(lanes8(some)), high = _mm256_castsi256_ps(lanes8(some >> 8));
  return {_mm256_and_ps(low, x.low), _mm256_and_ps(high, x.high)};
}
inline Floats load_some(Mask some, const float* at, Floats others) {
  return some == 0xffff ? load(at) : choose(some, load_some(some, at), others);
}

// n whole, the result normal
inline Floats times_power_of_two(Floats x, Floats n) {
  const auto power = [](__m256 of) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(of), _mm256_set1_epi32(127)), 23));
  };
  return {x.low * power(n.low), x.high * power(n.high)};
}

// x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Floats x, Floats& mantissa, Floats& power) {
  const auto half = [](__m256 x, __m256& mantissa, __m256& power) {
    const __m256 is_tiny = _mm256_cmp_ps(x, _mm256_set1_ps(std::numeric_limits<float>::min()), _CMP_LT_OQ);
    const __m256i bits = _mm256_castps_si256(_mm256_blendv_ps(x, x * _mm256_set1_ps(0x1p24f), is_tiny));
    // a mantissa of [1.5, 2) is one of [0.75, 1) of the next power
    const __m256i next = _mm256_and_si256(_mm256_srli_epi32(bits, 22), _mm256_set1_epi32(1));
    const __m256i exponent = _mm256_sub_epi32(_mm256_set1_epi32(127), next);
    const __m256i digits = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
    mantissa = _mm256_castsi256_ps(_mm256_or_si256(digits, _mm256_slli_epi32(exponent, 23)));
    power = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), exponent));
    power = power - _mm256_and_ps(is_tiny, _mm256_set1_ps(24.f));
  };
  half(x.low, mantissa.low, power.low);
  half(x.high, mantissa.high, power.high);
}

// ---------------------------------------------------------------- Doubles

inline Doubles operator+(Doubles a, Doubles b) { return {a.low + b.low, a.high + b.high}; }
inline Doubles operator-(Doubles a, Doubles b) { return {a.low - b.low, a.high - b.high}; }
inline Doubles operator*(Doubles a, Doubles b) { return {a.low * b.low, a.high * b.high}; }
inline Doubles operator/(Doubles a, Doubles b) { return {a.low / b.low, a.high / b.high}; }

inline Doubles doubles(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline Doubles load(const double* at) { return {_mm256_loadu_pd(at), _mm256_loadu_pd(at + 4)}; }
inline void store(double* at, Doubles x) {
  _mm256_storeu_pd(at, x.low);
  _mm256_storeu_pd(at + 4, x.high);
}
inline Doubles load_some(HalfMask some, const double* at) {
  return {_mm256_maskload_pd(at, lanes4(some)), _mm256_maskload_pd(at + 4, lanes4(some >> 4))};
}
inline void store_some(HalfMask some, double* at, Doubles x) {
  _mm256_maskstore_pd(at, lanes4(some), x.low);
  _mm256_maskstore_pd(at + 4, lanes4(some >> 4), x.high);
}
inline Doubles widened(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
inline Doubles low_doubles(Floats x) { return widened(x.low); }
inline Doubles high_doubles(Floats x) { return widened(x.high); }

inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}
inline Doubles larger(Doubles a, Doubles b) { return {_mm256_max_pd(a.low, b.low), _mm256_max_pd(a.high, b.high)}; }
inline double sum_of(Doubles x) {
  const __m256d four = x.low + x.high;
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
}
inline HalfMask is_greater(Doubles a, Doubles b) {
  const int low = _mm256_movemask_pd(_mm256_cmp_pd(a.low, b.low, _CMP_GT_OQ));
  return HalfMask(low | _mm256_movemask_pd(_mm256_cmp_pd(a.high, b.high, _CMP_GT_OQ)) << 4);
}
inline Doubles choose(HalfMask first, Doubles a, Doubles b) {
  const __m256d low = _mm256_castsi256_pd(lanes4(first)), high = _mm256_castsi256_pd(lanes4(first >> 4));
  return {_mm256_blendv_pd(b.low, a.low, low), _mm256_blendv_pd(b.high, a.high, high)};
}

// Normal x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Doubles x, Doubles& mantissa, Doubles& power) {
  const auto half = [](__m256d x, __m256d& mantissa, __m256d& power) {
    const __m256i bits = _mm256_castpd_si256(x);
    const __m256i next = _mm256_and_si256(_mm256_srli_epi64(bits, 51), _mm256_set1_epi64x(1));  // of [1.5, 2)
    const __m256i exponent = _mm256_sub_epi64(_mm256_set1_epi64x(1023), next);
    const __m256i digits = _mm256_and_si256(bits, _mm256_set1_epi64x(0xfffffffffffff));
    mantissa = _mm256_castsi256_pd(_mm256_or_si256(digits, _mm256_slli_epi64(exponent, 52)));
    // whole numbers far below 2^52 become doubles by way of the digits of 2^52 + 2^51
    const __m256d magic = _mm256_set1_pd(0x1.8p52);
    const __m256i whole = _mm256_sub_epi64(_mm256_srli_epi64(bits, 52), exponent);
    power = _mm256_castsi256_pd(_mm256_add_epi64(whole, _mm256_castpd_si256(magic))) - magic;
  };
  half(x.low, mantissa.low, power.low);
  half(x.high, mantissa.high, power.high);
}

// ---------------------------------------------------------------- Ints

inline Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints counting() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Mask is_at_most(Ints a, Ints b) {
  const auto above = [](__m256i a, __m256i b) { return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))); };
  return Mask(~(above(a.low, b.low) | above(a.high, b.high) << 8));
}
inline void store(int32_t* at, Ints x) {
  _mm256_storeu_si256((__m256i*)at, x.low);
  _mm256_storeu_si256((__m256i*)at + 1, x.high);
}
inline int32_t sum_of(Ints x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline Ints truncated(Floats x) { return {_mm256_cvttps_epi32(x.low), _mm256_cvttps_epi32(x.high)}; }
inline Ints nearest(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// The lower half of every lane, in order
inline __m256i packed(__m256i low, __m256i high) {
  const __m256i lower = _mm256_set1_epi32(0xffff);  // else what is above 32767 would saturate
  const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(low, lower), _mm256_and_si256(high, lower));
  return _mm256_permute4x64_epi64(mixed, 0xd8);
}
inline void store_bytes(int8_t* at, Ints x) {  // each of them fits
  const __m256i words = packed(x.low, x.high);
  _mm_storeu_si128((__m128i*)at, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// ---------------------------------------------------------------- bf16

inline Floats widen(__m256i values) {
  const auto half = [](__m128i eight) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16)); };
  return {half(_mm256_castsi256_si128(values)), half(_mm256_extracti128_si256(values, 1))};
}
inline Floats load(const bf16* at) { return widen(_mm256_loadu_si256((const __m256i*)at)); }
inline Floats load_some(Mask some, const bf16* at) {
  if (some == 0xffff) return load(at);
  alignas(32) bf16 padded[16] = {};
  std::memcpy(padded, at, sizeof(bf16) * __builtin_popcount(some));
  return load(padded);
}

// To the nearest bf16, ties to even; what is no number stays none
inline __m256i to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(near), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}
inline void store_some(Mask some, bf16* at, Floats x) {
  const __m256i values = packed(to_bf16(x.low), to_bf16(x.high));
  if (some == 0xffff) return _mm256_storeu_si256((__m256i*)at, values);
  alignas(32) bf16 all[16];
  _mm256_store_si256((__m256i*)all, values);
  std::memcpy(at, all, sizeof(bf16) * __builtin_popcount(some));
}

inline Pairs load_pairs(const bf16* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}

// The first `count` numbers, zeros after them
inline Pairs load_pairs(const bf16* at, int64_t count) {
  if (count >= 32) return load_pairs(at);
  alignas(32) bf16 padded[32] = {};
  std::memcpy(padded, at, sizeof(bf16) * count);
  return load_pairs(padded);
}

// One pair for all lanes
inline Pairs same_pair(const bf16* at) {
  int32_t both;
  std::memcpy(&both, at, sizeof both);
  return {_mm256_set1_epi32(both), _mm256_set1_epi32(both)};
}

// `sum` with the two products of each lane
inline Floats add_products(Floats sum, Pairs a, Pairs b) {
  const auto even = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
  const auto odd = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000)))); };
  sum = {_mm256_fmadd_ps(even(a.low), even(b.low), sum.low), _mm256_fmadd_ps(even(a.high), even(b.high), sum.high)};
  return {_mm256_fmadd_ps(odd(a.low), odd(b.low), sum.low), _mm256_fmadd_ps(odd(a.high), odd(b.high), sum.high)};
}

// ---------------------------------------------------------------- fp16, int8

inline Floats load_halves(const uint16_t* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + 1))};
}
inline Floats load_small(const int8_t* at) {
  const auto eight = [](const int8_t* at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at))); };
  return {eight(at), eight(at + 8)};
}

// 2^(e - 127) of sixteen bytes e
inline Floats load_powers(const uint8_t* at) {
  const auto eight = [](const uint8_t* at) {
    const __m256i exponents = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(exponents, _mm256_set1_epi32(1 << 22)));  // 2^-127 has no exponent of its own
  };
  return {eight(at), eight(at + 8)};
}

// ---------------------------------------------------------------- fp8

// Numbers e4m3 in the high half of each word, as bf16: exact. Those below 2^-6 are looked up, low bytes and high ones.
inline __m256i widen_small(__m256i words) {
  const __m256i size = _mm256_and_si256(words, _mm256_set1_epi16(0x7f00)), places = _mm256_or_si256(size, _mm256_srli_epi16(size, 8));
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, char(0x80), char(0xc0), 0, 0x20, 0x40, 0x60, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c));
  const __m256i low = _mm256_shuffle_epi8(table, _mm256_or_si256(places, _mm256_set1_epi16(0x0800)));
  const __m256i high = _mm256_add_epi16(_mm256_srli_epi16(size, 4), _mm256_set1_epi16(0x3c00));
  const __m256i found = _mm256_blendv_epi8(high, low, _mm256_cmpgt_epi16(_mm256_set1_epi16(0x0800), size));
  return _mm256_or_si256(found, _mm256_and_si256(words, _mm256_set1_epi16(short(0x8000))));
}
// The same where none is below 2^-6
inline __m256i widen_normal(__m256i words) {
  const __m256i moved = _mm256_and_si256(_mm256_srai_epi16(words, 4), _mm256_set1_epi16(short(0x87f0)));
  return _mm256_add_epi16(moved, _mm256_set1_epi16(0x3c00));
}
inline bool has_small(Bytes codes) {
  const __m256i power = _mm256_set1_epi8(0x78), none = _mm256_setzero_si256();
  const __m256i low = _mm256_cmpeq_epi8(_mm256_and_si256(codes.low, power), none);
  return _mm256_movemask_epi8(_mm256_or_si256(low, _mm256_cmpeq_epi8(_mm256_and_si256(codes.high, power), none))) != 0;
}
// Bytes 0 and 2 of each four, and 1 and 3
inline Pairs widened(__m256i low, __m256i high, bool is_normal) {
  if (is_normal) return {widen_normal(low), widen_normal(high)};
  return {widen_small(low), widen_small(high)};
}
inline Pairs widen_evens(Bytes codes, bool is_normal) {
  return widened(_mm256_slli_epi16(codes.low, 8), _mm256_slli_epi16(codes.high, 8), is_normal);
}
inline Pairs widen_odds(Bytes codes, bool is_normal) { return widened(codes.low, codes.high, is_normal); }
inline void store_pairs(bf16* at, Pairs x) {
  _mm256_storeu_si256((__m256i*)at, x.low);
  _mm256_storeu_si256((__m256i*)at + 1, x.high);
}

// ---------------------------------------------------------------- Bytes

inline Bytes load_bytes(const uint8_t* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}
inline Bytes low_halves(Bytes x) {
  const __m256i half = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.low, half), _mm256_and_si256(x.high, half)};
}
inline Bytes high_halves(Bytes x) { return low_halves({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }

inline Bytes looked_up(const uint8_t* sixteen, Bytes codes) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)sixteen));
  return {_mm256_shuffle_epi8(table, codes.low), _mm256_shuffle_epi8(table, codes.high)};
}

// `codes` and above them, at bits 4 and higher, those bits of each byte of x that `mask` has once it is moved: up where `LEFT` > 0
template <int LEFT>
inline Bytes with_bits(Bytes codes, Bytes x, int mask) {
  const __m256i wanted = _mm256_set1_epi8(char(mask));
  const auto half = [&](__m256i codes, __m256i x) {
    const __m256i moved = LEFT >= 0 ? _mm256_slli_epi16(x, LEFT >= 0 ? LEFT : 0) : _mm256_srli_epi16(x, LEFT < 0 ? -LEFT : 0);
    return _mm256_or_si256(codes, _mm256_and_si256(moved, wanted));
  };
  return {half(codes.low, x.low), half(codes.high, x.high)};
}

// `sum` with the four products of each lane: unsigned codes times the same four signed inputs. Even and odd bytes apart, as words:
// the instruction for bytes would saturate
inline Ints add_products(Ints sum, Bytes codes, const int8_t* inputs) {
  const auto pair = [&](int first) { return _mm256_set1_epi32(uint16_t(inputs[first]) | inputs[first + 2] << 16); };
  const __m256i evens = pair(0), odds = pair(1), low_bytes = _mm256_set1_epi16(0xff);
  const auto half = [&](__m256i sum, __m256i codes) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(codes, low_bytes), evens));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odds));
  };
  return {half(sum.low, codes.low), half(sum.high, codes.high)};
}

// The same where no code is above 127: sums of two products fit into words
inline Ints add_small_products(Ints sum, Bytes codes, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  const __m256i all = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  const auto half = [&](__m256i sum, __m256i codes) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, all), ones));
  };
  return {half(sum.low, codes.low), half(sum.high, codes.high)};
}

// Low and high bytes put side by side: those of the first eight of each sixteen, and of the last eight
inline Pairs join_firsts(Bytes low, Bytes high) {
  return {_mm256_unpacklo_epi8(low.low, high.low), _mm256_unpacklo_epi8(low.high, high.high)};
}
inline Pairs join_lasts(Bytes low, Bytes high) {
  return {_mm256_unpackhi_epi8(low.low, high.low), _mm256_unpackhi_epi8(low.high, high.high)};
}
