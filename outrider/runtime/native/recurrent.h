// Operations that keep a running state of each row: short convolutions, and linear attention by the gated delta rule or without it.
//
// One token after the other, in one order of sums whatever the pass holds: so a state has the same bits however a text was cut into
// passes, and tokens that were kept of a draft are brought into it again (`Move`) in the arithmetic that they were passed in.
//
// In a tree each token goes on from the state of the one that it follows, all of which the thread holds while the pass lasts. It
// leaves records, as a chain does, and no state after its last token.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "functions.h"
#include "pool.h"
#include "program.h"
#include "tokenwise.h"

namespace recurrent {

using tokenwise::Row;
using tokenwise::row_of;

// The states and records of one row's slot.
struct Slot {
  float* states;
  int64_t size;  // numbers of a buffer
  char* records;
  int64_t bytes, num_records;

  float* buffer(int64_t which) const { return states + which * size; }
  char* record(int64_t position) const { return records + position % num_records * bytes; }
};

inline Slot slot_of(const Op& op, const Pass& pass, int64_t b, int64_t size, int64_t bytes) {
  return {static_cast<float*>(pass.states[op.layer]) + b * 2 * size, size,
          static_cast<char*>(pass.records[op.layer]) + b * pass.num_records * bytes, bytes, pass.num_records};
}

// Part of a state: a matrix with some of a state's columns, `step` numbers from a row to the next one.
struct Part {
  float* at;
  int64_t step;
};

// What the tokens of a tree leave in a part (rows, columns) of a state, by token.
class Branches {
 public:
  Branches(const Pass& pass, int64_t row, int64_t rows, int64_t columns)
      : pass_(pass), row_(row), step_((columns + 15) / 16 * 16), size_(rows * step_) {
    if (!pass.depths) return;
    if (int64_t(held_.size()) < pass.tokens * size_) held_.resize(pass.tokens * size_);
    followed_.assign(pass.tokens, 0);
    for (int64_t t = 1; t < pass.tokens; ++t)
      if (const int64_t parent = pass.parent(row, t); parent >= 0) followed_[parent] = 1;
  }
  Part of(int64_t token) const { return {held_.data() + token * size_, step_}; }
  // Whether a token's state is needed again
  bool is_followed(int64_t token) const { return !pass_.depths || followed_[token]; }
  // The part that a token of the tree goes on from: `first` where it follows nothing of the pass
  Part before(int64_t token, Part first) const {
    const int64_t parent = pass_.parent(row_, token);
    return parent < 0 ? first : of(parent);
  }

 private:
  inline static thread_local std::vector<float> held_;
  inline static thread_local std::vector<char> followed_;
  const Pass& pass_;
  int64_t row_, step_, size_;
};

// Sixteen numbers as their dtype has them
inline Floats as_stored(Floats x, bool is_bf16) {
  if (!is_bf16) return x;
  alignas(32) bf16 stored[16];
  store_some(0xffff, stored, x);
  return load(stored);
}

// ---------------------------------------------------------------- short convolutions

constexpr int64_t CHANNELS = 256;  // that one thread takes
constexpr int64_t MAX_WIDTH = 8;

// The last inputs of sixteen channels, the newest last: as a state (width - 1, channels).
struct Window {
  Floats held[MAX_WIDTH];
  int64_t count, channels;

