// Attention of a pass over the cache, in the cache's own layout: keys (slots, capacity, KV heads, size), values likewise.
//
// Sixteen queries are the lanes of a vector: all query heads of one KV head, of one token or of several, so that a key is read once for all
// of them. Each lane is computed by itself, and every sum over keys runs down the lane: what a query gets depends on its own keys alone.
//
// Keys are taken by the position they stand at on the query's own path: ranges of 64 positions, each with a largest score, a sum of weights
// and a sum of values of its own, which are put together in order within a span of 512 positions, and the spans in order. Threads divide
// spans among each other, or blocks of lanes; the order is the same. In a chain the key of position p lies at place p; on a tree's path
// behind the prefix it lies where the path says, so a path has the bits that it has alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "functions.h"
#include "pool.h"
#include "program.h"
#include "score_tiles.h"

namespace attend {

constexpr int64_t LANES = 16, RANGE = 64, SPAN = 512;
constexpr int KEYS = IS_WIDE ? 8 : 4;      // whose scores are registers
constexpr int QUERIES = IS_WIDE ? 4 : 2;   // whose sums of values are
constexpr int VECTORS = IS_WIDE ? 4 : 2;   // of sixteen numbers of a value
constexpr float LEAST = -std::numeric_limits<float>::infinity();

// What sixteen queries have found so far. `sums` (lanes, value size), relative to weights e^(score - most).
struct State {
  float most[LANES], total[LANES];
  float sums[];

  static int64_t bytes(const Op& op) { return int64_t(sizeof(State) + sizeof(float) * LANES * op.value_size + 63) / 64 * 64; }
  void clear(const Op& op) {
    std::fill_n(most, LANES, LEAST);
    std::fill_n(total, LANES, 0.f);
    std::fill_n(sums, LANES * op.value_size, 0.f);
  }
};

// Factors that bring what was found, and what is found now, to the larger of both scores; that becomes `most`.
inline void meet(float* most, Floats theirs, Floats& of_old, Floats& of_new) {
  const Floats old = load(most), both = larger(old, theirs);
  const Floats base = choose(is_equal(both, floats(LEAST)), floats(0), both);
  of_old = exponential(old - base);
  of_new = exponential(theirs - base);
  store(most, both);
}

// The sixteen queries of one KV head that a piece is about.
template <typename Number>
struct Block {
  const Op& op;
  const Pass& pass;
  int64_t row, head, first, count;  // lanes [first, first + count) of the row's tokens x heads of this KV head
  const Number *keys, *values;      // of this row and KV head
  alignas(64) float low[LANES], high[LANES];  // positions that each lane sees
  const Number* queries;            // pairs of numbers, or numbers, of all lanes side by side

  int64_t group() const { return op.heads / op.kv_heads; }
  int64_t token(int64_t lane) const { return (first + lane) / group(); }
  int64_t start() const { return pass.starts[row]; }
  int64_t depth(int64_t t) const { return pass.depths ? pass.depths[row * pass.tokens + t] : t; }
  int64_t lowest() const { return int64_t(*std::min_element(low, low + count)); }
  int64_t end() const { return int64_t(*std::max_element(high, high + count)) + 1; }

  Block(const Op& op, const Pass& pass, int64_t row, int64_t head, int64_t first, const Operand& from, const char* block0,
        std::vector<Number>& room)
      : op(op), pass(pass), row(row), head(head), first(first),
        count(std::min(LANES, pass.tokens * (op.heads / op.kv_heads) - first)) {
    const int64_t slot = row * pass.capacity;
    keys = static_cast<const Number*>(pass.keys[op.layer]) + (slot * op.kv_heads + head) * op.size;
    values = static_cast<const Number*>(pass.values[op.layer]) + (slot * op.kv_heads + head) * op.value_size;
    constexpr int64_t together = sizeof(Number) == 2 ? 2 : 1;
    room.assign((op.size + together - 1) / together * together * LANES, Number(0));
    for (int64_t lane = 0; lane < LANES; ++lane) {
      low[lane] = 0, high[lane] = -1;
      if (lane >= count) continue;
      const int64_t t = token(lane), h = head * group() + (first + lane) % group();
      high[lane] = float(start() + depth(t));
      low[lane] = op.window ? std::max(0.f, high[lane] - float(op.window) + 1) : 0.f;
      const char* at = block0 + (row * pass.tokens + t) * from.token_step;
      const Number* query = reinterpret_cast<const Number*>(at) + from.offset + h * from.row_step;
      for (int64_t d = 0; d < op.size; ++d) room[(d / together * LANES + lane) * together + d % together] = query[d];
    }
    queries = room.data();
  }

