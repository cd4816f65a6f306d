// Attention of a pass over the cache, in the cache's own layout: keys (slots, capacity, KV heads, size), values likewise, or they are
// the beginnings of keys.
//
// A piece is about up to 64 queries of one KV head: all query heads of one token or of several, so that a key is read once for all of
// them. Both products, queries with keys and weights with values, are rows times panels (`cache_panels.h`): what a query gets depends
// on its own keys alone.
//
// Keys are taken by the position they stand at on the query's own path, 64 at a time. Within a span of 512 positions, weights are
// relative to the largest score so far, and sums run on; spans are put together in order. Threads divide spans among each other, or
// blocks of queries; the order is the same. A sink, a score of each head whose weight no value gets, joins the total at the very end.
// In a chain the key of position p lies at place p; on a tree's path after the prefix it lies
// where the path says, so a path has the bits that it has alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cache_panels.h"
#include "functions.h"
#include "pool.h"
#include "program.h"
#include "score_tiles.h"

namespace attend {

using panels::RANGE, panels::TOGETHER, panels::WIDTH;

constexpr int64_t QUERIES = 64, SPAN = 512, LANES = 16;
constexpr float LEAST = -std::numeric_limits<float>::infinity();
alignas(64) constexpr float COUNTED[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

inline const Operand& sinks_of(const Op& op) { return op.in[op.chosen ? 2 : 1]; }

// Memory of a thread, or of all, that begins at a line of the cache.
inline char* lines(std::vector<char>& room, int64_t bytes) {
  if (int64_t(room.size()) < bytes + 64) room.resize(bytes + 64);
  return room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
}

// What queries have found so far: for each its largest score, its sum of weights by position modulo 16, and its sums of values, both
// relative to weights 2^(score - most).
struct State {
  float *most, *totals, *sums;
  int64_t step;  // between the sums of two queries

  static int64_t floats(const Op& op) { return QUERIES * (1 + LANES + rounded_up(op.value_size, WIDTH)); }
  State(const Op& op, char* at)
      : most(reinterpret_cast<float*>(at)), totals(most + QUERIES), sums(totals + QUERIES * LANES),
        step(rounded_up(op.value_size, WIDTH)) {}
  void clear(int64_t count) const {
    std::fill_n(most, QUERIES, LEAST);
    std::fill_n(totals, count * LANES, 0.f);
    std::fill_n(sums, count * step, 0.f);
  }
};

// Where nothing was found yet, no weight is relative to it.
inline Floats base_of(Floats most) { return choose(is_equal(most, floats(LEAST)), floats(0), most); }

// The queries of one KV head that a piece is about.
template <typename Number>
struct Block {
  const Op& op;
  const Pass& pass;
  const char* sinks;                // a score for each head; null: none
  const char* chosen;               // the positions that each token sees, in order; null: all
  int64_t row, head, first, count;  // queries [first, first + count) of the row's tokens x heads of this KV head
  const Number *keys, *values;      // of this row and KV head
  Number *queries, *weights;        // (count, size), (count, RANGE)
  Number *key_panel, *value_panel;
  Number *query_panel;              // for tiles alone
  float* scores;                    // (count, RANGE)
  float low[QUERIES], high[QUERIES];  // positions that each query sees
  int64_t all_from, all_to;           // positions that all of them see
  bool is_cut = false;                // positions are counted among those that a token chose

  int64_t group() const { return op.heads / op.kv_heads; }
  int64_t token(int64_t query) const { return (first + query) / group(); }
  int64_t start() const { return pass.starts[row]; }
  int64_t depth(int64_t t) const { return pass.depths ? pass.depths[row * pass.tokens + t] : t; }
  int64_t lowest() const { return int64_t(*std::min_element(low, low + count)); }
  int64_t end() const { return int64_t(*std::max_element(high, high + count)) + 1; }

  Block(const Op& op, const Pass& pass, const char* sinks, const char* chosen, int64_t row, int64_t head, int64_t first,
        int64_t count, const char* block0)
      : op(op), pass(pass), sinks(sinks), chosen(chosen), row(row), head(head), first(first), count(count) {
    const int64_t slot = pass.origin(op, row), width = rounded_up(op.value_size, WIDTH);
    keys = static_cast<const Number*>(pass.keys[op.layer]) + (slot * op.kv_heads + head) * op.size;
    values = keys;
    if (!op.values_in_keys) values = static_cast<const Number*>(pass.values[op.layer]) + (slot * op.kv_heads + head) * op.value_size;
    const int64_t each[] = {QUERIES * op.size, QUERIES * RANGE, RANGE * op.size, RANGE * width, QUERIES * op.size};
    int64_t total = QUERIES * RANGE * sizeof(float);
    for (int64_t numbers : each) total += rounded_up(numbers * sizeof(Number), 64);
    thread_local std::vector<char> room;
    char* at = lines(room, total);
    scores = reinterpret_cast<float*>(at);
    at += QUERIES * RANGE * sizeof(float);
    Number** const parts[] = {&queries, &weights, &key_panel, &value_panel, &query_panel};
    for (int i = 0; i < 5; at += rounded_up(each[i++] * sizeof(Number), 64)) *parts[i] = reinterpret_cast<Number*>(at);
    for (int64_t query = 0; query < count; ++query) {
      const int64_t t = token(query), h = head * group() + (first + query) % group();
      const int64_t position = start() + depth(t);
      high[query] = float(op.sees_all ? start() + pass.tokens - 1 : position);
      low[query] = op.window ? std::max(0.f, float(position - op.window + 1)) : 0.f;
      const char* from = block0 + (row * pass.tokens + t) * op.in[0].token_step;
      std::memcpy(queries + query * op.size, reinterpret_cast<const Number*>(from) + op.in[0].offset + h * op.in[0].row_step,
                  op.size * sizeof(Number));
    }
    is_cut = chosen && end() > op.chosen;
    if (is_cut)
      for (int64_t query = 0; query < count; ++query) high[query] = std::min(high[query], float(op.chosen - 1));
    all_from = int64_t(*std::max_element(low, low + count));
    all_to = int64_t(*std::min_element(high, high + count)) + 1;
    if (is_tiled()) panels::pack_keys(count, op.size, [&](int64_t query) { return queries + query * op.size; }, query_panel);
  }

  // Whether tiles make the scores: of every range or of none, since they add up in another order
  bool is_tiled() const { return sizeof(Number) == 2 && op.size % score_tiles::STEP == 0 && has_tiles(); }

  template <typename Place>
  void multiply_keys_by_tiles(int64_t num_keys, const Place& place, int64_t from, int64_t to) const {
    const Number* at = keys + place(0) * op.kv_heads * op.size;
    int64_t apart = op.kv_heads * op.size;
    if (place(num_keys - 1) - place(0) != num_keys - 1 || place(0) + RANGE > pass.slot_end(op, row)) {
      for (int64_t j = 0; j < num_keys; ++j) std::copy_n(keys + place(j) * apart, op.size, key_panel + j * op.size);
      at = key_panel, apart = op.size;
    }
    for (int64_t query = from / LANES * LANES; query < to; query += LANES) {
      alignas(64) float found[RANGE * LANES];
      score_tiles::score(at, apart * 2, query_panel + query * 2, op.size, found);
      for (int64_t j = 0; j < RANGE; j += LANES) {
        const uint32_t* rows[LANES];
        for (int64_t r = 0; r < LANES; ++r) rows[r] = reinterpret_cast<const uint32_t*>(found + (j + r) * LANES);
        panels::transpose(rows, LANES, reinterpret_cast<uint32_t*>(scores + query * RANGE + j));
      }
    }
  }

  // Scores of a range's keys with queries [from, to), not yet scaled
  template <typename Place>
  void multiply_keys(int64_t num_keys, const Place& place, int64_t from, int64_t to) const {
    if constexpr (sizeof(Number) == 2)
      if (is_tiled()) return multiply_keys_by_tiles(num_keys, place, from, to);
    const int64_t apart = op.kv_heads * op.size;
    panels::pack_keys(num_keys, op.size, [&](int64_t j) { return keys + place(j) * apart; }, key_panel);
    panels::Fetch next(keys + (place(0) + RANGE) * apart, apart, op.size, num_keys < RANGE ? 0 : RANGE);
    next.divide(panels::steps_of(to - from, op.size / TOGETHER<Number>));
    panels::multiply_rows(to - from, queries + from * op.size, op.size, op.size, key_panel, static_cast<const float*>(nullptr),
                          scores + from * RANGE, RANGE, next, num_keys);
  }

  // The sums of queries [from, to), with the values that are packed.
  void weigh_by_tiles(int64_t num_keys, const float* kept, int64_t from, int64_t to, const State& state, panels::Fetch& next) const {
    next.divide((to - from / LANES * LANES + LANES - 1) / LANES * (rounded_up(op.value_size, WIDTH) / WIDTH));
    for (int64_t d = 0; d < op.value_size; d += WIDTH) {
      Number* const panel = value_panel + d * RANGE;
      std::fill(panel + rounded_up(num_keys, 2) * WIDTH, panel + RANGE * WIDTH, Number(0));  // what is not there has no weight
      for (int64_t query = from / LANES * LANES; query < to; query += LANES) {
        alignas(64) float found[LANES * WIDTH];
        next.step();
        score_tiles::weigh(weights + query * RANGE, RANGE * sizeof(Number), panel, found);
        for (int64_t q = std::max(query, from); q < std::min(query + LANES, to); ++q) {
          float* const sums = state.sums + q * state.step + d;
          for (int64_t v = 0; v < WIDTH; v += LANES)
            store(sums + v, multiply_add(load(sums + v), floats(kept[q]), load(found + (q - query) * WIDTH + v)));
        }
      }
    }
  }

  // A range of positions, begin .. begin + num_keys, the j-th key at place(j), for queries [from, to).
  template <typename Place>
  void range(int64_t begin, int64_t num_keys, const Place& place, int64_t from, int64_t to, const State& state) const {
    multiply_keys(num_keys, place, from, to);
    constexpr int VECTORS = RANGE / LANES;
    float kept[QUERIES];
    alignas(64) float bases[QUERIES];
    std::copy(state.most, state.most + QUERIES, bases);
    const float* const slopes = static_cast<const float*>(op.weight);
    const int64_t first_query = this->first;
    const Floats scale = floats(float(op.scale) * (op.softcap ? 1.f : LOG2_E)), cap = floats(float(op.softcap));
    const bool is_plain = !op.softcap && !slopes && num_keys == RANGE && all_from <= begin && begin + RANGE <= all_to;
    for (int64_t query = from; query < to; ++query) {
      float* const own = scores + query * RANGE;
      Floats most = floats(LEAST);
      if (is_plain) {  // as below, without asking
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const Floats score = load(own + LANES * v) * scale;
          store(own + LANES * v, score);
          most = larger(most, score);
        }
        bases[query] = std::max(bases[query], largest_of(most));
        continue;
      }
      const int64_t first = std::max<int64_t>(0, int64_t(low[query]) - begin);
      const int64_t end = std::min(num_keys, int64_t(high[query]) + 1 - begin);
      Floats slope = floats(0), apart = slope;
      if (slopes) slope = floats(slopes[head * group() + (first_query + query) % group()] * LOG2_E);
      if (slopes) apart = load(COUNTED) - floats(float(start() + depth(token(query))));
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        Floats score = load(own + LANES * v) * scale;
        if (op.softcap) score = hyperbolic_tangent(score / cap) * (cap * floats(LOG2_E));
        if (slopes) score = multiply_add(apart + floats(float(begin + LANES * v)), slope, score);
        const Mask seen = first16(end - LANES * v) & Mask(~first16(first - LANES * v));
        score = choose(seen, score, floats(LEAST));
        store(own + LANES * v, score);
        most = larger(most, score);
      }
      bases[query] = std::max(bases[query], largest_of(most));
    }
    for (int64_t query = from / LANES * LANES; query < to; query += LANES) {
      const Floats most = load(bases + query), base = base_of(most);
      store(kept + query, power_of_two(load(state.most + query) - base));
      store(state.most + query, most);
      store(bases + query, base);
    }
    for (int64_t query = from; query < to; ++query) {
      const float* const own = scores + query * RANGE;
      const Floats base = floats(bases[query]);
      Floats weight[VECTORS];
      Mask broken = 0;  // what is no number must reach the output
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const Floats score = load(own + LANES * v), apart = score - base;
        broken |= is_no_number(apart);
        weight[v] = keep(Mask(~is_equal(score, floats(LEAST))), power_of_two(apart));
        store_some(0xffff, weights + query * RANGE + LANES * v, weight[v]);
      }
      Floats total = multiply_add(load(state.totals + query * LANES), floats(kept[query]),
                                  (weight[0] + weight[1]) + (weight[2] + weight[3]));
      store(state.totals + query * LANES, choose(broken, floats(std::numeric_limits<float>::quiet_NaN()), total));
    }
    const int64_t apart = op.kv_heads * (op.values_in_keys ? op.size : op.value_size);
    panels::pack_values(num_keys, op.value_size, [&](int64_t j) { return values + place(j) * apart; }, value_panel);
    panels::Fetch next(values + (place(0) + RANGE) * apart, apart, op.value_size, num_keys < RANGE ? 0 : RANGE);
    if constexpr (sizeof(Number) == 2)
      if (is_tiled()) return weigh_by_tiles(num_keys, kept, from, to, state, next);
    const int64_t depth = rounded_up(num_keys, TOGETHER<Number>);
    next.divide(panels::steps_of(to - from, depth / TOGETHER<Number>) * (rounded_up(op.value_size, WIDTH) / WIDTH));
    for (int64_t d = 0; d < op.value_size; d += WIDTH)
      panels::multiply_rows(to - from, weights + from * RANGE, RANGE, depth, value_panel + d * RANGE, kept + from,
                            state.sums + from * state.step + d, state.step, next);
  }

  // All ranges of [begin, end) in the list of each token, which begins with a span.
  void chosen_span(int64_t begin, int64_t end, const State& state) const {
    for (int64_t query = 0; query < count;) {
      const int64_t t = token(query), next = std::min(count, (t + 1) * group() - first);
      const int64_t own_end = std::min(end, int64_t(high[query]) + 1);
      const char* const own = chosen + (row * pass.tokens + t) * op.in[1].token_step;
      const float* const list = reinterpret_cast<const float*>(own) + op.in[1].offset;
      for (int64_t at = begin; at < own_end; at += RANGE) {
        const auto place = [&](int64_t j) { return pass.place(row, t, int64_t(list[at + j])); };
        range(at, std::min(RANGE, own_end - at), place, query, next, state);
      }
      query = next;
    }
  }

  // All ranges of positions [begin, end), which begins with a span.
  void span(int64_t begin, int64_t end, const State& state) const {
    if (is_tiled()) score_tiles::shape();
    if (is_cut) {
      chosen_span(begin, end, state);
      begin = end;
    }
    for (int64_t at = std::max(begin, lowest() / RANGE * RANGE); at < end; at += RANGE) {
      const int64_t num_keys = std::min(RANGE, end - at);
      if (!pass.paths || at + num_keys <= start()) {
        range(at, num_keys, [&](int64_t j) { return at + j; }, 0, count, state);
        continue;
      }
      for (int64_t query = 0; query < count;) {  // each token's own path
        const int64_t t = token(query), next = std::min(count, (t + 1) * group() - first);
        const int64_t own = std::min(num_keys, start() + depth(t) + 1 - at);
        const int32_t* const path = pass.path(row, t);
        const auto place = [&](int64_t j) { return at + j < start() ? at + j : start() + path[at + j - start()]; };
        if (own > 0) range(at, own, place, query, next, state);
        query = next;
      }
    }
    if (is_tiled()) tiles::release();
  }

  // What the next span found, put to what those before it did.
  void add(const State& state, const State& next) const {
    alignas(64) float old[QUERIES], now[QUERIES];
    for (int64_t query = 0; query < count; query += LANES) {
      const Floats most = larger(load(state.most + query), load(next.most + query)), base = base_of(most);
      store(old + query, power_of_two(load(state.most + query) - base));
      store(now + query, power_of_two(load(next.most + query) - base));
      store(state.most + query, most);
    }
    const auto join = [&](float* to, const float* from, int64_t size, int64_t query) {
      for (int64_t d = 0; d < size; d += LANES)
        store(to + d, multiply_add(load(from + d), floats(now[query]), load(to + d) * floats(old[query])));
    };
    for (int64_t query = 0; query < count; ++query) {
      join(state.totals + query * LANES, next.totals + query * LANES, LANES, query);
      join(state.sums + query * state.step, next.sums + query * state.step, state.step, query);
    }
  }

  float sink_of(int64_t h) const {
    const Operand& operand = sinks_of(op);
    const int64_t number = operand.offset + h * operand.col_step;
    alignas(64) float found[LANES];
    if (operand.is_bf16) store(found, load_some(1, reinterpret_cast<const bf16*>(sinks) + number));
    else found[0] = reinterpret_cast<const float*>(sinks)[number];
    return found[0];
  }

  // What a query's sums of values are multiplied by.
  Floats part_of(const State& state, int64_t query, int64_t h) const {
    const float total = sum_of(load(state.totals + query * LANES));
    if (!sinks) return floats(1.f / total);
    const Floats most = floats(state.most[query]), sink = floats(sink_of(h) * LOG2_E), base = larger(most, sink);
    const Floats kept = power_of_two(most - base), apart = sink - base;
    const Floats all = multiply_add(floats(total), kept, power_of_two(apart));
    return choose(is_no_number(apart), apart, kept / all);
  }

  void write(const State& state, char* out) const {
    for (int64_t query = 0; query < count; ++query) {
      const int64_t t = token(query), h = head * group() + (first + query) % group();
      Number* to = reinterpret_cast<Number*>(out + (row * pass.tokens + t) * op.out.token_step) + h * op.value_size;
      const Floats part = part_of(state, query, h);
      for (int64_t d = 0; d < op.value_size; d += LANES)
        store_some(first16(op.value_size - d), to + d, load(state.sums + query * state.step + d) * part);
    }
  }
};

