// The words of `lanes.h` for ARM's NEON with byte products (Armv8.2 and dotprod): four registers each. Sums run in the order of
// `lanes_avx2.h`, so that both give the same bits.

#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <limits>

inline constexpr bool IS_WIDE = false;  // 32 registers of 16 bytes

struct Floats { float32x4_t a, b, c, d; };
struct Doubles { float64x2_t a, b, c, d; };
struct Ints { int32x4_t a, b, c, d; };
struct Pairs { uint32x4_t a, b, c, d; };
struct Bytes { uint8x16_t a, b, c, d; };

// A word of sixteen numbers from a function of four
template <class To, class From, class Function>
inline To by_parts(From x, const Function& part) {
  return {part(x.a), part(x.b), part(x.c), part(x.d)};
}
template <class To, class From, class Other, class Function>
inline To by_parts(From x, Other y, const Function& part) {
  return {part(x.a, y.a), part(x.b, y.b), part(x.c, y.c), part(x.d, y.d)};
}

// All bits of the lanes of a mask, and the mask of such lanes
inline uint32x4_t lanes4(unsigned mask) { return vtstq_u32(vdupq_n_u32(mask), uint32x4_t{1, 2, 4, 8}); }
inline uint64x2_t lanes2(unsigned mask) { return vtstq_u64(vdupq_n_u64(mask), uint64x2_t{1, 2}); }
inline unsigned mask4(uint32x4_t lanes) { return vaddvq_u32(vandq_u32(lanes, uint32x4_t{1, 2, 4, 8})); }
inline unsigned mask2(uint64x2_t lanes) { return unsigned(vaddvq_u64(vandq_u64(lanes, uint64x2_t{1, 2}))); }
inline Mask mask_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  return Mask(mask4(a) | mask4(b) << 4 | mask4(c) << 8 | mask4(d) << 12);
}

// ---------------------------------------------------------------- the processor, and single numbers

inline void relax() { asm volatile("yield"); }
inline void fetch_near(const void* at) { asm volatile("prfm pldl1keep, [%0]" : : "r"(at)); }
inline void fetch_far(const void* at) { asm volatile("prfm pldl2keep, [%0]" : : "r"(at)); }

// The value itself: keeps a compiler from joining a product and the sum it goes into
inline float settled(float x) {
  asm("" : "+w"(x));
  return x;
}
inline float widen_half(uint16_t half) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0); }

// ---------------------------------------------------------------- Floats

