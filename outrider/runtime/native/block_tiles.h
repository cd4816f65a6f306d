// Rows times panels of blocks, on processors with matrix tiles for bytes (Intel AMX).
//
// A tile of products is [16][16 outputs]: sixteen rows with one block (or with one step of it, where it has two), or up to eight
// rows with two blocks (`tile_inputs.h`). They add up exactly, as integers, so that each row's bits are those that vectors find
// (`block_panels.h`).
//
// Storing a tile of products takes 16 cycles, however few rows it has, and adding it to the sums 32 to 64: one tile is multiplied
// and stored while the one before is added, and the codes that come next are unpacked in between.

#pragma once

#include "block_panels.h"
#include "tile_inputs.h"

namespace blocks {

#ifdef HAS_TILES

#define INPUTS 0
#define LOW_CODES 1
#define HIGH_CODES 2

// A form's blocks times rows that lie in pairs of blocks, or block by block.
template <class F, bool PAIRED>
struct Tiled {
  using Tile = TileInputs<PAIRED>;
  static constexpr int64_t TOGETHER = 4 / F::SUBS;        // blocks that are added to the sums at once
  static constexpr int64_t PRODUCTS = PAIRED ? 2 : 4;     // pairs of tiles with their products: outputs 0 to 15, 16 to 31
  static constexpr int64_t DEPTH = F::STEP * (PAIRED ? 2 : 1);  // inputs of a tile

  // Some blocks of a panel, unpacked.
  struct Some {
    int64_t count;
    Floats scales[TOGETHER][F::SUBS][2], zeros[F::ZERO ? TOGETHER : 1][F::SUBS][2];
    alignas(64) uint8_t codes[(TOGETHER + 1) / 2][2][8][2][64];  // [pair][half of the outputs][four inputs][block]
  };

  // The products of some rows with some blocks, to be added to these rows' sums.
  struct Waiting {
    const Some* some = nullptr;
    const Tile* x;
    int64_t rows;
    float* sums;
    const int32_t (*products)[2][16][16];
  };

  Some some[2];
  alignas(64) int32_t products[2][PRODUCTS][2][16][16];

  WITH_BYTE_TILES static void shape() {
    tiles::Shapes shapes;
    std::fill_n(shapes.bytes_per_row, 8, 64);
    std::fill_n(shapes.rows, 8, tiles::ROWS);
    shapes.bytes_per_row[INPUTS] = DEPTH;
    shapes.rows[LOW_CODES] = shapes.rows[HIGH_CODES] = DEPTH / 4;
    tiles::settle(&shapes);
    _tile_loadconfig(&shapes);
  }

  // Multiplies the n-th tile of inputs with its codes.
  template <int64_t n>
  WITH_BYTE_TILES static void multiply(const Some& by, const Tile* x) {
    constexpr int64_t unit = n / F::SUBS, s = n % F::SUBS;
    const auto& codes = by.codes[PAIRED ? unit : unit / 2];
    const int64_t block = PAIRED ? 0 : unit % 2, stride = PAIRED ? 64 : 128;
    _tile_loadd(INPUTS, x[unit].codes[0] + DEPTH * s, sizeof x->codes[0]);
    _tile_loadd(LOW_CODES, codes[0][s * 4][block], stride);
    if constexpr (n % 2 == 0) {
      _tile_zero(4);
      _tile_dpbssd(4, INPUTS, LOW_CODES);
    } else {
      _tile_zero(6);
      _tile_dpbssd(6, INPUTS, LOW_CODES);
    }
    _tile_loadd(HIGH_CODES, codes[1][s * 4][block], stride);
    if constexpr (n % 2 == 0) {
      _tile_zero(5);
      _tile_dpbssd(5, INPUTS, HIGH_CODES);
    } else {
      _tile_zero(7);
      _tile_dpbssd(7, INPUTS, HIGH_CODES);
    }
  }

  template <int64_t n>
  WITH_BYTE_TILES static void keep(int32_t (*to)[2][16][16]) {
    if constexpr (n % 2 == 0) {
      _tile_stored(4, to[n][0], 64);
      _tile_stored(5, to[n][1], 64);
    } else {
      _tile_stored(6, to[n][0], 64);
      _tile_stored(7, to[n][1], 64);
    }
  }

