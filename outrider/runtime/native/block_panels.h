// y = x W^T + b where W stays in integers with scales, laid out in panels: the blocks of a GGUF file (`gguf/formats.py`), our own
// 4 and 8 bits (`quantised_linear.py`), mxfp4; and single rows of such a W.
//
//     panels[N / 32][K / group]    group: inputs that share a scale, any multiple of 32; GGUF's 32, or 256 where scales are nested
//         32 scales, 32 zeros where there are some (fp16, ours bf16, mxfp4's exponents alone), then group / 32 times
//             nested alone: steps [32 / STEP][32], shifts [32 / STEP][32] where there are zeros (int8)
//             codes, a line being 64 bytes of [16 outputs][4 inputs]
//                 4 low bits  [4][2] lines: the low halves are inputs 0 to 3, the high ones 4 to 7 of 8
//                 8 bits      [8][2] lines
//                 5th bits    [2] lines: bit k of a byte for the k-th four inputs
//                 5th and 6th [2][2] lines: two bits each, the first half for inputs 0 to 15
//
//     w = scale * (code - MIDDLE) + zero    or    (scale * step) * (code - MIDDLE) - zero * shift
//     mxfp4's codes are those of `LEVELS`, twice its values raised by MIDDLE; its scales are halved
//
// Activations are rounded to 8 bits (`rounded_inputs.h`), a block's products add up as integers, and each block's sum joins one
// fp32 accumulator per output and row: a row's bits depend on nothing but the row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "panel_tiles.h"
#include "rounded_inputs.h"

namespace blocks {

constexpr int64_t ROWS = 64;  // rows that share one reading of a panel

enum Factor { HALF, BRAIN, POWER };  // how scales and zeros lie: fp16, bf16, the exponent of a power of two (e8m0)

template <int BITS_, int MIDDLE_, bool ZERO_ = false, bool NESTED_ = false, int STEP_ = 32, Factor FACTOR_ = HALF>
struct Form {
  static constexpr int BITS = BITS_, MIDDLE = MIDDLE_, STEP = STEP_, SUBS = 32 / STEP_;  // SUBS: steps in a block
  static constexpr bool ZERO = ZERO_, NESTED = NESTED_;
  static constexpr Factor FACTOR = FACTOR_;
  static constexpr bool HAS_LEVELS = FACTOR == POWER;
  static constexpr int64_t FACTORS = (FACTOR == POWER ? 1 : 2) * PANEL * (ZERO ? 2 : 1);  // bytes for a group
  static constexpr int64_t STEPS = NESTED ? PANEL * SUBS * (ZERO ? 2 : 1) : 0;            // and for a block
  static constexpr int64_t CODES = BLOCK * PANEL * BITS / 8;
};

// mxfp4 (e2m1): twice the value of each code, raised by 12
alignas(16) constexpr uint8_t LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Calls `act` with the form of this number: those of `gguf/formats.py` that are integers.
template <class Act>
auto with_form(int64_t number, Act act) {
  switch (number) {
    case 0: return act(Form<4, 8>());
    case 1: return act(Form<4, 0, true>());
    case 2: return act(Form<5, 16>());
    case 3: return act(Form<5, 0, true>());
    case 4: return act(Form<8, 128>());
    case 5: return act(Form<4, 0, true, true>());
    case 6: return act(Form<5, 0, true, true>());
    case 7: return act(Form<6, 32, false, true, 16>());
    case 8: return act(Form<8, 128, false, true>());
    case 9: return act(Form<4, 0, true, true, 16>());
    case 10: return act(Form<4, 8, true, false, 32, BRAIN>());
    case 11: return act(Form<8, 128, false, false, 32, BRAIN>());
    case 12: return act(Form<4, 0, true, true, 32, BRAIN>());
    case 13: return act(Form<8, 128, true, true>());
    case 14: return act(Form<8, 128, true, true, 32, BRAIN>());
    default: return act(Form<4, 12, false, false, 32, POWER>());
  }
}

// Blocks of K inputs, those that fill up the last group included.
inline int64_t num_blocks(int64_t K, int64_t group) { return (K + group - 1) / group * (group / BLOCK); }

inline int64_t panel_bytes(int64_t form, int64_t K, int64_t group) {
  return with_form(form, [&](auto kind) {
    using F = decltype(kind);
    return (K + group - 1) / group * F::FACTORS + num_blocks(K, group) * (F::STEPS + F::CODES);
  });
}

// What the codes of a block are multiplied with, and what is added for each input: [sub][half of the outputs].
template <class F>
struct Factors {
  Floats group_scales[2], group_zeros[2], scales[F::SUBS][2], zeros[F::SUBS][2];