template <typename Number>
void run(const Op& op, const Pass& pass, const char* queries, const char* sinks, const char* chosen, char* out, Pool& pool,
         std::vector<char>& found) {
  const int64_t all = pass.tokens * (op.heads / op.kv_heads), blocks = (all + QUERIES - 1) / QUERIES;
  const int64_t units = pass.rows * op.kv_heads * blocks, size = State::floats(op) * sizeof(float);
  int64_t longest = 0;
  for (int64_t b = 0; b < pass.rows; ++b) longest = std::max(longest, pass.end(b));
  const int64_t spans = (longest + SPAN - 1) / SPAN;
  const auto block = [&](int64_t unit) {  // those of one row and block follow one another by KV head, as the cache does
    const int64_t b = unit / op.kv_heads / blocks, n = unit / op.kv_heads % blocks, begin = all * n / blocks;
    return Block<Number>(op, pass, sinks, chosen, b, unit % op.kv_heads, begin, all * (n + 1) / blocks - begin, queries);
  };
  const auto whole = [&](int64_t unit) {
    thread_local std::vector<char> room;
    char* const at = lines(room, 2 * size);
    const State state(op, at), next(op, at + size);
    const auto own = block(unit);
    state.clear(own.count);
    for (int64_t begin = own.lowest() / SPAN * SPAN; begin < own.end(); begin += SPAN) {
      next.clear(own.count);
      own.span(begin, std::min(begin + SPAN, own.end()), next);
      own.add(state, next);
    }
    own.write(state, out);
  };
  if (spans == 1 || units >= 4 * pool.size()) return pool.run(units, whole);
  char* const states = lines(found, units * spans * size);
  pool.run(units * spans, [&](int64_t piece) {  // of one row and block, all KV heads of a span, then the next span
    const int64_t several = op.kv_heads * spans, s = piece % several / op.kv_heads;
    const int64_t unit = piece / several * op.kv_heads + piece % op.kv_heads;
    const State state(op, states + (unit * spans + s) * size);
    const auto own = block(unit);
    state.clear(own.count);
    own.span(s * SPAN, std::min((s + 1) * SPAN, own.end()), state);
  });
  pool.run(units, [&](int64_t unit) {
    thread_local std::vector<char> room;
    const State state(op, lines(room, size));
    const auto own = block(unit);
    state.clear(own.count);
    for (int64_t s = own.lowest() / SPAN; s * SPAN < own.end(); ++s) own.add(state, State(op, states + (unit * spans + s) * size));
    own.write(state, out);
  });
}

}  // namespace attend
