// Sixteen rows at a time times panels of blocks, on processors with matrix tiles for bytes (Intel AMX).
//
// A block's codes are two tiles, the activations of sixteen rows are a third. Their products add up exactly, as integers, so that each
// row's bits are those that vectors find (`block_panels.h`).
//
// Storing a tile of products takes as long for one row as for sixteen: fewer rows, and blocks of two scales, are left to vectors.

#pragma once

#include "block_panels.h"

namespace blocks {

#ifdef HAS_TILES

constexpr int64_t TILED_ROWS = 2 * tiles::ROWS;  // share one reading of a panel
constexpr int64_t TOGETHER = 4;                  // blocks whose products are added up at once

#define INPUTS 0
#define LOW_CODES 1
#define HIGH_CODES 2
#define LOW_PRODUCTS 3
#define HIGH_PRODUCTS 4

WITH_BYTE_TILES inline void shape_tiles() {
  tiles::Shapes shapes;
  std::fill_n(shapes.bytes_per_row, 5, 64);
  std::fill_n(shapes.rows, 5, tiles::ROWS);
  shapes.bytes_per_row[INPUTS] = BLOCK;
  shapes.rows[LOW_CODES] = shapes.rows[HIGH_CODES] = BLOCK / 4;
  tiles::settle(&shapes);
  _tile_loadconfig(&shapes);
}

// Some blocks of a panel: their factors, their codes where they lie as bytes, and their products with rows.
template <class F>
struct Tiled {
  Factors<F> factors[TOGETHER];
  const uint8_t* codes[TOGETHER];
  alignas(64) uint8_t unpacked[F::BITS < 8 ? TOGETHER : 1][VECTORS * 64];
  alignas(64) int32_t products[TOGETHER][TILED_ROWS * PANEL];

  // The i-th is now the block at `at`, `current` the factors of its group.
  void read(int64_t i, const uint8_t* at, const Factors<F>& current) {
    factors[i] = current;
    factors[i].read_block(at);
    codes[i] = at + F::STEPS;
    if constexpr (F::BITS < 8) {
      Bytes vectors[VECTORS];
      read_codes<F>(codes[i], vectors);
#pragma GCC unroll 16
      for (int64_t line = 0; line < VECTORS; ++line) store(unpacked[i] + 64 * line, vectors[line]);
      codes[i] = unpacked[i];
    }
    tiles::settle(codes[i]);
  }

  // Multiplies rows with the i-th block; `x`: inputs of the block, `stride` bytes between two rows.
  WITH_BYTE_TILES void multiply(int64_t i, const Inputs* x, int64_t rows, int64_t stride) {
    const int8_t* from = x->codes;
    _tile_loadd(LOW_CODES, codes[i], 128);
    _tile_loadd(HIGH_CODES, codes[i] + 64, 128);
    for (int64_t m = 0; m < rows; m += tiles::ROWS, from += tiles::ROWS * stride) {
      int32_t* const to = products[i] + m * PANEL;
      _tile_loadd(INPUTS, from, stride);
      _tile_zero(LOW_PRODUCTS);
      _tile_dpbsud(LOW_PRODUCTS, INPUTS, LOW_CODES);
      _tile_zero(HIGH_PRODUCTS);
      _tile_dpbsud(HIGH_PRODUCTS, INPUTS, HIGH_CODES);
      _tile_stored(LOW_PRODUCTS, to, PANEL * sizeof(int32_t));
      _tile_stored(HIGH_PRODUCTS, to + PANEL / 2, PANEL * sizeof(int32_t));
    }
    tiles::settle(products);
  }

