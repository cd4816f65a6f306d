// What an indexer chooses: of all positions on a token's own path the `op.cols` whose scores are largest, of equals the lowest position,
// written as numbers in the order of positions. A token that sees no more than those gets all of them, by no scores.
//
// A score is a sum over heads, in order, of weights times the rectified products of the token's queries with the position's key. Products
// are rows times panels, as in attention, so a score depends on its token and its key alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attend.h"
#include "cache_panels.h"
#include "choices.h"
#include "functions.h"
#include "pool.h"
#include "program.h"
#include "tokenwise.h"

namespace indexer {

using attend::LANES, attend::SPAN, panels::RANGE;

// Positions that a token of a row sees
inline int64_t num_seen(const Pass& pass, int64_t b, int64_t t) {
  return pass.starts[b] + (pass.depths ? pass.depths[b * pass.tokens + t] : t) + 1;
}

template <typename Number>
struct Scoring {
  const Op& op;
  const Pass& pass;
  const char *queries, *weights;  // of the first token
  float* scores;                  // of all tokens, `step` positions each
  int64_t step;

  // Scores of positions begin .. begin + num_keys with token m; their keys are packed, and `products` has room for those of all heads
  void token(int64_t m, int64_t begin, int64_t num_keys, const Number* panel, float* products) const {
    const Operand &q = op.in[0], &w = op.in[1];
    const Number* const rows = reinterpret_cast<const Number*>(queries + m * q.token_step) + q.offset;
    panels::Fetch none(panel, 0, op.size, 0);
    none.divide(1);
    panels::multiply_rows(op.heads, rows, q.row_step, op.size, panel, static_cast<const float*>(nullptr), products, RANGE, none,
                          num_keys);
    const tokenwise::Row weight = tokenwise::row_of(w, weights + m * w.token_step, 0);
    for (int64_t v = 0; v < num_keys; v += LANES) {
      Floats total = floats(0);
      for (int64_t h = 0; h < op.heads; ++h) {
        const Floats product = larger(load(products + h * RANGE + v) * floats(float(op.scale)), floats(0));
        total = multiply_add(product, floats(weight.one(h)), total);
      }
      store(scores + m * step + begin + v, total);
    }
  }

  // Scores of the positions of a span, for all tokens of a row that need any
  void span(int64_t b, int64_t begin) const {
    thread_local std::vector<char> room;
    const int64_t packed = attend::rounded_up(RANGE * op.size * sizeof(Number), 64);
    char* const at = attend::lines(room, packed + op.heads * RANGE * sizeof(float));
    Number* const panel = reinterpret_cast<Number*>(at);
    float* const products = reinterpret_cast<float*>(at + packed);
    const Number* const keys = static_cast<const Number*>(pass.keys[op.layer]) + pass.origin(op, b) * op.size;
    const int64_t start = pass.starts[b], longest = pass.end(b);
    const auto is_wanted = [&](int64_t t, int64_t from) { return num_seen(pass, b, t) > std::max(from, op.cols); };
    for (int64_t from = begin; from < std::min(begin + SPAN, longest); from += RANGE) {
      const bool is_shared = !pass.paths || from + RANGE <= start;
      const int64_t most = std::min(RANGE, longest - from);
      if (is_shared) panels::pack_keys(most, op.size, [&](int64_t j) { return keys + (from + j) * op.size; }, panel);
      for (int64_t t = 0; t < pass.tokens; ++t) {
        if (!is_wanted(t, from)) continue;
        const int64_t num_keys = is_shared ? most : std::min(RANGE, num_seen(pass, b, t) - from);
        if (!is_shared) {
          const auto place = [&](int64_t j) { return keys + pass.place(b, t, from + j) * op.size; };
          panels::pack_keys(num_keys, op.size, place, panel);
        }
        token(b * pass.tokens + t, from, num_keys, panel, products);
      }
    }
  }
};

// The positions of the largest of `count` scores, in order
inline void choose(const float* scores, int64_t count, const Op& op, char* out) {
  thread_local std::vector<int32_t> positions;
  positions.resize(count);
  std::iota(positions.begin(), positions.end(), 0);
  const int64_t wanted = std::min(op.cols, count);
  if (wanted < count) {
    const auto stands_before = [&](int32_t a, int32_t b) {
      return choices::precedes(scores[a], scores[b]) || (!choices::precedes(scores[b], scores[a]) && a < b);
    };
    std::nth_element(positions.begin(), positions.begin() + wanted, positions.end(), stands_before);
    std::sort(positions.begin(), positions.begin() + wanted);
  }
  float* const to = reinterpret_cast<float*>(out) + op.out.offset;
  for (int64_t i = 0; i < wanted; ++i) to[i] = float(positions[i]);
}

template <typename Number>
void run(const Op& op, const Pass& pass, const char* queries, const char* weights, char* out, Pool& pool, std::vector<char>& found) {
  const int64_t longest = *std::max_element(pass.starts, pass.starts + pass.rows) + pass.known + pass.tokens;
  const int64_t spans = (longest + SPAN - 1) / SPAN, step = spans * SPAN, tokens = pass.rows * pass.tokens;
  float* scores = nullptr;
  if (longest > op.cols) {
    scores = reinterpret_cast<float*>(attend::lines(found, tokens * step * sizeof(float)));
    const Scoring<Number> scoring{op, pass, queries, weights, scores, step};
    pool.run(pass.rows * spans, [&](int64_t piece) { scoring.span(piece / spans, piece % spans * SPAN); });
  }
  pool.run(tokens, [&](int64_t m) {
    choose(scores + m * step, num_seen(pass, m / pass.tokens, m % pass.tokens), op, out + m * op.out.token_step);
  });
}

}  // namespace indexer
