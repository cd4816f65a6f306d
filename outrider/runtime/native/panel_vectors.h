// Rows times panels by vectors: what `panel_linear.cpp` does with all panels of a layer, and the native runtime with some of them.
//
// Each output of each row is one fp32 accumulator over k = 0, 2, 4, ...: its bits depend neither on how many rows stand
// beside it nor on who computes it.
//
// A few rows share one reading of the weights; the hardware's prefetch, on a plain forward stream, is the best there is.
// More rows go in groups, which read a part of the panel one after the other, all but the first from the cache. Memory would
// rest meanwhile, so that each group fetches its share of the part that comes next. Parts of a panel are equal: what is fetched
// while one is multiplied is then all of the next, whose rest would have to be waited for.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

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
inline void multiply_pair(const bf16* x, int64_t K, const bf16* weights, Floats (&low)[M], Floats (&high)[M]) {
  const Pairs first = load_pairs(weights);
  const Pairs second = load_pairs(weights + PANEL);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Pairs inputs = same_pair(x + m * K);
    low[m] = add_products(low[m], inputs, first);
    high[m] = add_products(high[m], inputs, second);
  }
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

// Up to BLOCK rows times one panel.
inline void multiply_panel(const bf16* x, int64_t M, int64_t K, const bf16* panel, const Output& out) {
  alignas(64) float sums[BLOCK * PANEL];
  const int64_t groups = M <= ALONE ? 1 : std::max<int64_t>(2, (M + ROWS - 1) / ROWS), each = (M + groups - 1) / groups;
  const int64_t parts = groups == 1 ? 1 : (K + PART - 1) / PART, size = (K / 2 + parts - 1) / parts * 2;
  for (int64_t begin = 0; begin < K; begin += size) {
    const int64_t end = std::min(begin + size, K), ahead = groups == 1 ? 0 : (end - begin) / groups;
    Part part{begin, end, panel + begin * PANEL, panel + end * PANEL, ahead};
    for (int64_t m = 0; m < M; m += each, part.next += ahead * LINE) {
      const Output rows{out.bias, out.at + m * out.N, out.N, out.count};
      MULTIPLY[std::min(each, M - m) - 1](x + m * K, K, part, sums + m * PANEL, rows);
    }
  }
}

// Panels [begin, end) of a layer.
inline void multiply_panels(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N, int64_t begin,
    int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL, count = std::min(PANEL, N - start);
    for (int64_t m = 0; m < M; m += BLOCK)
      multiply_panel(
          x + m * K, std::min(BLOCK, M - m), K, panels + start * K,
          {bias ? bias + start : nullptr, out + m * N + start, N, count});
  }
}

}  // namespace vectors