  void read_group(const uint8_t* at) {
    const auto sixteen = [&](int64_t first) {
      const uint16_t* const from = reinterpret_cast<const uint16_t*>(at) + first;
      if constexpr (F::FACTOR == POWER) return load_powers(at + first) * floats(0.5f);
      else if constexpr (F::FACTOR == BRAIN) return load(from);
      else return load_halves(from);
    };
    for (int h = 0; h < 2; ++h) {
      group_scales[h] = sixteen(16 * h);
      if constexpr (F::ZERO) group_zeros[h] = sixteen(PANEL + 16 * h);
      if constexpr (!F::NESTED) {
        scales[0][h] = group_scales[h];
        if constexpr (F::ZERO) zeros[0][h] = group_zeros[h];
      }
    }
  }

  void read_block(const uint8_t* at) {
    if constexpr (F::NESTED) {
      const int8_t* const steps = reinterpret_cast<const int8_t*>(at);
#pragma GCC unroll 2
      for (int s = 0; s < F::SUBS; ++s)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          scales[s][h] = group_scales[h] * load_small(steps + PANEL * s + 16 * h);
          if constexpr (F::ZERO)
            zeros[s][h] = floats(0) - group_zeros[h] * load_small(steps + PANEL * (F::SUBS + s) + 16 * h);
        }
    }
  }
};

template <int BITS, int K>
inline void add_high_bits(const Bytes (&more)[4], Bytes (&codes)[VECTORS]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    if constexpr (BITS == 5) codes[2 * K + h] = with_bits<4 - K>(codes[2 * K + h], more[h], 0x10);
    if constexpr (BITS == 6) codes[2 * K + h] = with_bits<4 - 2 * (K % 4)>(codes[2 * K + h], more[K / 4 * 2 + h], 0x30);
  }
  if constexpr (K < 7) add_high_bits<BITS, K + 1>(more, codes);
}

// A block's codes, a byte each: vector 2 k + h holds inputs 4 k to 4 k + 3 of outputs 16 h to 16 h + 15.
template <class F>
inline void read_codes(const uint8_t* block, Bytes (&codes)[VECTORS]) {
  constexpr int BITS = F::BITS;
  if constexpr (BITS == 8) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < VECTORS; ++line) codes[line] = load_bytes(block + 64 * line);
    return;
  }
#pragma GCC unroll 8
  for (int64_t line = 0; line < VECTORS / 2; ++line) {
    const Bytes bytes = load_bytes(block + 64 * line);
    codes[line / 2 * 4 + line % 2] = low_halves(bytes);
    codes[line / 2 * 4 + line % 2 + 2] = high_halves(bytes);
  }
  if constexpr (F::HAS_LEVELS) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < VECTORS; ++line) codes[line] = looked_up(LEVELS, codes[line]);
  }
  if constexpr (BITS > 4) {
    Bytes more[4];
#pragma GCC unroll 4
    for (int64_t line = 0; line < (BITS - 4) * 2; ++line) more[line] = load_bytes(block + 64 * (VECTORS / 2 + line));
    add_high_bits<BITS, 0>(more, codes);
  }
}

template <int BITS>
inline Ints multiply_four(Ints sum, Bytes codes, const int8_t* inputs) {
  return BITS < 8 ? add_small_products(sum, codes, inputs) : add_products(sum, codes, inputs);
}

// The sum of a row's codes that share a scale.
template <class F>
inline int32_t codes_sum(const Inputs& x, int s) { return F::SUBS == 1 ? x.sums[0] + x.sums[1] : x.sums[s]; }

// Adds to totals a row's products with the codes that share a scale.
template <class F>
inline void add_scaled(const Inputs& x, int s, const Ints (&products)[2], const Factors<F>& factors, Floats (&totals)[2]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    totals[h] = multiply_add(to_floats(products[h]) * floats(x.scale), factors.scales[s][h], totals[h]);
    if constexpr (F::ZERO)
      totals[h] = multiply_add(floats(F::SUBS == 1 ? x.whole : x.scale * codes_sum<F>(x, s)), factors.zeros[s][h], totals[h]);
  }
}

// Adds one row's products with a block to sums (32,).
template <class F>
inline void multiply_row(const Inputs& x, const Bytes (&codes)[VECTORS], const Factors<F>& factors, float* sums) {
  Floats totals[2] = {load(sums), load(sums + 16)};
#pragma GCC unroll 2
  for (int s = 0; s < F::SUBS; ++s) {
    Ints products[2];
    products[0] = products[1] = ints(-F::MIDDLE * codes_sum<F>(x, s));
#pragma GCC unroll 8
    for (int64_t k = s * 8 / F::SUBS; k < (s + 1) * 8 / F::SUBS; ++k) {
      products[0] = multiply_four<F::BITS>(products[0], codes[2 * k], x.codes + 4 * k);
      products[1] = multiply_four<F::BITS>(products[1], codes[2 * k + 1], x.codes + 4 * k);
    }
    add_scaled<F>(x, s, products, factors, totals);
  }
  store(sums, totals[0]);
  store(sums + 16, totals[1]);
}

