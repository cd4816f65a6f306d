// How rounded rows lie in memory for the kernels of blocks: one after the other for vectors (`rounded_inputs.h`), or sixteen side by
// side, block by block, for matrix tiles (`block_tiles.h`).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panel_tiles.h"
#include "rounded_inputs.h"

struct alignas(64) Line { char bytes[64]; };

// A block of sixteen rows.
struct alignas(64) TileInputs {
  int8_t codes[16][BLOCK];
  float scales[16];
  float wholes[16];    // scale times the sum of all codes
  float parts[2][16];  // scale times the sum of the codes of each half
};

constexpr int64_t FEWEST_TILED = 13;  // rows; fewer are multiplied as fast by vectors, or faster

inline bool are_tiled(int64_t rows) { return rows >= FEWEST_TILED && has_tiles(); }

// Lines that hold so many rows.
inline int64_t rounded_lines(int64_t rows, int64_t blocks) {
  if (are_tiled(rows)) return (rows + 15) / 16 * blocks * int64_t(sizeof(TileInputs) / sizeof(Line));
  return (rows * blocks * sizeof(Inputs) + sizeof(Line) - 1) / sizeof(Line);
}

// Row m of so many, (K,) -> (blocks,), zeros after K.
template <class Number>
inline void round_row(const Number* x, int64_t m, int64_t rows, int64_t K, int64_t blocks, Line* to) {
  const bool is_tiled = are_tiled(rows);
  for (int64_t b = 0; b < blocks; ++b) {
    const Inputs found = to_bytes(x + b * BLOCK, std::clamp<int64_t>(K - b * BLOCK, 0, BLOCK));
    if (!is_tiled) {
      reinterpret_cast<Inputs*>(to)[m * blocks + b] = found;
      continue;
    }
    TileInputs& tile = reinterpret_cast<TileInputs*>(to)[m / 16 * blocks + b];
    std::memcpy(tile.codes[m % 16], found.codes, BLOCK);
    tile.scales[m % 16] = found.scale;
    tile.wholes[m % 16] = found.whole;
    for (int s = 0; s < 2; ++s) tile.parts[s][m % 16] = found.scale * found.sums[s];
  }
}