  // Adds the products of `count` blocks, COUNT at most, to sums (rows, 32).
  template <int COUNT = TOGETHER>
  void add(int64_t count, const Inputs* x, int64_t rows, int64_t blocks, float* sums) const {
    if constexpr (COUNT > 1) {
      if (count < COUNT) return add<COUNT - 1>(count, x, rows, blocks, sums);
    }
    Factors<F> scales[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) scales[i] = factors[i];
    for (int64_t m = 0; m < rows; ++m, x += blocks, sums += PANEL) {
      Floats totals[2] = {load(sums), load(sums + 16)};
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; ++i) {
        const int32_t* const found = products[i] + m * PANEL;
        const Ints middle = ints(-F::MIDDLE * codes_sum<F>(x[i], 0));
        const Ints both[2] = {middle + load(found), middle + load(found + 16)};
        add_scaled<F>(x[i], 0, both, scales[i], totals);
      }
      store(sums, totals[0]);
      store(sums + 16, totals[1]);
    }
  }
};

// Sixteen rows, or TILED_ROWS, (of inputs (rows, blocks)) times one panel -> sums (rows, 32).
template <class F>
WITH_BYTE_TILES void multiply_by_tiles(
    const Inputs* x, int64_t rows, int64_t blocks, int64_t per_group, const uint8_t* at, bool fetch, float* sums) {
  Tiled<F> tiled;
  Factors<F> current;
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  for (int64_t first = 0; first < blocks; first += TOGETHER, x += TOGETHER) {
    const int64_t count = std::min(TOGETHER, blocks - first);
    for (int64_t i = 0; i < count; ++i) {
      if ((first + i) % per_group == 0) {
        current.read_group(at);
        at += F::FACTORS;
      }
      if (fetch)
        for (int64_t byte = 0; byte < F::FACTORS + F::STEPS + F::CODES; byte += 64) fetch_near(at + AHEAD + byte);
      tiled.read(i, at, current);
      at += F::STEPS + F::CODES;
    }
    for (int64_t i = 0; i < count; ++i) tiled.multiply(i, x + i, rows, blocks * sizeof(Inputs));
    tiled.add(count, x, rows, blocks, sums);
  }
}

#endif

template <class Number>
inline void write(const float* sums, const Number* bias, Number* out, int64_t count) {
  for (int64_t half = 0; half < 2; ++half) {
    const Mask some = first16(count - 16 * half);
    Floats found = load(sums + 16 * half);
    if (bias) found = found + load_some(some, bias + 16 * half);
    store_some(some, out + 16 * half, found);
  }
}

// Panels [begin, end) of a layer: `x` (M, blocks) -> columns of out (M, N). Number: of bias and results.
template <class Number>
void multiply_panels(
    const Inputs* x, int64_t M, int64_t K, const uint8_t* panels, int64_t form, int64_t group, const Number* bias,
    Number* out, int64_t N, int64_t begin, int64_t end) {
  const int64_t blocks = num_blocks(K, group), size = panel_bytes(form, K, group);
  with_form(form, [&](auto kind) {
    using F = decltype(kind);
    int64_t tiled = 0;  // rows that tiles multiply
#ifdef HAS_TILES
    if (F::SUBS == 1 && M >= tiles::ROWS && has_tiles()) {
      tiled = M / tiles::ROWS * tiles::ROWS;
      shape_tiles();
    }
#endif
    for (int64_t p = begin; p < end; ++p) {
      alignas(64) float sums[ROWS * PANEL];
      const int64_t start = p * PANEL;
      for (int64_t m = 0, rows; m < M; m += rows) {
        const auto multiply_some = [&](const auto& by) { by(x + m * blocks, rows, blocks, group / BLOCK, panels + p * size, m == 0, sums); };
        if (m < tiled) {
#ifdef HAS_TILES
          rows = std::min(TILED_ROWS, tiled - m);
          if constexpr (F::SUBS == 1) multiply_some(multiply_by_tiles<F>);
#endif
        } else {
          rows = std::min(ROWS, M - m);
          multiply_some(multiply<F>);
        }
        for (int64_t r = 0; r < rows; ++r)
          write(sums + r * PANEL, bias ? bias + start : nullptr, out + (m + r) * N + start, std::min(PANEL, N - start));
      }
    }
    if (tiled) tiles::release();
  });
}

}  // namespace blocks