  void read(const float* state, int64_t c, Mask some) {
    for (int64_t i = 0; i < count; ++i) held[i] = load_some(some, state + i * channels + c);
  }
  void write(float* state, int64_t c, Mask some) const {
    for (int64_t i = 0; i < count; ++i) store_some(some, state + i * channels + c, held[i]);
  }
  void clear() {
    for (int64_t i = 0; i < count; ++i) held[i] = floats(0);
  }
  void push(Floats x) {
    for (int64_t i = 0; i + 1 < count; ++i) held[i] = held[i + 1];
    if (count) held[count - 1] = x;
  }
};

// in[0] x (channels); weight (width, channels), bias (channels) or null, fp32; K is the width
template <typename At>
void convolve(const Op& op, const Pass& pass, const At& at, Pool& pool) {
  const int64_t channels = op.cols, width = op.K, blocks = (channels + CHANNELS - 1) / CHANNELS;
  const bool is_bf16 = op.in[0].is_bf16;
  const float *const weight = static_cast<const float*>(op.weight), *const bias = static_cast<const float*>(op.bias);
  pool.run(pass.rows * blocks, [&](int64_t piece) {
    const int64_t b = piece / blocks, first = piece % blocks * CHANNELS, end = std::min(channels, first + CHANNELS);
    const Move& move = pass.moves[b];
    const Slot slot = slot_of(op, pass, b, (width - 1) * channels, channels * (is_bf16 ? 2 : 4));
    const auto record = [&](int64_t position) { return Row{slot.record(position), 1, is_bf16}; };
    Window window{{}, width - 1, channels};
    thread_local std::vector<Window> branches;  // in a tree, after each token
    if (pass.depths) branches.resize(pass.tokens);
    for (int64_t c = first; c < end; c += 16) {
      const Mask some = first16(end - c);
      if (move.end > move.begin) {
        if (move.begin) window.read(slot.buffer(move.base), c, some);
        else window.clear();
        for (int64_t p = move.begin; p < move.end; ++p) window.push(record(p).read(c, some));
        window.write(slot.buffer(move.base), c, some);
      }
      if (pass.starts[b] == 0) window.clear();
      else window.read(slot.buffer(move.source), c, some);
      for (int64_t t = 0; t < pass.tokens; ++t) {
        const int64_t m = b * pass.tokens + t, parent = pass.depths ? pass.parent(b, t) : -1;
        if (parent >= 0) window = branches[parent];
        const Floats x = row_of(op.in[0], at(op.in[0], m), 0).read(c, some);
        Floats sum = bias ? load_some(some, bias + c) : floats(0);
        for (int64_t i = 0; i + 1 < width; ++i) sum = multiply_add(load_some(some, weight + i * channels + c), window.held[i], sum);
        sum = as_stored(multiply_add(load_some(some, weight + (width - 1) * channels + c), x, sum), op.out.is_bf16);
        row_of(op.out, at(op.out, m), 0).write(c, some, op.numbers[0] != 0 ? sum * sigmoid(sum) : sum);
        if (move.is_recorded) record(pass.starts[b] + t).write(c, some, x);
        window.push(x);
        if (pass.depths) branches[t] = window;
      }
      if (!pass.depths) window.write(slot.buffer(move.target), c, some);
    }
  });
}

// ---------------------------------------------------------------- the gated delta rule

// A state is (heads, key size, value size). Its columns do not know of one another, so each thread takes some of one head's.
constexpr int64_t VECTORS = IS_WIDE ? 8 : 4;
constexpr int64_t COLUMNS = 16 * VECTORS;

struct Sizes {
  int64_t heads, key_heads, key, value, decays;  // decays: of a head, one or one for each number of a key
  int64_t width;                                 // bytes of a number of keys and values
  bool corrects;                                 // whether what the state has for a key is taken from its value, by beta