  // Whether tiles make the scores: of every range or of none, since they add up in another order
  bool is_tiled() const { return sizeof(Number) == 2 && op.size % score_tiles::STEP == 0 && has_tiles(); }

  // Products of a range's keys and the queries: (keys, lanes)
  void products(const int64_t* places, int64_t num_keys, float* scores) const {
    if constexpr (sizeof(Number) == 2)
      if (is_tiled()) {
        const int64_t apart = op.kv_heads * op.size;
        if (places[num_keys - 1] - places[0] == num_keys - 1 && places[0] + RANGE <= pass.capacity)
          return score_tiles::score(keys + places[0] * apart, apart * 2, queries, op.size, scores);
        thread_local std::vector<Number> together;
        together.resize(RANGE * op.size);
        for (int64_t j = 0; j < num_keys; ++j)
          std::copy_n(keys + places[j] * apart, op.size, together.data() + j * op.size);
        return score_tiles::score(together.data(), op.size * 2, queries, op.size, scores);
      }
    int64_t j = 0;
    for (; j + KEYS <= num_keys; j += KEYS) score<KEYS>(places + j, scores + j * LANES);
    for (; j < num_keys; ++j) score<1>(places + j, scores + j * LANES);
  }

  // Those of N keys, in registers
  template <int N>
  void score(const int64_t* places, float* scores) const {
    Floats sum[N];
    const Number* key[N];
    for (int i = 0; i < N; ++i) {
      sum[i] = floats(0);
      key[i] = keys + places[i] * op.kv_heads * op.size;
    }
    if constexpr (sizeof(Number) == 2) {
      for (int64_t d = 0; d + 1 < op.size; d += 2) {
        const Pairs own = load_pairs(queries + d * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[i] = add_products(sum[i], same_pair(key[i] + d), own);
      }
    } else {
      for (int64_t d = 0; d < op.size; ++d) {
        const Floats own = load(queries + d * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[i] = multiply_add(floats(key[i][d]), own, sum[i]);
      }
    }
    for (int i = 0; i < N; ++i) store(scores + i * LANES, sum[i]);
  }

  // sums = sums * old + (weights x values) * now, for N lanes and VECTORS x 16 numbers of each value
  template <int N>
  void mix(const float* weights, const int64_t* places, int64_t num_keys, int64_t d, const float* old, const float* now,
           float* sums) const {
    Mask some[VECTORS];
    Floats sum[N][VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      some[v] = first16(op.value_size - d - 16 * v);
      for (int i = 0; i < N; ++i) sum[i][v] = floats(0);
    }
    for (int64_t j = 0; j < num_keys; ++j) {
      const Number* value = values + places[j] * op.kv_heads * op.value_size + d;
      Floats number[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) number[v] = load_some(some[v], value + 16 * v);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const Floats weight = floats(weights[j * LANES + i]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sum[i][v] = multiply_add(weight, number[v], sum[i][v]);
      }
    }
    for (int i = 0; i < N; ++i)
      for (int v = 0; v < VECTORS; ++v) {
        float* at = sums + i * op.value_size + d + 16 * v;
        const Floats kept = load_some(some[v], at) * floats(old[i]);
        store_some(some[v], at, multiply_add(sum[i][v], floats(now[i]), kept));
      }
  }

  // A range of positions, begin .. begin + num_keys, whose keys lie at `places`, for lanes [from, to).
  void range(int64_t begin, int64_t num_keys, const int64_t* places, int64_t from, int64_t to, State& state) const {
    alignas(64) float scores[RANGE * LANES], old[LANES], now[LANES];
    products(places, num_keys, scores);
    const Floats lowest = load(low), highest = load(high);
    const Mask lanes = first16(to) & Mask(~first16(from));
    Floats most = floats(LEAST);
    Mask seen[RANGE];
    const Floats scale = floats(float(op.scale)), cap = floats(float(op.softcap));
    for (int64_t j = 0; j < num_keys; ++j) {
      Floats score = load(scores + j * LANES) * scale;
      if (op.softcap) score = hyperbolic_tangent(score / cap) * cap;
      store(scores + j * LANES, score);
      const Floats position = floats(float(begin + j));
      seen[j] = is_at_least(position, lowest) & is_at_least(highest, position) & lanes;
      most = choose(seen[j], larger(most, score), most);
    }
    const Floats base = choose(is_equal(most, floats(LEAST)), floats(0), most);
    Floats total = floats(0);
    Mask broken = 0;  // what is no number must reach the output
    for (int64_t j = 0; j < num_keys; ++j) {
      const Floats apart = load(scores + j * LANES) - base;
      broken |= is_no_number(apart) & seen[j];
      const Floats weight = keep(seen[j], exponential(apart));
      store(scores + j * LANES, weight);
      total = total + weight;
    }
    total = choose(broken, floats(std::numeric_limits<float>::quiet_NaN()), total);
    Floats of_old, of_new;
    meet(state.most, most, of_old, of_new);
    store(state.total, load(state.total) * of_old + total * of_new);
    store(old, of_old);
    store(now, of_new);
    for (int64_t lane = from; lane < to; lane += QUERIES)
      for (int64_t d = 0; d < op.value_size; d += 16 * VECTORS) {
        const auto go = [&]<int N>() {
          mix<N>(scores + lane, places, num_keys, d, old + lane, now + lane, state.sums + lane * op.value_size);
        };
        switch (std::min<int64_t>(QUERIES, to - lane)) {
          case 1: go.template operator()<1>(); break;
          case 2: go.template operator()<2>(); break;
          case 3: go.template operator()<QUERIES < 3 ? 1 : 3>(); break;
          default: go.template operator()<QUERIES>(); break;
        }
      }
  }

  // All ranges of positions [begin, end), which begins with a span.
  void span(int64_t begin, int64_t end, State& state) const {
    int64_t places[RANGE];
    if (is_tiled()) score_tiles::shape();
    for (int64_t at = std::max(begin, lowest() / RANGE * RANGE); at < end; at += RANGE) {
      const int64_t num_keys = std::min(RANGE, end - at);
      if (!pass.paths || at + num_keys <= start()) {
        for (int64_t j = 0; j < num_keys; ++j) places[j] = at + j;
        range(at, num_keys, places, 0, count, state);
        continue;
      }
      for (int64_t lane = 0; lane < count;) {  // each token's own path
        const int64_t t = token(lane), next = std::min(count, (t + 1) * group() - first);
        const int64_t own = std::min(num_keys, start() + depth(t) + 1 - at);
        const int32_t* path = pass.paths + (row * pass.tokens + t) * pass.tokens;
        for (int64_t j = 0; j < own; ++j) places[j] = at + j < start() ? at + j : start() + path[at + j - start()];
        if (own > 0) range(at, own, places, lane, next, state);
        lane = next;
      }
    }
    if (is_tiled()) score_tiles::release();
  }
};

// What the next span found, put to what those before it did.
inline void add(State& state, const State& next, const Op& op, int64_t count) {
  alignas(64) float old[LANES], now[LANES];
  Floats of_old, of_new;
  meet(state.most, load(next.most), of_old, of_new);
  store(state.total, load(state.total) * of_old + load(next.total) * of_new);
  store(old, of_old);
  store(now, of_new);
  for (int64_t lane = 0; lane < count; ++lane)
    for (int64_t d = 0; d < op.value_size; d += 16) {
      const Mask some = first16(op.value_size - d);
      float* at = state.sums + lane * op.value_size + d;
      const Floats kept = load_some(some, at) * floats(old[lane]);
      store_some(some, at, multiply_add(load_some(some, next.sums + lane * op.value_size + d), floats(now[lane]), kept));
    }
}

template <typename Number>
void run(const Op& op, const Pass& pass, const char* queries, char* out, Pool& pool, std::vector<char>& found) {
  const int64_t lanes = pass.tokens * (op.heads / op.kv_heads), blocks = (lanes + LANES - 1) / LANES;
  const int64_t units = pass.rows * op.kv_heads * blocks, size = State::bytes(op);
  int64_t longest = 0;
  for (int64_t b = 0; b < pass.rows; ++b) longest = std::max(longest, pass.starts[b] + pass.tokens);
  const int64_t spans = (longest + SPAN - 1) / SPAN;
  const auto block = [&](int64_t unit, std::vector<Number>& room) {
    return Block<Number>(op, pass, unit / blocks / op.kv_heads, unit / blocks % op.kv_heads, unit % blocks * LANES, op.in[0],
                         queries, room);
  };
  const auto write = [&](const Block<Number>& block, const State& state) {
    for (int64_t lane = 0; lane < block.count; ++lane) {
      const int64_t t = block.token(lane), h = block.head * block.group() + (block.first + lane) % block.group();
      Number* to = reinterpret_cast<Number*>(out + (block.row * pass.tokens + t) * op.out.token_step) + h * op.value_size;
      const Floats part = floats(1.f / state.total[lane]);
      for (int64_t d = 0; d < op.value_size; d += 16) {
        const Mask some = first16(op.value_size - d);
        store_some(some, to + d, load_some(some, state.sums + lane * op.value_size + d) * part);
      }
    }
  };
  const auto whole = [&](int64_t unit) {
    thread_local std::vector<Number> room;
    thread_local std::vector<char> states;
    states.resize(2 * size + 64);
    char* aligned = states.data() + (64 - reinterpret_cast<uintptr_t>(states.data()) % 64) % 64;
    State &state = *reinterpret_cast<State*>(aligned), &next = *reinterpret_cast<State*>(aligned + size);
    const auto own = block(unit, room);
    state.clear(op);
    for (int64_t begin = own.lowest() / SPAN * SPAN; begin < own.end(); begin += SPAN) {
      next.clear(op);
      own.span(begin, std::min(begin + SPAN, own.end()), next);
      add(state, next, op, own.count);
    }
    write(own, state);
  };
  if (spans == 1 || units >= 4 * pool.size() || pool.size() == 1) return pool.run(units, whole);
  found.resize(units * spans * size + 64);
  char* states = found.data() + (64 - reinterpret_cast<uintptr_t>(found.data()) % 64) % 64;
  const auto state_of = [&](int64_t unit, int64_t s) -> State& {
    return *reinterpret_cast<State*>(states + (unit * spans + s) * size);
  };
  pool.run(units * spans, [&](int64_t piece) {
    thread_local std::vector<Number> room;
    const int64_t begin = piece % spans * SPAN;
    State& state = state_of(piece / spans, piece % spans);
    const auto own = block(piece / spans, room);
    state.clear(op);
    own.span(begin, std::min(begin + SPAN, own.end()), state);
  });
  pool.run(units, [&](int64_t unit) {
    thread_local std::vector<Number> room;
    thread_local std::vector<char> kept;
    kept.resize(size + 64);
    State& state = *reinterpret_cast<State*>(kept.data() + (64 - reinterpret_cast<uintptr_t>(kept.data()) % 64) % 64);
    const auto own = block(unit, room);
    state.clear(op);
    for (int64_t s = own.lowest() / SPAN; s * SPAN < own.end(); ++s) add(state, state_of(unit, s), op, own.count);
    write(own, state);
  });
}

}  // namespace attend