  // Adds rows [begin, end) of what waits to their sums.
  template <int COUNT = TOGETHER>
  static void add(const Waiting& of, int64_t begin, int64_t end) {
    if constexpr (COUNT > 1) {
      if (of.some->count < COUNT) return add<COUNT - 1>(of, begin, end);
    }
    Floats scales[COUNT][F::SUBS][2], zeros[COUNT][F::SUBS][2];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i)
#pragma GCC unroll 2
      for (int s = 0; s < F::SUBS; ++s)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          scales[i][s][h] = of.some->scales[i][s][h];
          if constexpr (F::ZERO) zeros[i][s][h] = of.some->zeros[i][s][h];
        }
    for (int64_t r = begin; r < end; ++r) {
      float* const sums = of.sums + r * PANEL;
      Floats totals[2] = {load(sums), load(sums + 16)};
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; ++i) {
        const Tile& x = of.x[PAIRED ? i / 2 : i];
        const int64_t row = PAIRED ? 8 * (i % 2) + r : r;
#pragma GCC unroll 2
        for (int s = 0; s < F::SUBS; ++s) {
          const auto& found = of.products[(PAIRED ? i / 2 : i) * F::SUBS + s];
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            totals[h] = multiply_add(to_floats(load(found[h][row])) * floats(x.scales[row]), scales[i][s][h], totals[h]);
            if constexpr (F::ZERO)
              totals[h] = multiply_add(floats(F::SUBS == 1 ? x.wholes[row] : x.parts[s][row]), zeros[i][s][h], totals[h]);
          }
        }
      }
      store(sums, totals[0]);
      store(sums + 16, totals[1]);
    }
  }

  // Rows (of `x`, a tile for each unit, `stride` of them for sixteen rows) times one panel -> sums (rows, 32).
  WITH_BYTE_TILES void run(const Tile* x, int64_t rows, int64_t stride, int64_t blocks, int64_t per_group, const uint8_t* at,
                           bool fetch, float* sums) {
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    Factors<F> current;
    int64_t read = 0;
    const auto unpack = [&](int64_t i, Some& to) {
      if (read == blocks) return;
      if (read++ % per_group == 0) {
        current.read_group(at);
        at += F::FACTORS;
      }
      if (fetch)
        for (int64_t byte = 0; byte < F::FACTORS + F::STEPS + F::CODES; byte += 64) fetch_far(at + AHEAD + byte);
      current.read_block(at);
#pragma GCC unroll 2
      for (int s = 0; s < F::SUBS; ++s)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          to.scales[i][s][h] = current.scales[s][h];
          if constexpr (F::ZERO) to.zeros[i][s][h] = current.zeros[s][h];
        }
      Bytes vectors[VECTORS];
      read_codes<F>(at + F::STEPS, vectors);
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) store(to.codes[i / 2][h][k][i % 2], less(vectors[2 * k + h], F::MIDDLE));
      at += F::STEPS + F::CODES;
      to.count = i + 1;
    };
    for (int64_t i = 0; i < TOGETHER; ++i) unpack(i, some[0]);
    constexpr int64_t tiles_a_row = TOGETHER / (PAIRED ? 2 : 1);
    Waiting waiting;
    int turn = 0;
    for (int64_t first = 0; first < blocks; first += TOGETHER, x += tiles_a_row) {
      Some &now = some[first / TOGETHER % 2], &next = some[first / TOGETHER % 2 ^ 1];
      for (int64_t m = 0; m < rows; m += 16) {
        const Tile* const own = x + m / 16 * stride;
        auto* const to = products[turn];
        const int64_t part = (waiting.some ? waiting.rows : 0), each = (part + PRODUCTS - 1) / PRODUCTS;
        const auto meanwhile = [&](int64_t n) {
          if (part) add(waiting, std::min(part, n * each), std::min(part, (n + 1) * each));
        };
        tiles::settle(&now);
        multiply<0>(now, own);
        meanwhile(0);
        multiply<1>(now, own);
        keep<0>(to);
        meanwhile(1);
        if constexpr (PRODUCTS > 2) {
          multiply<2>(now, own);
          keep<1>(to);
          meanwhile(2);
          multiply<3>(now, own);
          keep<2>(to);
          meanwhile(3);
        }
        keep<PRODUCTS - 1>(to);
        tiles::settle(to);
        if (m == 0)
          for (int64_t i = 0; i < TOGETHER; ++i) unpack(i, next);
        waiting = {&now, own, std::min<int64_t>(16, rows - m), sums + m * PANEL, to};
        turn ^= 1;
      }
    }
    add(waiting, 0, waiting.rows);
  }
};

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

// Panels [begin, end) of a layer: `x` of M rows as `place_row` left it -> columns of out (M, N). Number: of bias and results.
template <class Number>
void multiply_panels(
    const Line* x, int64_t M, int64_t K, const uint8_t* panels, int64_t form, int64_t group, const Number* bias,
    Number* out, int64_t N, int64_t begin, int64_t end) {
  const int64_t blocks = num_blocks(K, group), size = panel_bytes(form, K, group);
  const Arrangement arranged = arrangement(M);
  with_form(form, [&](auto kind) {
    using F = decltype(kind);
    const auto all = [&](const auto& by) {
      for (int64_t p = begin; p < end; ++p) {
        alignas(64) float sums[ROWS * PANEL];
        const int64_t start = p * PANEL;
        for (int64_t m = 0; m < M; m += ROWS) {
          const int64_t rows = std::min(ROWS, M - m);
          by(m, rows, panels + p * size, sums);
          for (int64_t r = 0; r < rows; ++r)
            write(sums + r * PANEL, bias ? bias + start : nullptr, out + (m + r) * N + start, std::min(PANEL, N - start));
        }
      }
    };
#ifdef HAS_TILES
    const auto tiled = [&]<bool PAIRED>() {
      Tiled<F, PAIRED>::shape();
      const int64_t stride = PAIRED ? (blocks + 1) / 2 : blocks;
      all([&](int64_t m, int64_t rows, const uint8_t* at, float* sums) {
        Tiled<F, PAIRED> work;
        const auto* const from = reinterpret_cast<const TileInputs<PAIRED>*>(x) + m / 16 * stride;
        work.run(from, rows, stride, blocks, group / BLOCK, at, m == 0, sums);
      });
      tiles::release();
    };
    if (arranged == PAIRS) return tiled.template operator()<true>();
    if (arranged == SIXTEENS) return tiled.template operator()<false>();
#endif
    all([&](int64_t m, int64_t rows, const uint8_t* at, float* sums) {
      multiply<F>(reinterpret_cast<const Inputs*>(x) + m * blocks, rows, blocks, group / BLOCK, at, m == 0, sums);
    });
  });
}

}  // namespace blocks