  int64_t values_at() const { return key_heads * key * width; }
  int64_t decays_at() const { return values_at() + heads * value * width; }
  int64_t betas_at() const { return decays_at() + heads * decays * 4; }
  int64_t bytes() const { return betas_at() + heads * 4; }
};

// What one token gives one head.
struct Token {
  Row key, value, decay, beta;
};

inline Token recorded(const Sizes& s, char* record, int64_t h) {
  const int64_t group = h / (s.heads / s.key_heads);
  return {{record + group * s.key * s.width, 1, s.width == 2},
          {record + s.values_at() + h * s.value * s.width, 1, s.width == 2},
          {record + s.decays_at() + h * s.decays * 4, 1, false},
          {record + s.betas_at() + h * 4, 1, false}};
}

// `to` = numbers * factor, over their length where `epsilon` is not 0
// (never inlined: what is recorded and what is passed must be the same code)
__attribute__((noinline)) inline void scaled(const Row& x, int64_t count, double epsilon, float factor, float* to) {
  if (epsilon != 0) {
    const float squares = tokenwise::sum(count, [&](int64_t c, Mask some) { const Floats one = x.read(c, some); return one * one; });
    factor = factor / std::sqrt(squares + float(epsilon));
  }
  for (int64_t c = 0; c < count; c += 16) store_some(first16(count - c), to + c, x.read(c, first16(count - c)) * floats(factor));
}

// What a thread needs of a token: its key, its query and the factors of its decay, by number of a key.
struct Scratch {
  std::vector<float> key, query, decay;
};

inline void prepare(const Sizes& s, const Token& token, double epsilon, Scratch& room) {
  scaled(token.key, s.key, epsilon, 1, room.key.data());
  for (int64_t c = 0; c < s.decays; c += 16) {
    const Mask some = first16(s.decays - c);
    store_some(some, room.decay.data() + c, any_exponential(token.decay.read(c, some)));
  }
  if (s.decays == 1) std::fill(room.decay.begin() + 1, room.decay.begin() + s.key, room.decay[0]);
}

// One token in some columns of a head's state, read at `from` and written to `to`; what its query reads there goes to `out`.
template <bool READS, bool WRITES = true>
inline void update(const Sizes& s, const Scratch& room, const Token& token, int64_t first, int64_t count, Part from, Part to,
                   const Row* out) {
  const float *const key = room.key.data(), *const query = room.query.data(), *const decay = room.decay.data();
  Mask some[VECTORS];
  Floats held[VECTORS], read[VECTORS];
  for (int64_t v = 0; v < VECTORS; ++v) some[v] = first16(count - 16 * v), held[v] = read[v] = floats(0);
  if (s.corrects) {
    for (int64_t i = 0; i < s.key; ++i) {
      const Floats k = floats(key[i]), d = floats(decay[i]);
      for (int64_t v = 0; v < VECTORS; ++v)
        held[v] = multiply_add(load_some(some[v], from.at + i * from.step + 16 * v) * d, k, held[v]);
    }
    const Floats beta = floats(token.beta.one(0));
    for (int64_t v = 0; v < VECTORS; ++v) held[v] = (token.value.read(first + 16 * v, some[v]) - held[v]) * beta;
  } else {
    for (int64_t v = 0; v < VECTORS; ++v) held[v] = token.value.read(first + 16 * v, some[v]);
  }
  for (int64_t i = 0; i < s.key; ++i) {
    const Floats k = floats(key[i]), d = floats(decay[i]), q = READS ? floats(query[i]) : k;
    for (int64_t v = 0; v < VECTORS; ++v) {
      const Floats now = multiply_add(k, held[v], load_some(some[v], from.at + i * from.step + 16 * v) * d);
      if (WRITES) store_some(some[v], to.at + i * to.step + 16 * v, now);
      if (READS) read[v] = multiply_add(now, q, read[v]);
    }
  }
  if (READS) {
    for (int64_t v = 0; v < VECTORS; ++v)
      if (some[v]) out->write(first + 16 * v, some[v], read[v]);
  }
}

// in: query and key (key heads, size), value (heads, value size), log of decay (heads, 1 or size), beta (heads, 1). Without beta
// values are added as they are, which is Mamba 2's recurrence.
template <typename At>
void delta_rule(const Op& op, const Pass& pass, const At& at, Pool& pool) {
  const Sizes s{op.heads, op.kv_heads, op.size, op.value_size, op.N, op.in[1].is_bf16 ? 2 : 4, op.in[4].source != NOTHING};
  const int64_t blocks = (s.value + COLUMNS - 1) / COLUMNS, pieces = s.heads * blocks;
  pool.run(pass.rows * pieces, [&](int64_t piece) {
    const int64_t b = piece / pieces, h = piece % pieces / blocks, first = piece % blocks * COLUMNS;
    const int64_t count = std::min(COLUMNS, s.value - first), group = h / (s.heads / s.key_heads);
    const Move& move = pass.moves[b];
    const Slot slot = slot_of(op, pass, b, s.heads * s.key * s.value, s.bytes());
    const auto own = [&](int64_t which) { return Part{slot.buffer(which) + h * s.key * s.value + first, s.value}; };
    const auto clear = [&](Part state) {
      for (int64_t i = 0; i < s.key; ++i) std::memset(state.at + i * state.step, 0, count * sizeof(float));
    };
    thread_local Scratch room;
    for (auto* each : {&room.key, &room.query, &room.decay}) each->resize(s.key + 16);
    if (move.end > move.begin && move.begin == 0) clear(own(move.base));
    for (int64_t p = move.begin; p < move.end; ++p) {
      const Token token = recorded(s, slot.record(p), h);
      prepare(s, token, op.numbers[0], room);
      update<false>(s, room, token, first, count, own(move.base), own(move.base), nullptr);
    }
    const Branches branches(pass, b, s.key, count);
    Part from = own(move.source), to = own(move.target);
    if (pass.starts[b] == 0) clear(to), from = to;
    const Part start = from;
    for (int64_t t = 0; t < pass.tokens; ++t, from = to) {
      const int64_t m = b * pass.tokens + t;
      if (pass.depths) from = branches.before(t, start), to = branches.of(t);
      const Token token{row_of(op.in[1], at(op.in[1], m), group), row_of(op.in[2], at(op.in[2], m), h),
                        row_of(op.in[3], at(op.in[3], m), h), s.corrects ? row_of(op.in[4], at(op.in[4], m), h) : Row{}};
      prepare(s, token, op.numbers[0], room);
      scaled(row_of(op.in[0], at(op.in[0], m), group), s.key, op.numbers[0], float(op.scale), room.query.data());
      const Row out = row_of(op.out, at(op.out, m), h);
      if (branches.is_followed(t)) update<true>(s, room, token, first, count, from, to, &out);
      else update<true, false>(s, room, token, first, count, from, to, &out);
      if (!move.is_recorded) continue;
      const Token kept = recorded(s, slot.record(pass.starts[b] + t), h);
      const auto copy = [](const Row& x, const Row& to, int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; c += 16) to.write(c, first16(end - c), x.read(c, first16(end - c)));
      };
      copy(token.value, kept.value, first, first + count);
      if (first) continue;
      copy(token.decay, kept.decay, 0, s.decays);
      if (s.corrects) copy(token.beta, kept.beta, 0, 1);
      if (h % (s.heads / s.key_heads) == 0) copy(token.key, kept.key, 0, s.key);
    }
  });
}

}  // namespace recurrent