inline Floats operator+(Floats x, Floats y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline Floats operator-(Floats x, Floats y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline Floats operator*(Floats x, Floats y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline Floats operator/(Floats x, Floats y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }

inline Floats floats(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Floats load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4), vld1q_f32(at + 8), vld1q_f32(at + 12)}; }
inline void store(float* at, Floats x) {
  vst1q_f32(at, x.a);
  vst1q_f32(at + 4, x.b);
  vst1q_f32(at + 8, x.c);
  vst1q_f32(at + 12, x.d);
}
inline Floats load_some(Mask some, const float* at) {
  if (some == 0xffff) return load(at);
  float padded[16] = {};
  std::memcpy(padded, at, sizeof(float) * __builtin_popcount(some));
  return load(padded);
}
inline void store_some(Mask some, float* at, Floats x) {
  if (some == 0xffff) return store(at, x);
  float all[16];
  store(all, x);
  std::memcpy(at, all, sizeof(float) * __builtin_popcount(some));
}

inline Floats multiply_add(Floats x, Floats y, Floats z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline Floats subtract_product(Floats x, Floats y, Floats z) {  // z - x y
  return {vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b), vfmsq_f32(z.c, x.c, y.c), vfmsq_f32(z.d, x.d, y.d)};
}
// The second of two where one is no number, as on other processors
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline Floats larger(Floats x, Floats y) { return {larger(x.a, y.a), larger(x.b, y.b), larger(x.c, y.c), larger(x.d, y.d)}; }
inline Floats smaller(Floats x, Floats y) { return {smaller(x.a, y.a), smaller(x.b, y.b), smaller(x.c, y.c), smaller(x.d, y.d)}; }
inline Floats absolute(Floats x) { return by_parts<Floats>(x, [](float32x4_t x) { return vabsq_f32(x); }); }
inline Floats rounded(Floats x) { return by_parts<Floats>(x, [](float32x4_t x) { return vrndnq_f32(x); }); }
inline Floats root(Floats x) { return by_parts<Floats>(x, [](float32x4_t x) { return vsqrtq_f32(x); }); }
inline float sum_of(Floats x) {
  const float32x4_t four = (x.a + x.c) + (x.b + x.d);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest_of(Floats x) {
  const float32x4_t four = larger(larger(x.a, x.c), larger(x.b, x.d)), two = larger(four, vextq_f32(four, four, 2));
  return two[0] > two[1] ? two[0] : two[1];
}

inline Mask is_greater(Floats x, Floats y) {
  return mask_of(vcgtq_f32(x.a, y.a), vcgtq_f32(x.b, y.b), vcgtq_f32(x.c, y.c), vcgtq_f32(x.d, y.d));
}
inline Mask is_at_least(Floats x, Floats y) {
  return mask_of(vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b), vcgeq_f32(x.c, y.c), vcgeq_f32(x.d, y.d));
}
inline Mask is_equal(Floats x, Floats y) {
  return mask_of(vceqq_f32(x.a, y.a), vceqq_f32(x.b, y.b), vceqq_f32(x.c, y.c), vceqq_f32(x.d, y.d));
}
inline Mask is_no_number(Floats x) { return Mask(~is_equal(x, x)); }
inline Floats choose(Mask first, Floats x, Floats y) {
  return {vbslq_f32(lanes4(first), x.a, y.a), vbslq_f32(lanes4(first >> 4), x.b, y.b), vbslq_f32(lanes4(first >> 8), x.c, y.c),
          vbslq_f32(lanes4(first >> 12), x.d, y.d)};
}
inline Floats keep(Mask some, Floats x) { return choose(some, x, floats(0)); }
inline Floats load_some(Mask some, const float* at, Floats others) {
  return some == 0xffff ? load(at) : choose(some, load_some(some, at), others);
}

// n whole, the result normal
inline Floats times_power_of_two(Floats x, Floats n) {
  return by_parts<Floats>(x, n, [](float32x4_t x, float32x4_t n) {
    return x * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
  });
}

// x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Floats x, Floats& mantissa, Floats& power) {
  const auto quarter = [](float32x4_t x, float32x4_t& mantissa, float32x4_t& power) {
    const uint32x4_t is_tiny = vcltq_f32(x, vdupq_n_f32(std::numeric_limits<float>::min()));
    const uint32x4_t bits = vreinterpretq_u32_f32(vbslq_f32(is_tiny, x * vdupq_n_f32(0x1p24f), x));
    // a mantissa of [1.5, 2) is one of [0.75, 1) of the next power
    const uint32x4_t next = vandq_u32(vshrq_n_u32(bits, 22), vdupq_n_u32(1)), exponent = vsubq_u32(vdupq_n_u32(127), next);
    const uint32x4_t digits = vandq_u32(bits, vdupq_n_u32(0x7fffff));
    mantissa = vreinterpretq_f32_u32(vorrq_u32(digits, vshlq_n_u32(exponent, 23)));
    power = vcvtq_f32_s32(vreinterpretq_s32_u32(vsubq_u32(vshrq_n_u32(bits, 23), exponent)));
    power = power - vbslq_f32(is_tiny, vdupq_n_f32(24), vdupq_n_f32(0));
  };
  quarter(x.a, mantissa.a, power.a);
  quarter(x.b, mantissa.b, power.b);
  quarter(x.c, mantissa.c, power.c);
  quarter(x.d, mantissa.d, power.d);
}

// ---------------------------------------------------------------- Doubles