// Up to ROWS rows (of inputs (rows, blocks)) times one panel -> sums (rows, 32). `fetch`: it comes from memory.
//
// While several rows are multiplied memory would rest, so that each of them fetches its share of the block that comes AHEAD. For one
// row the hardware's prefetch is the best there is, but for processors with tiles, where it stops at pages.
template <class F>
void multiply(
    const Inputs* x, int64_t rows, int64_t blocks, int64_t per_group, const uint8_t* at, bool fetch, float* sums) {
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  Factors<F> factors;
  Bytes codes[VECTORS];
  const int64_t lines = (F::FACTORS + F::STEPS + F::CODES) / 64, each = fetch && (rows > 1 || has_tiles()) ? (lines + rows - 1) / rows : 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (block % per_group == 0) {
      factors.read_group(at);
      at += F::FACTORS;
    }
    factors.read_block(at);
    at += F::STEPS;
    read_codes<F>(at, codes);
    at += F::CODES;
    const uint8_t* next = at + AHEAD;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t line = 0; line < each; ++line, next += 64) fetch_far(next);
      multiply_row<F>(x[m * blocks + block], codes, factors, sums + m * PANEL);
    }
  }
}

inline float half_at(const uint8_t* at, int64_t place) {
  uint16_t half;
  std::memcpy(&half, at + 2 * place, sizeof half);
  return widen_half(half);
}

inline float brain_at(const uint8_t* at, int64_t place) {
  uint16_t high;
  std::memcpy(&high, at + 2 * place, sizeof high);
  const uint32_t bits = uint32_t(high) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

inline float power_at(const uint8_t* at, int64_t place) { return std::ldexp(0.5f, int(at[place]) - 127); }

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  *to = x != x ? bf16(bits >> 16 | 0x40) : bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One output's weights -> out (K,)
template <class F, class Number>
void widen_row(const uint8_t* at, int64_t output, int64_t K, int64_t group, Number* out) {
  const int64_t half = output / 16, lane = output % 16 * 4;
  const auto factor = F::FACTOR == POWER ? power_at : F::FACTOR == BRAIN ? brain_at : half_at;
  for (int64_t start = 0; start < K; start += group) {
    const float scale = factor(at, output), zero = F::ZERO ? factor(at, PANEL + output) : 0;
    at += F::FACTORS;
    for (int64_t first = start; first < std::min(start + group, K); first += BLOCK, at += F::STEPS + F::CODES) {
      const int8_t* const steps = reinterpret_cast<const int8_t*>(at);
      const uint8_t* const codes = at + F::STEPS;
      for (int64_t i = 0; i < std::min(BLOCK, K - first); ++i) {
        const int64_t k = i / 4, place = lane + i % 4, s = i / F::STEP;
        int32_t code;
        if constexpr (F::BITS == 8) {
          code = codes[64 * (2 * k + half) + place];
        } else {
          const int32_t both = codes[64 * (k / 2 * 2 + half) + place];
          code = k % 2 ? both >> 4 : both & 15;
        }
        const uint8_t* const more = codes + BLOCK * PANEL / 2;
        if constexpr (F::BITS == 5) code |= (more[64 * half + place] >> k & 1) << 4;
        if constexpr (F::BITS == 6) code |= (more[64 * (k / 4 * 2 + half) + place] >> 2 * (k % 4) & 3) << 4;
        if constexpr (F::HAS_LEVELS) code = LEVELS[code];
        float value;
        if constexpr (F::NESTED) {
          value = settled(settled(scale * steps[PANEL * s + output]) * float(code - F::MIDDLE));
          if constexpr (F::ZERO) value = value - settled(zero * steps[PANEL * (F::SUBS + s) + output]);
        } else {
          value = settled(scale * float(code - F::MIDDLE));
          if constexpr (F::ZERO) value = value + zero;
        }
        put(out++, value);
      }
    }
  }
}

// One row of W -> out (K,)
template <class Number>
void read_row(const uint8_t* panels, int64_t form, int64_t K, int64_t group, int64_t row, Number* out) {
  with_form(form, [&](auto kind) {
    widen_row<decltype(kind)>(panels + row / PANEL * panel_bytes(form, K, group), row % PANEL, K, group, out);
  });
}

}  // namespace blocks
