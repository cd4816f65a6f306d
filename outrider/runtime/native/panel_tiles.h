// Rows times panels on processors with matrix tiles (Intel AMX: Sapphire Rapids and later).
//
// A tile holds up to 16 rows of x; multiplying it with a tile of weights takes 16 cycles at most, in which memory brings a
// fraction of the next one. So a pass over 16 tokens takes hardly longer than one over a single token: both wait for weights. Each output
// of each row adds up over k = 0, 32, 64, ... in an order of its own: its bits do not depend on the rows beside it.
//
// Up to 32 rows share one reading of the weights; more read a panel again, from the cache.

#pragma once

#include "panel.h"

#if defined(__AVX512BF16__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_TILES 1

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))
#define WITH_BYTE_TILES __attribute__((target("amx-tile,amx-int8")))

namespace tiles {

constexpr int64_t ROWS = 16;                // of a tile
constexpr int64_t STEP = 32;                // inputs multiplied at once: the width of a tile
constexpr int64_t AHEAD = 4 * STEP * PANEL;  // fetched this far ahead, 8 KB: the hardware's own prefetch stops at pages

// Numbers of the tiles, which instructions hold as constants: rows, their weights, sums of [rows][outputs].
#define FIRST_X 0
#define SECOND_X 1
#define LOW_W 2
#define HIGH_W 3
#define FIRST_LOW 4
#define FIRST_HIGH 5
#define SECOND_LOW 6
#define SECOND_HIGH 7

// What lies there is written before the tile instructions that follow: some compilers do not know that those read memory.
inline void settle(const void* written) { asm volatile("" : : "r"(written) : "memory"); }

struct alignas(64) Shapes {  // as the processor wants it
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

WITH_TILES __attribute__((noinline)) inline void release() { _tile_release(); }

// Tiles for `rows` (1 to 32) rows of x, their tails included.
WITH_TILES inline void shape_tiles(int64_t rows) {
  const uint8_t first = std::min(rows, ROWS), second = std::max<int64_t>(rows - ROWS, 1);
  Shapes shapes;
  std::fill_n(shapes.bytes_per_row, 8, STEP * sizeof(bf16));
  for (int tile : {FIRST_X, FIRST_LOW, FIRST_HIGH}) shapes.rows[tile] = first;
  for (int tile : {SECOND_X, SECOND_LOW, SECOND_HIGH}) shapes.rows[tile] = second;
  for (int tile : {LOW_W, HIGH_W}) shapes.rows[tile] = STEP / 2;
  settle(&shapes);
  _tile_loadconfig(&shapes);
}

// The inputs behind the last whole step, padded with zeros.
struct Tail {
  alignas(64) bf16 x[2 * ROWS][STEP] = {};
  alignas(64) bf16 weights[STEP / 2][2 * PANEL] = {};

  void fill(const bf16* from, int64_t rows, int64_t K, const bf16* panel) {
    const int64_t begin = K / STEP * STEP, size = (K - begin) * sizeof(bf16);
    for (int64_t m = 0; m < rows; ++m) std::memcpy(x[m], from + m * K + begin, size);
    std::memcpy(weights, panel + begin * PANEL, size * PANEL);
    settle(this);
  }
};

// Adds up STEP inputs of up to ROWS rows, or of twice as many; `stride`: bytes between two rows.
template <bool TWICE>
WITH_TILES inline void multiply_step(const bf16* x, int64_t stride, const bf16* weights) {
  _tile_loadd(FIRST_X, x, stride);
  _tile_loadd(LOW_W, weights, 2 * PANEL * sizeof(bf16));
  _tile_dpbf16ps(FIRST_LOW, FIRST_X, LOW_W);
  _tile_loadd(HIGH_W, weights + PANEL, 2 * PANEL * sizeof(bf16));
  _tile_dpbf16ps(FIRST_HIGH, FIRST_X, HIGH_W);
  if constexpr (TWICE) {
    _tile_loadd(SECOND_X, (const char*)x + ROWS * stride, stride);
    _tile_dpbf16ps(SECOND_LOW, SECOND_X, LOW_W);
    _tile_dpbf16ps(SECOND_HIGH, SECOND_X, HIGH_W);
  }
}

// Up to 32 rows times one panel -> sums (32, 32). `fetch`: its weights, and those behind it, come from memory.
template <bool TWICE>
WITH_TILES void multiply(const bf16* x, int64_t K, const bf16* panel, bool fetch, const Tail& tail, float* sums) {
  _tile_zero(FIRST_LOW);
  _tile_zero(FIRST_HIGH);
  if constexpr (TWICE) {
    _tile_zero(SECOND_LOW);
    _tile_zero(SECOND_HIGH);
  }
  const bf16 *weights = panel, *const all = x + K / STEP * STEP;
  for (; x < all; x += STEP, weights += STEP * PANEL) {
    if (fetch)
      for (int64_t line = 0; line < STEP * PANEL; line += LINE) fetch_near(weights + AHEAD + line);
    multiply_step<TWICE>(x, K * sizeof(bf16), weights);
  }
  if (K % STEP) multiply_step<TWICE>(tail.x[0], sizeof tail.x[0], tail.weights[0]);
  _tile_stored(FIRST_LOW, sums, PANEL * sizeof(float));
  _tile_stored(FIRST_HIGH, sums + PANEL / 2, PANEL * sizeof(float));
  if constexpr (TWICE) {
    _tile_stored(SECOND_LOW, sums + ROWS * PANEL, PANEL * sizeof(float));
    _tile_stored(SECOND_HIGH, sums + ROWS * PANEL + PANEL / 2, PANEL * sizeof(float));
  }
}

// One thread's share: panels [begin, end).
WITH_TILES inline void multiply_panels(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  alignas(64) float sums[2 * ROWS * PANEL];
  Tail tail;
  int64_t shaped_for = 0;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL;
    const bf16* const panel = panels + start * K;
    for (int64_t m = 0; m < M; m += 2 * ROWS) {
      const int64_t rows = std::min(2 * ROWS, M - m);
      if (rows != shaped_for) shape_tiles(shaped_for = rows);
      if (K % STEP) tail.fill(x + m * K, rows, K, panel);
      (rows > ROWS ? multiply<true> : multiply<false>)(x + m * K, K, panel, m == 0, tail, sums);
      const Output output{bias ? bias + start : nullptr, out + m * N + start, N, std::min(PANEL, N - start)};
      for (int64_t r = 0; r < rows; ++r)
        output.write(r, load(sums + r * PANEL), load(sums + r * PANEL + PANEL / 2));
    }
  }
  release();
}

inline bool ask_for_tiles() {
  unsigned a = 0, b = 0, c = 0, features = 0;
  const unsigned bf16_tiles = 1u << 22, tiles = 1u << 24, byte_tiles = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &features) || ~features & (bf16_tiles | tiles | byte_tiles)) return false;
  const long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace tiles

#else

namespace tiles {
inline void release() {}
}  // namespace tiles

#endif

inline bool has_tiles() {
#ifdef HAS_TILES
  static const bool given = tiles::ask_for_tiles();
  return given;
#else
  return false;
#endif
}
