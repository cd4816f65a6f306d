// Scores of a range of keys by matrix tiles (Intel AMX), and weighted sums of its values.
//
// Sixteen keys are a tile as they lie in the cache, pairs of numbers of sixteen queries are another: their product is (keys, queries).
// Weights of sixteen queries for 32 positions are a tile, pairs of positions of sixteen numbers of a value are another.

#pragma once

#include "panel_tiles.h"

namespace score_tiles {

constexpr int64_t STEP = 32;  // numbers of a key multiplied at once

#ifdef HAS_TILES

#define QUERY_TILE 0
#define KEY_TILE 1

WITH_TILES __attribute__((noinline)) inline void shape() {
  tiles::Shapes shapes;
  std::fill_n(shapes.bytes_per_row, 6, 64);
  std::fill_n(shapes.rows, 6, 16);
  tiles::settle(&shapes);
  _tile_loadconfig(&shapes);
}

// scores (64, 16) of 64 keys that are `stride` bytes apart, with sixteen of queries [size / 2][64][2]; `size` a multiple of STEP.
WITH_TILES __attribute__((noinline)) inline void score(
    const bf16* keys, int64_t stride, const bf16* queries, int64_t size, float* scores) {
  const char* const at = reinterpret_cast<const char*>(keys);
  tiles::settle(queries);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t d = 0; d < size; d += STEP) {
    _tile_loadd(QUERY_TILE, queries + d * 64, 256);
    _tile_loadd(KEY_TILE, at + d * 2, stride);
    _tile_dpbf16ps(2, KEY_TILE, QUERY_TILE);
    _tile_loadd(KEY_TILE, at + 16 * stride + d * 2, stride);
    _tile_dpbf16ps(3, KEY_TILE, QUERY_TILE);
    _tile_loadd(KEY_TILE, at + 32 * stride + d * 2, stride);
    _tile_dpbf16ps(4, KEY_TILE, QUERY_TILE);
    _tile_loadd(KEY_TILE, at + 48 * stride + d * 2, stride);
    _tile_dpbf16ps(5, KEY_TILE, QUERY_TILE);
  }
  _tile_stored(2, scores, 64);
  _tile_stored(3, scores + 256, 64);
  _tile_stored(4, scores + 512, 64);
  _tile_stored(5, scores + 768, 64);
  tiles::settle(scores);
}

// sums (16, 64) of sixteen queries' weights (16, 64), `stride` bytes apart, times a panel of values [64 / 2][64][2].
WITH_TILES __attribute__((noinline)) inline void weigh(const bf16* weights, int64_t stride, const bf16* panel, float* sums) {
  tiles::settle(weights);
  tiles::settle(panel);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t j = 0; j < 64; j += STEP, panel += STEP * 64) {
    _tile_loadd(QUERY_TILE, weights + j, stride);
    _tile_loadd(KEY_TILE, panel, 256);
    _tile_dpbf16ps(2, QUERY_TILE, KEY_TILE);
    _tile_loadd(KEY_TILE, panel + 32, 256);
    _tile_dpbf16ps(3, QUERY_TILE, KEY_TILE);
    _tile_loadd(KEY_TILE, panel + 64, 256);
    _tile_dpbf16ps(4, QUERY_TILE, KEY_TILE);
    _tile_loadd(KEY_TILE, panel + 96, 256);
    _tile_dpbf16ps(5, QUERY_TILE, KEY_TILE);
  }
  _tile_stored(2, sums, 256);
  _tile_stored(3, sums + 16, 256);
  _tile_stored(4, sums + 32, 256);
  _tile_stored(5, sums + 48, 256);
  tiles::settle(sums);
}

#else

inline void shape() {}
inline void score(const bf16*, int64_t, const bf16*, int64_t, float*) {}
inline void weigh(const bf16*, int64_t, const bf16*, float*) {}

#endif

}  // namespace score_tiles
