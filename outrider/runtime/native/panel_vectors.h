// Rows times panels by vectors.
//
// Each output of each row is one fp32 accumulator over k = 0, 2, 4, ...: its bits depend neither on how many rows stand
// beside it nor on who computes it.
//
// A few rows share one reading of the weights; the hardware's prefetch, on a plain forward stream, is the best there is.
// More rows go in groups, which read a part of the panel one after the other, all but the first from the cache. Memory would
// rest meanwhile, so that each group fetches its share of the part that comes next. Parts of a panel are equal: what is fetched
// while one is multiplied is then all of the next, whose rest would have to be waited for.
//
// Coded panels are decoded in registers for a few rows; for more, part by part, once for all groups.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "coded_panels.h"
#include "panel.h"

namespace vectors {

constexpr int ROWS = IS_WIDE ? 8 : 4;       // rows multiplied at once: so many accumulators are registers
constexpr int64_t ALONE = IS_WIDE ? 4 : 3;  // rows that are one group; more take turns, faster where memory is
constexpr int64_t BLOCK = 64;               // rows whose accumulators are kept between two parts
constexpr int64_t PART = 384;               // inputs of a part at most: 24 KB of weights

// Inputs [begin, end) of one panel, and what to fetch meanwhile: a line at `next` with each of the first `ahead` pairs.
struct Part {
  int64_t begin, end;
  const bf16 *weights, *next;
  int64_t ahead;
};

template <int M>
inline void multiply_pair(const bf16* x, int64_t K, Pairs first, Pairs second, Floats (&low)[M], Floats (&high)[M]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Pairs inputs = same_pair(x + m * K);
    low[m] = add_products(low[m], inputs, first);
    high[m] = add_products(high[m], inputs, second);
  }
}

template <int M>
inline void multiply_pair(const bf16* x, int64_t K, const bf16* weights, Floats (&low)[M], Floats (&high)[M]) {
  multiply_pair<M>(x, K, load_pairs(weights), load_pairs(weights + PANEL), low, high);
}

// M rows times one part; `sums` (M, 32) hold what the parts before it gave.
template <int M>
void multiply(const bf16* x, int64_t K, const Part& part, float* sums, const Output& out) {
  Floats low[M], high[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    low[m] = part.begin ? load(sums + m * PANEL) : floats(0);
    high[m] = part.begin ? load(sums + m * PANEL + 16) : floats(0);
  }
  const bf16 *weights = part.weights, *next = part.next;
  const bf16* const all = x + part.end;
  const bf16* const fetched = x + part.begin + 2 * part.ahead;
  for (x += part.begin; x < fetched; x += 2, weights += 2 * PANEL, next += LINE) {
    fetch_far(next);  // to where it does not drive out the activations
    multiply_pair<M>(x, K, weights, low, high);
  }
  for (; x < all; x += 2, weights += 2 * PANEL) multiply_pair<M>(x, K, weights, low, high);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    if (part.end == K) {
      out.write(m, low[m], high[m]);
      continue;
    }
    store(sums + m * PANEL, low[m]);
    store(sums + m * PANEL + 16, high[m]);
  }
}

using Multiply = void (*)(const bf16*, int64_t, const Part&, float*, const Output&);
template <int... M>
constexpr std::array<Multiply, ROWS> by_rows(std::integer_sequence<int, M...>) {
  return {multiply<M + 1>...};
}
constexpr std::array<Multiply, ROWS> MULTIPLY = by_rows(std::make_integer_sequence<int, ROWS>());

// M rows times one coded panel.
template <int M>
void multiply_coded(const bf16* x, int64_t K, coded::Reader panel, const Output& out) {
  Floats low[M], high[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) low[m] = high[m] = floats(0);
  const int64_t fours = K / coded::EACH;
  for (int64_t f = 0; f < fours; ++f) {
    for (const int64_t plain = panel.next_escaped(fours); f < plain; ++f) {
      panel.fetch(f);
      const coded::Four four = panel.read(f);
      const bf16* const inputs = x + f * coded::EACH;
      multiply_pair<M>(inputs, K, four.lines[0], four.lines[1], low, high);
      multiply_pair<M>(inputs + 2, K, four.lines[2], four.lines[3], low, high);
    }
    if (f == fours) break;
    alignas(64) bf16 lines[coded::NUMBERS];
    panel.decode(f, f + 1, lines);
    multiply_pair<M>(x + f * coded::EACH, K, lines, low, high);
    multiply_pair<M>(x + f * coded::EACH + 2, K, lines + 2 * PANEL, low, high);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) out.write(m, low[m], high[m]);
}