inline Doubles operator+(Doubles x, Doubles y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline Doubles operator-(Doubles x, Doubles y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline Doubles operator*(Doubles x, Doubles y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline Doubles operator/(Doubles x, Doubles y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }

inline Doubles doubles(double x) { return {vdupq_n_f64(x), vdupq_n_f64(x), vdupq_n_f64(x), vdupq_n_f64(x)}; }
inline Doubles load(const double* at) { return {vld1q_f64(at), vld1q_f64(at + 2), vld1q_f64(at + 4), vld1q_f64(at + 6)}; }
inline void store(double* at, Doubles x) {
  vst1q_f64(at, x.a);
  vst1q_f64(at + 2, x.b);
  vst1q_f64(at + 4, x.c);
  vst1q_f64(at + 6, x.d);
}
inline Doubles load_some(HalfMask some, const double* at) {
  double padded[8] = {};
  std::memcpy(padded, at, sizeof(double) * __builtin_popcount(some));
  return load(padded);
}
inline void store_some(HalfMask some, double* at, Doubles x) {
  double all[8];
  store(all, x);
  std::memcpy(at, all, sizeof(double) * __builtin_popcount(some));
}
inline Doubles widened(float32x4_t x, float32x4_t y) {
  return {vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x), vcvt_f64_f32(vget_low_f32(y)), vcvt_high_f64_f32(y)};
}
inline Doubles low_doubles(Floats x) { return widened(x.a, x.b); }
inline Doubles high_doubles(Floats x) { return widened(x.c, x.d); }

inline Doubles multiply_add(Doubles x, Doubles y, Doubles z) {
  return {vfmaq_f64(z.a, x.a, y.a), vfmaq_f64(z.b, x.b, y.b), vfmaq_f64(z.c, x.c, y.c), vfmaq_f64(z.d, x.d, y.d)};
}
inline Doubles larger(Doubles x, Doubles y) {
  return by_parts<Doubles>(x, y, [](float64x2_t x, float64x2_t y) { return vbslq_f64(vcgtq_f64(x, y), x, y); });
}
inline double sum_of(Doubles x) {
  const float64x2_t two = (x.a + x.c) + (x.b + x.d);
  return two[0] + two[1];
}
inline HalfMask is_greater(Doubles x, Doubles y) {
  return HalfMask(mask2(vcgtq_f64(x.a, y.a)) | mask2(vcgtq_f64(x.b, y.b)) << 2 | mask2(vcgtq_f64(x.c, y.c)) << 4 |
                  mask2(vcgtq_f64(x.d, y.d)) << 6);
}
inline Doubles choose(HalfMask first, Doubles x, Doubles y) {
  return {vbslq_f64(lanes2(first), x.a, y.a), vbslq_f64(lanes2(first >> 2), x.b, y.b), vbslq_f64(lanes2(first >> 4), x.c, y.c),
          vbslq_f64(lanes2(first >> 6), x.d, y.d)};
}

// Normal x > 0 as mantissa * 2^power, the mantissa in [0.75, 1.5)
inline void split(Doubles x, Doubles& mantissa, Doubles& power) {
  const auto quarter = [](float64x2_t x, float64x2_t& mantissa, float64x2_t& power) {
    const uint64x2_t bits = vreinterpretq_u64_f64(x), next = vandq_u64(vshrq_n_u64(bits, 51), vdupq_n_u64(1));  // of [1.5, 2)
    const uint64x2_t exponent = vsubq_u64(vdupq_n_u64(1023), next), digits = vandq_u64(bits, vdupq_n_u64(0xfffffffffffff));
    mantissa = vreinterpretq_f64_u64(vorrq_u64(digits, vshlq_n_u64(exponent, 52)));
    power = vcvtq_f64_s64(vreinterpretq_s64_u64(vsubq_u64(vshrq_n_u64(bits, 52), exponent)));
  };
  quarter(x.a, mantissa.a, power.a);
  quarter(x.b, mantissa.b, power.b);
  quarter(x.c, mantissa.c, power.c);
  quarter(x.d, mantissa.d, power.d);
}

// ---------------------------------------------------------------- Ints

inline Ints ints(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints counting() { return {int32x4_t{0, 1, 2, 3}, int32x4_t{4, 5, 6, 7}, int32x4_t{8, 9, 10, 11}, int32x4_t{12, 13, 14, 15}}; }
inline Ints operator+(Ints x, Ints y) {
  return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
}
inline Mask is_at_most(Ints x, Ints y) {
  return mask_of(vcleq_s32(x.a, y.a), vcleq_s32(x.b, y.b), vcleq_s32(x.c, y.c), vcleq_s32(x.d, y.d));
}
inline void store(int32_t* at, Ints x) {
  vst1q_s32(at, x.a);
  vst1q_s32(at + 4, x.b);
  vst1q_s32(at + 8, x.c);
  vst1q_s32(at + 12, x.d);
}
inline int32_t sum_of(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }
inline Ints truncated(Floats x) { return by_parts<Ints>(x, [](float32x4_t x) { return vcvtq_s32_f32(x); }); }
inline Ints nearest(Floats x) { return by_parts<Ints>(x, [](float32x4_t x) { return vcvtnq_s32_f32(x); }); }
inline Floats to_floats(Ints x) { return by_parts<Floats>(x, [](int32x4_t x) { return vcvtq_f32_s32(x); }); }
inline void store_bytes(int8_t* at, Ints x) {  // each of them fits
  const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
  vst1q_s8(at, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

// ---------------------------------------------------------------- bf16

inline Floats load(const bf16* at) {
  const uint16x8_t low = vld1q_u16(at), high = vld1q_u16(at + 8);
  const auto four = [](uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); };
  return {four(vget_low_u16(low)), four(vget_high_u16(low)), four(vget_low_u16(high)), four(vget_high_u16(high))};
}
inline Floats load_some(Mask some, const bf16* at) {
  if (some == 0xffff) return load(at);
  bf16 padded[16] = {};
  std::memcpy(padded, at, sizeof(bf16) * __builtin_popcount(some));
  return load(padded);
}

// To the nearest bf16, ties to even; what is no number stays none
inline uint16x4_t to_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, quiet), 16);
}
inline void store_some(Mask some, bf16* at, Floats x) {
  bf16 all[16];
  bf16* const to = some == 0xffff ? at : all;
  vst1q_u16(to, vcombine_u16(to_bf16(x.a), to_bf16(x.b)));
  vst1q_u16(to + 8, vcombine_u16(to_bf16(x.c), to_bf16(x.d)));
  if (to == all) std::memcpy(at, all, sizeof(bf16) * __builtin_popcount(some));
}

inline Pairs load_pairs(const bf16* at) {
  const auto four = [&](int place) { return vreinterpretq_u32_u16(vld1q_u16(at + 8 * place)); };
  return {four(0), four(1), four(2), four(3)};
}
inline void store_pairs(bf16* at, Pairs x) {
  vst1q_u16(at, vreinterpretq_u16_u32(x.a));
  vst1q_u16(at + 8, vreinterpretq_u16_u32(x.b));
  vst1q_u16(at + 16, vreinterpretq_u16_u32(x.c));
  vst1q_u16(at + 24, vreinterpretq_u16_u32(x.d));
}

// The first `count` numbers, zeros after them
inline Pairs load_pairs(const bf16* at, int64_t count) {
  if (count >= 32) return load_pairs(at);
  bf16 padded[32] = {};
  std::memcpy(padded, at, sizeof(bf16) * count);
  return load_pairs(padded);
}

// One pair for all lanes
inline Pairs same_pair(const bf16* at) {
  uint32_t both;
  std::memcpy(&both, at, sizeof both);
  return {vdupq_n_u32(both), vdupq_n_u32(both), vdupq_n_u32(both), vdupq_n_u32(both)};
}

// `sum` with the two products of each lane
inline float32x4_t add_products(float32x4_t sum, uint32x4_t x, uint32x4_t y) {
  const auto even = [](uint32x4_t pairs) { return vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)); };
  const auto odd = [](uint32x4_t pairs) { return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000))); };
  return vfmaq_f32(vfmaq_f32(sum, even(x), even(y)), odd(x), odd(y));
}
inline Floats add_products(Floats sum, Pairs x, Pairs y) {
  return {add_products(sum.a, x.a, y.a), add_products(sum.b, x.b, y.b), add_products(sum.c, x.c, y.c), add_products(sum.d, x.d, y.d)};
}

