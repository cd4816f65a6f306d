// y = x W^T + b where W stays in fp8 (e4m3) with scales: each number is widened to bf16, exactly, in registers.
//
//     panels[N / 32][K / group]    group: inputs that share a scale, a multiple of 32
//         32 scales (fp32), then group / 32 blocks of [8][2] lines of [16 outputs][4 inputs, in the order 0 2 1 3]
//
// The even bytes of a line are the first pair of inputs of sixteen outputs, the odd ones the second: what a product of pairs takes.
//
// Each output of each row adds up the products of a group in fp32, in the order of inputs, and then joins scale times that sum to
// one total: its bits depend on nothing but the row.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "panel.h"

namespace float_panels {

constexpr int ROWS = IS_WIDE ? 8 : 2;      // multiplied at once: so many sums are registers
constexpr int64_t TOGETHER = 64;           // rows that share one reading of a panel
constexpr int64_t FEW = IS_WIDE ? 16 : 2;  // rows for which a group is widened in registers, once for each ROWS of them
constexpr int64_t PART = 32;               // fours of inputs that are widened at once for more rows: 8 KB
constexpr int64_t FACTORS = 4 * PANEL;     // bytes for a group
constexpr int64_t LINES = 128;             // bytes for four inputs
constexpr int64_t AHEAD = 4096;            // bytes: beside widening, the hardware fetches too late

inline int64_t panel_bytes(int64_t K, int64_t group) { return (K + group - 1) / group * (FACTORS + group / 4 * LINES); }

// Four inputs of all outputs: pairs of the first sixteen outputs, then of the others.
struct Four {
  Pairs pairs[2][2];
};

struct Stored {
  const uint8_t* at;
  void fetch(int64_t four) const {
    fetch_near(at + four * LINES + AHEAD);
    fetch_near(at + four * LINES + AHEAD + 64);
  }
  Four read(int64_t four) const {
    const Bytes low = load_bytes(at + four * LINES), high = load_bytes(at + four * LINES + 64);
    if (__builtin_expect(has_small(low) | has_small(high), false)) return widened(low, high, false);
    return widened(low, high, true);
  }
  static Four widened(Bytes low, Bytes high, bool is_normal) {
    return {{{widen_evens(low, is_normal), widen_odds(low, is_normal)}, {widen_evens(high, is_normal), widen_odds(high, is_normal)}}};
  }
};

struct Widened {
  const bf16* at;
  void fetch(int64_t) const {}
  Four read(int64_t four) const {
    const bf16* const from = at + four * 4 * PANEL;
    return {{{load_pairs(from), load_pairs(from + 32)}, {load_pairs(from + 64), load_pairs(from + 96)}}};
  }
};

inline void widen(const uint8_t* from, int64_t fours, bf16* to) {
  for (int64_t f = 0; f < fours; ++f) {
    const Stored stored{from};
    stored.fetch(f);
    const Four four = stored.read(f);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) store_pairs(to + f * 4 * PANEL + 64 * h + 32 * p, four.pairs[h][p]);
  }
}

// Rows' sums of the group so far, and their totals: (rows, 32) each.
struct Sums {
  alignas(64) float group[TOGETHER * PANEL], totals[TOGETHER * PANEL];
};

// Some fours of a group. `scales`: of the group where they are its last ones, else null.
struct Part {
  int64_t fours;
  bool is_first;
  const float* scales;
};

template <int M, class Source>
void multiply(const bf16* x, int64_t K, const Source& weights, const Part& part, float* sums, float* totals) {
  Floats found[2][M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) found[h][m] = part.is_first ? floats(0) : load(sums + m * PANEL + 16 * h);
  for (int64_t f = 0; f < part.fours; ++f, x += 4) {
    weights.fetch(f);
    const Four four = weights.read(f);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Pairs first = same_pair(x + m * K), second = same_pair(x + m * K + 2);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        found[h][m] = add_products(add_products(found[h][m], first, four.pairs[h][0]), second, four.pairs[h][1]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float *const sum = sums + m * PANEL + 16 * h, *const total = totals + m * PANEL + 16 * h;
      if (part.scales) store(total, multiply_add(found[h][m], load(part.scales + 16 * h), load(total)));
      else store(sum, found[h][m]);
    }
}

template <class Source>
using Multiply = void (*)(const bf16*, int64_t, const Source&, const Part&, float*, float*);
template <class Source, int... M>
constexpr std::array<Multiply<Source>, ROWS> by_rows(std::integer_sequence<int, M...>) {
  return {multiply<M + 1, Source>...};
}
template <class Source>
constexpr std::array<Multiply<Source>, ROWS> MULTIPLY = by_rows<Source>(std::make_integer_sequence<int, ROWS>());

// Up to TOGETHER rows times one panel -> sums.totals
inline void multiply_panel(const bf16* x, int64_t M, int64_t K, int64_t group, const uint8_t* at, Sums& sums) {
  alignas(64) bf16 widened[PART * 4 * PANEL];
  std::fill_n(sums.totals, M * PANEL, 0.f);
  const int64_t size = M <= FEW ? group / 4 : PART, turns = (M + ROWS - 1) / ROWS, each = (M + turns - 1) / turns;
  for (int64_t start = 0; start < K; start += group) {
    const float* const scales = reinterpret_cast<const float*>(at);
    const int64_t fours = std::min(group, K - start) / 4;
    at += FACTORS;
    for (int64_t begin = 0; begin < fours; begin += size) {
      const int64_t end = std::min(begin + size, fours);
      const Part part{end - begin, begin == 0, end == fours ? scales : nullptr};
      const bf16* const from = x + start + 4 * begin;
      const uint8_t* const weights = at + begin * LINES;
      const auto go = [&](const auto& multiplied, const auto& source) {
        for (int64_t m = 0; m < M; m += each)
          multiplied[std::min(each, M - m) - 1](from + m * K, K, source, part, sums.group + m * PANEL, sums.totals + m * PANEL);
      };
      if (M <= FEW) {
        go(MULTIPLY<Stored>, Stored{weights});
      } else {
        widen(weights, part.fours, widened);
        go(MULTIPLY<Widened>, Widened{widened});
      }
    }
    at += group / 4 * LINES;
  }
}

// Panels [begin, end) of a layer: x (M, K) -> columns of out (M, N). K is a multiple of four.
inline void multiply_panels(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, int64_t group, const bf16* bias, bf16* out, int64_t N,
    int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL, bytes = panel_bytes(K, group);
    for (int64_t m = 0; m < M; m += TOGETHER) {
      const int64_t rows = std::min(TOGETHER, M - m);
      Sums sums;
      multiply_panel(x + m * K, rows, K, group, panels + p * bytes, sums);
      const Output to{bias ? bias + start : nullptr, out + m * N + start, N, std::min(PANEL, N - start)};
      for (int64_t r = 0; r < rows; ++r) to.write(r, load(sums.totals + r * PANEL), load(sums.totals + r * PANEL + 16));
    }
  }
}

}  // namespace float_panels