// One panel, part by part from the first to the last: as it lies, or decoded.
struct Plain {
  static constexpr int64_t STEP = 2;  // inputs that lie in one part
  const bf16* panel;

  const bf16* read(int64_t begin, int64_t) const { return panel + begin * PANEL; }
  const bf16* place(int64_t input) const { return panel + input * PANEL; }
  static int64_t lines(int64_t inputs) { return inputs; }
};
struct Coded {
  static constexpr int64_t STEP = coded::EACH;
  coded::Reader panel;
  alignas(64) bf16 part[PART * PANEL];

  explicit Coded(const coded::Reader& panel) : panel(panel) {}
  const bf16* read(int64_t begin, int64_t end) {
    panel.decode(begin / STEP, end / STEP, part);
    return part;
  }
  const bf16* place(int64_t input) const { return reinterpret_cast<const bf16*>(panel.four(input / STEP)); }
  static int64_t lines(int64_t inputs) { return inputs / STEP * coded::FOUR / 64; }
};

// Up to BLOCK rows times one panel.
template <class Panel>
void multiply_panel(const bf16* x, int64_t M, int64_t K, Panel& panel, const Output& out) {
  alignas(64) float sums[BLOCK * PANEL];
  const int64_t groups = M <= ALONE ? 1 : std::max<int64_t>(2, (M + ROWS - 1) / ROWS), each = (M + groups - 1) / groups;
  const int64_t parts = groups == 1 ? 1 : (K + PART - 1) / PART, size = (K / Panel::STEP + parts - 1) / parts * Panel::STEP;
  for (int64_t begin = 0; begin < K; begin += size) {
    const int64_t end = std::min(begin + size, K), ahead = groups == 1 ? 0 : Panel::lines(end - begin) / groups;
    Part part{begin, end, panel.read(begin, end), panel.place(end), ahead};
    for (int64_t m = 0; m < M; m += each, part.next += ahead * LINE) {
      const Output rows{out.bias, out.at + m * out.N, out.N, out.count};
      MULTIPLY[std::min(each, M - m) - 1](x + m * K, K, part, sums + m * PANEL, rows);
    }
  }
}

using MultiplyCoded = void (*)(const bf16*, int64_t, coded::Reader, const Output&);
template <int... M>
constexpr std::array<MultiplyCoded, ALONE> coded_by_rows(std::integer_sequence<int, M...>) {
  return {multiply_coded<M + 1>...};
}
constexpr std::array<MultiplyCoded, ALONE> MULTIPLY_CODED = coded_by_rows(std::make_integer_sequence<int, ALONE>());

// Panels [begin, end) of a layer.
inline void multiply_panels(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL, count = std::min(PANEL, N - start);
    for (int64_t m = 0; m < M; m += BLOCK) {
      Plain panel{panels + start * K};
      multiply_panel(x + m * K, std::min(BLOCK, M - m), K, panel, {bias ? bias + start : nullptr, out + m * N + start, N, count});
    }
  }
}

// The same of coded ones.
inline void multiply_coded_panels(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL, count = std::min(PANEL, N - start);
    const coded::Reader reader(panels + p * coded::panel_bytes(K));
    for (int64_t m = 0; m < M; m += BLOCK) {
      const int64_t rows = std::min(BLOCK, M - m);
      const Output to{bias ? bias + start : nullptr, out + m * N + start, N, count};
      if (rows <= ALONE) {
        MULTIPLY_CODED[rows - 1](x + m * K, K, reader, to);
        continue;
      }
      Coded panel(reader);
      multiply_panel(x + m * K, rows, K, panel, to);
    }
  }
}

}  // namespace vectors