// ---------------------------------------------------------------- fp16, int8

inline Floats load_halves(const uint16_t* at) {
  const auto four = [&](int place) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * place))); };
  return {four(0), four(1), four(2), four(3)};
}
inline Floats load_small(const int8_t* at) {
  const int8x16_t all = vld1q_s8(at);
  const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
  const auto four = [](int16x4_t x) { return vcvtq_f32_s32(vmovl_s16(x)); };
  return {four(vget_low_s16(low)), four(vget_high_s16(low)), four(vget_low_s16(high)), four(vget_high_s16(high))};
}

// 2^(e - 127) of sixteen bytes e
inline Floats load_powers(const uint8_t* at) {
  const uint8x16_t all = vld1q_u8(at);
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
  const auto four = [](uint16x4_t x) {  // 2^-127 has no exponent of its own
    return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(x), 23), vdupq_n_u32(1 << 22)));
  };
  return {four(vget_low_u16(low)), four(vget_high_u16(low)), four(vget_low_u16(high)), four(vget_high_u16(high))};
}

// ---------------------------------------------------------------- fp8

// Numbers e4m3 in the high half of each word, as bf16: exact. Those below 2^-6 are looked up, two bytes each.
inline uint32x4_t widen_small(uint16x8_t words) {
  const uint8x16_t table = {0, 0, 0, 0x3b, 0x80, 0x3b, 0xc0, 0x3b, 0, 0x3c, 0x20, 0x3c, 0x40, 0x3c, 0x60, 0x3c};
  const uint16x8_t size = vandq_u16(words, vdupq_n_u16(0x7f00));
  const uint16x8_t places = vmlaq_n_u16(vdupq_n_u16(0x0100), vshrq_n_u16(size, 8), 0x0202);
  const uint16x8_t low = vreinterpretq_u16_u8(vqtbl1q_u8(table, vreinterpretq_u8_u16(places)));
  const uint16x8_t high = vaddq_u16(vshrq_n_u16(size, 4), vdupq_n_u16(0x3c00));
  const uint16x8_t found = vbslq_u16(vcltq_u16(size, vdupq_n_u16(0x0800)), low, high);
  return vreinterpretq_u32_u16(vorrq_u16(found, vandq_u16(words, vdupq_n_u16(0x8000))));
}
// The same where none is below 2^-6
inline uint32x4_t widen_normal(uint16x8_t words) {
  const int16x8_t moved = vandq_s16(vshrq_n_s16(vreinterpretq_s16_u16(words), 4), vdupq_n_s16(short(0x87f0)));
  return vreinterpretq_u32_s16(vaddq_s16(moved, vdupq_n_s16(0x3c00)));
}
inline bool has_small(Bytes codes) {
  const auto least = [](uint8x16_t codes) { return vandq_u8(codes, vdupq_n_u8(0x78)); };
  return vminvq_u8(vminq_u8(vminq_u8(least(codes.a), least(codes.b)), vminq_u8(least(codes.c), least(codes.d)))) == 0;
}
// Bytes 0 and 2 of each four, and 1 and 3
inline Pairs widen_evens(Bytes codes, bool is_normal) {
  return by_parts<Pairs>(codes, [=](uint8x16_t codes) {
    const uint16x8_t words = vshlq_n_u16(vreinterpretq_u16_u8(codes), 8);
    return is_normal ? widen_normal(words) : widen_small(words);
  });
}
inline Pairs widen_odds(Bytes codes, bool is_normal) {
  return by_parts<Pairs>(codes, [=](uint8x16_t codes) {
    return is_normal ? widen_normal(vreinterpretq_u16_u8(codes)) : widen_small(vreinterpretq_u16_u8(codes));
  });
}

