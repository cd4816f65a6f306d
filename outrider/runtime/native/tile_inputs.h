// How rounded rows lie in memory for the kernels of blocks: one behind the other for vectors (`rounded_inputs.h`), and as they are
// loaded into matrix tiles (`block_tiles.h`) where the processor has some.
//
//     BY_ROW      rows[blocks] of Inputs
//     SIXTEENS    rows / 16, [blocks] of TileInputs: sixteen rows
//     PAIRS       [blocks / 2] of TileInputs: eight rows of the first block, then the same rows of the second one. Their codes lie at
//                 places of their own, zeros at those of the other block: a product of tiles is those of both blocks, each by itself

#pragma once

#include <cstdint>
#include <cstring>

#include "panel_tiles.h"
#include "rounded_inputs.h"

struct alignas(64) Line { char bytes[64]; };

enum Arrangement { BY_ROW, PAIRS, SIXTEENS };

constexpr int64_t FEWEST_TILED = 16;  // rows; fewer are multiplied as fast by vectors

inline Arrangement arrangement(int64_t rows) {
  if (!has_tiles() || rows < FEWEST_TILED) return BY_ROW;
  return rows > 8 ? SIXTEENS : PAIRS;
}

// Sixteen rows of a block, or eight of two.
template <bool PAIRED>
struct alignas(64) TileInputs {
  int8_t codes[16][PAIRED ? 64 : 32];
  float scales[16];
  float wholes[16];    // scale times the sum of all codes
  float parts[2][16];  // scale times the sum of the codes of each half
};

// Lines that hold so many rows.
inline int64_t rounded_lines(int64_t rows, int64_t blocks) {
  switch (arrangement(rows)) {
    case PAIRS: return (blocks + 1) / 2 * sizeof(TileInputs<true>) / sizeof(Line);
    case SIXTEENS: return (rows + 15) / 16 * blocks * sizeof(TileInputs<false>) / sizeof(Line);
    default: return (rows * blocks * sizeof(Inputs) + sizeof(Line) - 1) / sizeof(Line);
  }
}

// Puts a block of row m, of so many rows, where it belongs.
inline void place(const Inputs& x, int64_t m, int64_t block, int64_t blocks, Arrangement as, Line* to) {
  if (as == BY_ROW) {
    reinterpret_cast<Inputs*>(to)[m * blocks + block] = x;
    return;
  }
  const auto put_factors = [&](auto& tile, int64_t row) {
    tile.scales[row] = x.scale;
    tile.wholes[row] = x.whole;
    for (int s = 0; s < 2; ++s) tile.parts[s][row] = x.scale * x.sums[s];
  };
  if (as == SIXTEENS) {
    auto& tile = reinterpret_cast<TileInputs<false>*>(to)[m / 16 * blocks + block];
    std::memcpy(tile.codes[m % 16], x.codes, BLOCK);
    put_factors(tile, m % 16);
  } else {
    auto& tile = reinterpret_cast<TileInputs<true>*>(to)[block / 2];
    const int64_t row = 8 * (block % 2) + m;
    for (int64_t k = 0; k < BLOCK / 4; ++k) {
      std::memset(tile.codes[row] + 8 * k, 0, 8);
      std::memcpy(tile.codes[row] + 8 * k + 4 * (block % 2), x.codes + 4 * k, 4);
    }
    put_factors(tile, row);
  }
}

// Row m of so many, (K,) -> (blocks,), zeros behind K.
template <class Number>
inline void round_row(const Number* x, int64_t m, int64_t rows, int64_t K, int64_t blocks, Line* to) {
  const Arrangement as = arrangement(rows);
  for (int64_t b = 0; b < blocks; ++b)
    place(to_bytes(x + b * BLOCK, std::clamp<int64_t>(K - b * BLOCK, 0, BLOCK)), m, b, blocks, as, to);
}
