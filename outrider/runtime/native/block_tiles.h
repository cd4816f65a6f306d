// Sixteen rows at a time times panels of blocks, on processors with matrix tiles for bytes (Intel AMX).
//
// A tile of products is [16 rows][16 outputs] of one block, or of one step of it where it has two. They add up exactly, as integers, so
// that each row's bits are those that vectors find (`block_panels.h`).
//
// Storing a tile takes 16 cycles in which nothing else begins, however few rows it has, and while tiles are at work only one of two
// units adds and multiplies fp32. So scales take most of the time; products are stored while those before them are added. Fewer than
// thirteen rows are left to vectors. Tiles of bf16, whose products need no widening, were slower, with inputs twice as large.

#pragma once

#include "block_panels.h"
#include "tile_inputs.h"

namespace blocks {

#ifdef HAS_TILES

#define INPUTS 0
#define LOW_CODES 1
#define HIGH_CODES 2

// A form's blocks times rows.
template <class F>
struct Tiled {
  static constexpr int64_t TOGETHER = 4 / F::SUBS;  // blocks that are added to the sums at once
  static constexpr int64_t PRODUCTS = 4;            // of steps, each with sixteen rows: outputs 0 to 15, 16 to 31

  // Some blocks of a panel, their codes a signed byte each: [half of the outputs][8][16 outputs][4 inputs].
  struct Some {
    int64_t count;
    Floats scales[TOGETHER][F::SUBS][2], zeros[F::ZERO ? TOGETHER : 1][F::SUBS][2];
    alignas(64) uint8_t codes[TOGETHER][2][8][64];
  };

  // The products of some rows with some blocks, to be added to these rows' sums.
  struct Waiting {
    const Some* some = nullptr;
    const TileInputs* x;
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
    shapes.bytes_per_row[INPUTS] = F::STEP;
    shapes.rows[LOW_CODES] = shapes.rows[HIGH_CODES] = F::STEP / 4;
    tiles::settle(&shapes);
    _tile_loadconfig(&shapes);
  }