// ---------------------------------------------------------------- Bytes

inline Bytes load_bytes(const uint8_t* at) { return {vld1q_u8(at), vld1q_u8(at + 16), vld1q_u8(at + 32), vld1q_u8(at + 48)}; }
inline Bytes low_halves(Bytes x) { return by_parts<Bytes>(x, [](uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }); }
inline Bytes high_halves(Bytes x) { return by_parts<Bytes>(x, [](uint8x16_t x) { return vshrq_n_u8(x, 4); }); }

inline Bytes looked_up(const uint8_t* sixteen, Bytes codes) {
  const uint8x16_t table = vld1q_u8(sixteen);
  return by_parts<Bytes>(codes, [=](uint8x16_t codes) { return vqtbl1q_u8(table, codes); });
}

// `codes` and above them, at bits 4 and higher, those bits of each byte of x that `mask` has once it is moved: up where `LEFT` > 0
template <int LEFT>
inline Bytes with_bits(Bytes codes, Bytes x, int mask) {
  return by_parts<Bytes>(codes, x, [=](uint8x16_t codes, uint8x16_t x) {
    return vorrq_u8(codes, vandq_u8(vshlq_u8(x, vdupq_n_s8(LEFT)), vdupq_n_u8(uint8_t(mask))));
  });
}

// `sum` with the four products of each lane, codes up to 127 times the same four signed inputs
inline Ints add_small_products(Ints sum, Bytes codes, const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof four);
  const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return by_parts<Ints>(sum, codes, [=](int32x4_t sum, uint8x16_t codes) { return vdotq_s32(sum, vreinterpretq_s8_u8(codes), all); });
}

// The same with codes up to 255: less 128 they are signed
inline Ints add_products(Ints sum, Bytes codes, const int8_t* inputs) {
  const Ints more = ints(128 * (inputs[0] + inputs[1] + inputs[2] + inputs[3]));
  const Bytes less = by_parts<Bytes>(codes, [](uint8x16_t codes) { return veorq_u8(codes, vdupq_n_u8(128)); });
  return add_small_products(sum + more, less, inputs);
}

// Low and high bytes put side by side: those of the first eight of each sixteen, and of the last eight
inline Pairs join_firsts(Bytes low, Bytes high) {
  return by_parts<Pairs>(low, high, [](uint8x16_t low, uint8x16_t high) { return vreinterpretq_u32_u8(vzip1q_u8(low, high)); });
}
inline Pairs join_lasts(Bytes low, Bytes high) {
  return by_parts<Pairs>(low, high, [](uint8x16_t low, uint8x16_t high) { return vreinterpretq_u32_u8(vzip2q_u8(low, high)); });
}
