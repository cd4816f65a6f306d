// NumPy's Philox generator to the bit: Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), four
// numbers per counter, so any place of a stream is made by itself. Streams: outrider/sampling/rng.py.

#pragma once

#include <cstdint>

namespace philox {

using wide = unsigned __int128;

inline constexpr uint64_t MULTIPLIERS[] = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
inline constexpr uint64_t KEY_STEPS[] = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};

// The four numbers of counter (block, second, third, 0) as doubles in [0, 1); NumPy's first block is 1
inline void uniforms(uint64_t seed, uint64_t stream, uint64_t block, uint64_t second, uint64_t third, double* out) {
  uint64_t a = block, b = second, c = third, d = 0;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, seed += KEY_STEPS[0], stream += KEY_STEPS[1]) {
    const wide first = wide(MULTIPLIERS[0]) * a, second = wide(MULTIPLIERS[1]) * c;
    a = uint64_t(second >> 64) ^ b ^ seed, b = uint64_t(second);
    c = uint64_t(first >> 64) ^ d ^ stream, d = uint64_t(first);
  }
  for (uint64_t number : {a, b, c, d}) *out++ = double(int64_t(number >> 11)) * 0x1p-53;
}

}  // namespace philox

// The coin, or draw, of a stream at `offset` within the step that begins at `start`: tables of 64 starts by 16 offsets
inline double coin(uint64_t seed, uint64_t stream, uint64_t start, uint64_t offset) {
  constexpr uint64_t STARTS = 64, OFFSETS = 16;
  const uint64_t place = start % STARTS * OFFSETS + offset % OFFSETS;
  double four[4];
  philox::uniforms(seed, stream, place / 4 + 1, start / STARTS, offset / OFFSETS, four);
  return four[place % 4];
}