  // Multiplies the n-th step of sixteen rows.
  template <int64_t n>
  WITH_BYTE_TILES static void multiply(const Some& by, const TileInputs* x) {
    constexpr int64_t block = n / F::SUBS, first = n % F::SUBS * F::STEP;
    _tile_loadd(INPUTS, x[block].codes[0] + first, sizeof x->codes[0]);
    _tile_loadd(LOW_CODES, by.codes[block][0][first / 4], 64);
    if constexpr (n % 2 == 0) {
      _tile_zero(4);
      _tile_dpbssd(4, INPUTS, LOW_CODES);
    } else {
      _tile_zero(6);
      _tile_dpbssd(6, INPUTS, LOW_CODES);
    }
    _tile_loadd(HIGH_CODES, by.codes[block][1][first / 4], 64);
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
        const TileInputs& x = of.x[i];
#pragma GCC unroll 2
        for (int s = 0; s < F::SUBS; ++s)
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            const Floats found = to_floats(load(of.products[i * F::SUBS + s][h][r]));
            totals[h] = multiply_add(found * floats(x.scales[r]), scales[i][s][h], totals[h]);
            if constexpr (F::ZERO)
              totals[h] = multiply_add(floats(F::SUBS == 1 ? x.wholes[r] : x.parts[s][r]), zeros[i][s][h], totals[h]);
          }
      }
      store(sums, totals[0]);
      store(sums + 16, totals[1]);
    }
  }

  // The i-th block of `to` is now the one at `at`, with its factors.
  static void unpack(const uint8_t* at, const Factors<F>& factors, int64_t i, Some& to) {
#pragma GCC unroll 2
    for (int s = 0; s < F::SUBS; ++s)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        to.scales[i][s][h] = factors.scales[s][h];
        if constexpr (F::ZERO) to.zeros[i][s][h] = factors.zeros[s][h];
      }
    Bytes codes[VECTORS];
    read_codes<F>(at, codes);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) store(to.codes[i][h][k], less(codes[2 * k + h], F::MIDDLE));
    to.count = i + 1;
  }

  // Rows (rows / 16, blocks) times one panel -> sums (rows, 32). `fetch`: it comes from memory.
  WITH_BYTE_TILES void run(const TileInputs* x, int64_t rows, int64_t blocks, int64_t per_group, const uint8_t* at, bool fetch,
                           float* sums) {
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    Factors<F> factors;
    int64_t read = 0;
    const auto unpack_some = [&](Some& to) {
      for (int64_t i = 0; i < TOGETHER && read < blocks; ++i, ++read) {
        if (read % per_group == 0) {
          factors.read_group(at);
          at += F::FACTORS;
        }
        if (fetch)
          for (int64_t byte = 0; byte < F::FACTORS + F::STEPS + F::CODES; byte += 64) fetch_far(at + AHEAD + byte);
        factors.read_block(at);
        unpack(at + F::STEPS, factors, i, to);
        at += F::STEPS + F::CODES;
      }
    };
    unpack_some(some[0]);
    Waiting waiting;
    int turn = 0;
    for (int64_t first = 0; first < blocks; first += TOGETHER, x += TOGETHER) {
      Some &now = some[first / TOGETHER % 2], &next = some[first / TOGETHER % 2 ^ 1];
      for (int64_t m = 0; m < rows; m += 16) {
        const TileInputs* const own = x + m / 16 * blocks;
        auto* const to = products[turn];
        const int64_t part = waiting.some ? waiting.rows : 0;
        const auto add_some = [&](int64_t n) {
          if (part) add(waiting, part * n / PRODUCTS, part * (n + 1) / PRODUCTS);
        };
        const int64_t steps = now.count * F::SUBS;  // after the last block there are none
        tiles::settle(&now);
        multiply<0>(now, own);
        add_some(0);
        if (steps > 1) multiply<1>(now, own);
        keep<0>(to);
        add_some(1);
        if (steps > 2) multiply<2>(now, own);
        if (steps > 1) keep<1>(to);
        add_some(2);
        if (steps > 3) multiply<3>(now, own);
        if (steps > 2) keep<2>(to);
        add_some(3);
        if (steps > 3) keep<3>(to);
        tiles::settle(to);
        if (m == 0) unpack_some(next);
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

// Panels [begin, end) of a layer: `x` of M rows as `round_row` left it -> columns of out (M, N). Number: of bias and results.
template <class Number>
void multiply_panels(
    const Line* x, int64_t M, int64_t K, const uint8_t* panels, int64_t form, int64_t group, const Number* bias,
    Number* out, int64_t N, int64_t begin, int64_t end) {
  const int64_t blocks = num_blocks(K, group), size = panel_bytes(form, K, group);
  with_form(form, [&](auto kind) {
    using F = decltype(kind);
    const auto all_rows = [&](const auto& some_rows) {
      for (int64_t p = begin; p < end; ++p) {
        alignas(64) float sums[ROWS * PANEL];
        const int64_t start = p * PANEL;
        for (int64_t m = 0; m < M; m += ROWS) {
          const int64_t rows = std::min(ROWS, M - m);
          some_rows(m, rows, panels + p * size, sums);
          for (int64_t r = 0; r < rows; ++r)
            write(sums + r * PANEL, bias ? bias + start : nullptr, out + (m + r) * N + start, std::min(PANEL, N - start));
        }
      }
    };
#ifdef HAS_TILES
    if (are_tiled(M)) {
      Tiled<F>::shape();
      all_rows([&](int64_t m, int64_t rows, const uint8_t* at, float* sums) {
        Tiled<F> tiled;
        tiled.run(reinterpret_cast<const TileInputs*>(x) + m / 16 * blocks, rows, blocks, group / BLOCK, at, m == 0, sums);
      });
      return tiles::release();
    }
#endif
    all_rows([&](int64_t m, int64_t rows, const uint8_t* at, float* sums) {
      multiply<F>(reinterpret_cast<const Inputs*>(x) + m * blocks, rows, blocks, group / BLOCK, at, m == 0, sums);
    });
  });
}

}  // namespace blocks
