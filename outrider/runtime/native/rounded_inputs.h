// Activations rounded to 8 bits, 32 at a time with a scale of their own: what the linear layers multiply whose weights are integers.
//
// The 32 products of a block then add up exactly, as integers, 64 of them an instruction. Nothing depends on the rows beside a row.

#pragma once

#include <algorithm>
#include <cstdint>

#include "panel.h"

constexpr int64_t BLOCK = 32;                    // inputs whose products add up as integers
constexpr int64_t VECTORS = BLOCK * PANEL / 64;  // of a block's codes, one byte each: [BLOCK / 4][2]
constexpr int64_t AHEAD = 8192;                  // bytes

// 32 inputs of a row: x = code * scale.
struct Inputs {
  int8_t codes[BLOCK];
  float scale;
  float whole;      // scale times the sum of all codes
  int32_t sums[2];  // of the codes of each half
};

template <class Number>
inline Inputs to_bytes(const Number* x, int64_t count) {
  const Mask some_low = first16(count), some_high = first16(count - 16);
  const Floats low = load_some(some_low, x), high = some_high ? load_some(some_high, x + 16) : floats(0);
  const float largest = largest_of(larger(absolute(low), absolute(high)));
  const Floats steps = floats(largest > 0 ? 127 / largest : 0);
  const Ints first = nearest(low * steps), second = nearest(high * steps);
  Inputs found;
  store_bytes(found.codes, first);
  store_bytes(found.codes + 16, second);
  found.scale = largest / 127;
  found.sums[0] = sum_of(first);
  found.sums[1] = sum_of(second);
  found.whole = found.scale * (found.sums[0] + found.sums[1]);
  return found;
}
