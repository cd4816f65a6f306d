// Rows times panels on processors with matrix tiles (Intel AMX: Sapphire Rapids and later).
//
// A tile holds up to 16 rows of x; multiplying it with a tile of weights takes 16 cycles at most, in which memory brings a
// fraction of the next one. So a pass over 16 tokens takes hardly longer than one over a single token: both wait for weights. Each output
// of each row adds up over k = 0, 32, 64, ... in an order of its own: its bits do not depend on the rows beside it.
//
// Up to 32 rows share one reading of the weights; more read a panel again, from the cache.
//
// A coded panel is decoded one step ahead of the tiles, which would wait for what has just been written; for more than 32 rows all
// of it stays decoded.

#pragma once

#include "coded_panels.h"
#include "panel.h"

#if defined(__AVX512BF16__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_TILES 1

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

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

// The inputs after the last whole step, padded with zeros.
struct Tail {
  alignas(64) bf16 x[2 * ROWS][STEP] = {};
  alignas(64) bf16 weights[STEP / 2][2 * PANEL] = {};

  void fill(const bf16* from, int64_t rows, int64_t K) {
    for (int64_t m = 0; m < rows; ++m) std::memcpy(x[m], from + m * K + K / STEP * STEP, K % STEP * sizeof(bf16));
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

// One panel, step by step from the first to the last: as it lies, or decoded.
struct Plain {
  const bf16* panel;
  bool fetch;  // it comes from memory, and so do those that follow

  const bf16* read(int64_t step) const {
    const bf16* const weights = panel + step * STEP * PANEL;
    if (fetch)
      for (int64_t line = 0; line < STEP * PANEL; line += LINE) fetch_near(weights + AHEAD + line);
    return weights;
  }
  void read_tail(int64_t K, Tail& tail) const {
    std::memcpy(tail.weights, panel + K / STEP * STEP * PANEL, K % STEP * PANEL * sizeof(bf16));
    settle(&tail);
  }
};
class Coded {
 public:
  // `room` has so many steps, the last ones; `is_decoded`: it has all of them since other rows were multiplied
  Coded(const coded::Reader& panel, int64_t steps, bf16* room, int64_t kept, bool is_decoded)
      : panel_(panel), steps_(steps), kept_(kept), room_(room), is_decoded_(is_decoded) {
    if (steps_) decode(0);
  }

  const bf16* read(int64_t step) {
    if (step + 1 < steps_) decode(step + 1);
    settle(room_);
    return place(step);
  }
  void read_tail(int64_t K, Tail& tail) {
    if (!is_decoded_) panel_.decode(steps_ * FOURS, K / coded::EACH, place(steps_));
    std::memcpy(tail.weights, place(steps_), K % STEP * PANEL * sizeof(bf16));
    settle(&tail);
  }

 private:
  static constexpr int64_t FOURS = STEP / coded::EACH;

  bf16* place(int64_t step) const { return room_ + step % kept_ * STEP * PANEL; }
  void decode(int64_t step) {
    if (!is_decoded_) panel_.decode(step * FOURS, (step + 1) * FOURS, place(step));
  }

  coded::Reader panel_;
  int64_t steps_, kept_;
  bf16* room_;
  bool is_decoded_;
};

// Up to 32 rows times one panel -> sums (32, 32).
template <bool TWICE, class Panel>
WITH_TILES void multiply(const bf16* x, int64_t K, Panel& panel, Tail& tail, float* sums) {
  _tile_zero(FIRST_LOW);
  _tile_zero(FIRST_HIGH);
  if constexpr (TWICE) {
    _tile_zero(SECOND_LOW);
    _tile_zero(SECOND_HIGH);
  }
  for (int64_t step = 0; step < K / STEP; ++step, x += STEP) multiply_step<TWICE>(x, K * sizeof(bf16), panel.read(step));
  if (K % STEP) {
    panel.read_tail(K, tail);
    multiply_step<TWICE>(tail.x[0], sizeof tail.x[0], tail.weights[0]);
  }
  _tile_stored(FIRST_LOW, sums, PANEL * sizeof(float));
  _tile_stored(FIRST_HIGH, sums + PANEL / 2, PANEL * sizeof(float));
  if constexpr (TWICE) {
    _tile_stored(SECOND_LOW, sums + ROWS * PANEL, PANEL * sizeof(float));
    _tile_stored(SECOND_HIGH, sums + ROWS * PANEL + PANEL / 2, PANEL * sizeof(float));
  }
}

// One thread's share: panels [begin, end), each of which `read(p, m)` gives for the rows from m on.
template <class Read>
WITH_TILES inline void multiply_each(
    const bf16* x, int64_t M, int64_t K, const bf16* bias, bf16* out, int64_t N, int64_t begin, int64_t end, const Read& read) {
  alignas(64) float sums[2 * ROWS * PANEL];
  Tail tail;
  int64_t shaped_for = 0;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL;
    for (int64_t m = 0; m < M; m += 2 * ROWS) {
      const int64_t rows = std::min(2 * ROWS, M - m);
      if (rows != shaped_for) shape_tiles(shaped_for = rows);
      if (K % STEP) tail.fill(x + m * K, rows, K);
      auto panel = read(p, m);
      (rows > ROWS ? multiply<true, decltype(panel)> : multiply<false, decltype(panel)>)(x + m * K, K, panel, tail, sums);
      const Output output{bias ? bias + start : nullptr, out + m * N + start, N, std::min(PANEL, N - start)};
      for (int64_t r = 0; r < rows; ++r)
        output.write(r, load(sums + r * PANEL), load(sums + r * PANEL + PANEL / 2));
    }
  }
  release();
}

inline void multiply_panels(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  multiply_each(x, M, K, bias, out, N, begin, end, [&](int64_t p, int64_t m) { return Plain{panels + p * PANEL * K, m == 0}; });
}

// The same of coded ones.
inline void multiply_coded_panels(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  static thread_local std::vector<bf16> room;
  const int64_t steps = K / STEP, kept = M > 2 * ROWS ? steps + 1 : 2;
  room.resize(kept * STEP * PANEL + LINE);
  bf16* const lines = room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63) / sizeof(bf16);
  multiply_each(x, M, K, bias, out, N, begin, end, [&](int64_t p, int64_t m) {
    return Coded(coded::Reader(panels + p * coded::panel_bytes(K)), steps, lines, kept, m > 0);
  });
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
