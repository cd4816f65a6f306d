// Activations rounded to 8 bits, 32 at a time with a scale of their own: what the linear layers multiply whose weights are integers.
//
// The 32 products of a block then add up exactly, as integers, 64 of them an instruction. Nothing depends on the rows beside a row.

#pragma once

#include <algorithm>
#include <cstdint>

#include "panel.h"

constexpr int64_t BLOCK = 32;                    // inputs whose products add up as integers
constexpr int64_t VECTORS = BLOCK * PANEL / 64;  // of a block's codes, one byte each: [BLOCK / 4][2]
constexpr int64_t AHEAD = 8192;                  // bytes; the hardware's own prefetch stops at pages

// 32 inputs of a row: x = code * scale.
struct Inputs {
  int8_t codes[BLOCK];
  float scale;
  int32_t sums[2];  // of the codes of each half
};

inline Inputs to_bytes(const bf16* x, int64_t count) {
  const Floats low = load_some(first16(count), x), high = load_some(first16(count - 16), x + 16);
  const float largest = largest_of(larger(absolute(low), absolute(high)));
  const Floats steps = floats(largest > 0 ? 127 / largest : 0);
  const Ints first = nearest(low * steps), second = nearest(high * steps);
  Inputs found;
  store_bytes(found.codes, first);
  store_bytes(found.codes + 16, second);
  found.scale = largest / 127;
  found.sums[0] = sum_of(first);
  found.sums[1] = sum_of(second);
  return found;
}

// (M, K) -> (M, blocks), zeros behind K.
inline void all_to_bytes(const bf16* x, int64_t M, int64_t K, int64_t blocks, Inputs* inputs) {
#pragma omp parallel for schedule(static) if (M > 8)
  for (int64_t m = 0; m < M; ++m)
    for (int64_t b = 0; b < blocks; ++b)
      inputs[m * blocks + b] = to_bytes(x + m * K + b * BLOCK, std::clamp<int64_t>(K - b * BLOCK, 0, BLOCK));
}
