// Selective scans: each channel's state decays by a factor of its own and takes in the token's value. Mamba 1 and RG-LRU.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "functions.h"
#include "pool.h"
#include "program.h"
#include "recurrent.h"
#include "tokenwise.h"

namespace recurrent {

// Of a scan: a state is (numbers of a channel, channels).
struct Scanned {
  int64_t channels, each;                      // `each`: numbers of a channel's state
  int64_t value_width, step_width, key_width;  // bytes of a number
  const float* rates;                          // (each, channels); null: steps are the decay's factors themselves

  int64_t steps_at() const { return channels * value_width; }
  int64_t keys_at() const { return steps_at() + channels * step_width; }
  int64_t bytes() const { return keys_at() + each * key_width; }
};

// What one token gives all channels; without keys each is 1.
struct Given {
  Row value, step, key;
};

inline Given given_by(const Scanned& s, char* record) {
  return {{record, 1, s.value_width == 2}, {record + s.steps_at(), 1, s.step_width == 2},
          {record + s.keys_at(), 1, s.key_width == 2}};
}

// One token in the sixteen channels from `c` on, whose state is read `apart` numbers after the beginning of `from` and written to
// `to`; what queries read there, where they do.
template <bool READS>
inline Floats scanned(const Scanned& s, const Given& token, const float* keys, const float* queries, int64_t c, Mask some,
                      int64_t apart, Part from, Part to) {
  const Floats value = token.value.read(c, some), step = token.step.read(c, some);
  Floats read = floats(0);
  for (int64_t i = 0; i < s.each; ++i) {
    const Floats decay = s.rates ? any_exponential(load_some(some, s.rates + i * s.channels + c) * step) : step;
    const Floats now = multiply_add(floats(keys[i]), value, load_some(some, from.at + i * from.step + apart) * decay);
    store_some(some, to.at + i * to.step + apart, now);
    if (READS) read = multiply_add(now, floats(queries[i]), read);
  }
  return read;
}

// in: value (channels), step (channels), key and query (each); without these two a state is one number, and is what is read.
// `weight`: the rates that steps are multiplied by to be logs of decays, (each, channels) fp32, or null
template <typename At>
void scan(const Op& op, const Pass& pass, const At& at, Pool& pool) {
  const auto width = [&](int64_t i) { return op.in[i].source == NOTHING ? 0 : op.in[i].is_bf16 ? 2 : 4; };
  const Scanned s{op.cols, op.size, width(0), width(1), width(2), static_cast<const float*>(op.weight)};
  const int64_t blocks = (s.channels + CHANNELS - 1) / CHANNELS;
  pool.run(pass.rows * blocks, [&](int64_t piece) {
    const int64_t b = piece / blocks, first = piece % blocks * CHANNELS, end = std::min(s.channels, first + CHANNELS);
    const Move& move = pass.moves[b];
    const Slot slot = slot_of(op, pass, b, s.each * s.channels, s.bytes());
    const auto own = [&](int64_t which) { return Part{slot.buffer(which) + first, s.channels}; };
    const auto clear = [&](Part state) {
      for (int64_t i = 0; i < s.each; ++i) std::memset(state.at + i * state.step, 0, (end - first) * sizeof(float));
    };
    thread_local std::vector<float> keys, queries;
    keys.assign(s.each, 1), queries.assign(s.each, 1);
    const auto widened = [&](const Row& row, std::vector<float>& to) {
      for (int64_t i = 0; s.key_width && i < s.each; ++i) to[i] = row.one(i);
    };
    const Part base = own(move.base);
    if (move.end > move.begin && move.begin == 0) clear(base);
    for (int64_t p = move.begin; p < move.end; ++p) {
      const Given token = given_by(s, slot.record(p));
      widened(token.key, keys);
      for (int64_t c = first; c < end; c += 16)
        scanned<false>(s, token, keys.data(), nullptr, c, first16(end - c), c - first, base, base);
    }
    const Branches branches(pass, b, s.each, end - first);
    Part from = own(move.source), to = own(move.target);
    if (pass.starts[b] == 0) clear(to), from = to;
    const Part start = from;
    for (int64_t t = 0; t < pass.tokens; ++t, from = to) {
      if (pass.depths) from = branches.before(t, start), to = branches.of(t);
      const auto row = [&](int64_t i) { return row_of(op.in[i], at(op.in[i], b * pass.tokens + t), 0); };
      const Given token{row(0), row(1), s.key_width ? row(2) : Row{}};
      widened(token.key, keys);
      if (s.key_width) widened(row(3), queries);
      const Row out = row_of(op.out, at(op.out, b * pass.tokens + t), 0);
      const Given kept = given_by(s, slot.record(pass.starts[b] + t));
      for (int64_t c = first; c < end; c += 16) {
        const Mask some = first16(end - c);
        out.write(c, some, scanned<true>(s, token, keys.data(), queries.data(), c, some, c - first, from, to));
        if (!move.is_recorded) continue;
        kept.value.write(c, some, token.value.read(c, some));
        kept.step.write(c, some, token.step.read(c, some));
      }
      if (!move.is_recorded || first || !s.key_width) continue;
      for (int64_t c = 0; c < s.each; c += 16) kept.key.write(c, first16(s.each - c), token.key.read(c, first16(s.each - c)));
    }
  });
}

}  // namespace recurrent
