// Linear layers of experts: each token multiplies with the weights of those that it names, a row of its own for each or one for all.
// Those of heads are the same; every token names all of them, in order.
//
// Tokens that name the same expert share a reading of its weights: their rows are put side by side, multiplied by the kernels of
// `linear.h`, and put back. What a row gets depends on nothing but that row, so it does not matter who shares.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "choices.h"
#include "linear.h"
#include "pool.h"
#include "program.h"

namespace experts {

// The choices of one expert among all of a pass, which are numbered token by token.
struct Group {
  int64_t expert, begin, count;  // in `order`
  int64_t first_piece;
  int64_t first_line;  // of its rounded rows, for BLOCKS
};

// All choices in the order of their experts, choices of one expert by token.
struct Division {
  std::vector<int64_t> order, ends;
  std::vector<Group> groups;
  int64_t pieces = 0;

  template <typename Chosen>
  void make(int64_t tokens, int64_t each, int64_t experts, int64_t pieces_of_one, const Chosen& chosen) {
    ends.assign(experts + 1, 0);
    order.resize(tokens * each);
    groups.clear();
    pieces = 0;
    for (int64_t i = 0; i < tokens * each; ++i) ++ends[chosen(i) + 1];
    for (int64_t e = 0; e < experts; ++e) {
      if (ends[e + 1]) {
        groups.push_back({e, ends[e], ends[e + 1], pieces, 0});
        pieces += pieces_of_one;
      }
      ends[e + 1] += ends[e];
    }
    for (int64_t i = 0; i < tokens * each; ++i) order[ends[chosen(i)]++] = i;
  }

  const Group& of(int64_t piece) const {
    return *std::prev(std::upper_bound(groups.begin(), groups.end(), piece, [](int64_t p, const Group& g) { return p < g.first_piece; }));
  }

  // The group of the choice that stands at this place in `order`
  const Group& holding(int64_t place) const {
    return *std::prev(std::upper_bound(groups.begin(), groups.end(), place, [](int64_t p, const Group& g) { return p < g.begin; }));
  }
};

// `x`, `index`, `out`: the blocks of the first token. How many experts were read
inline int64_t run(const Op& op, int64_t tokens, const char* x, const char* index, char* out, Pool& pool, std::vector<char>& room,
                std::vector<Line>& rounded) {
  const int64_t width = op.out.is_bf16 ? 2 : 4, each = op.rows, inputs = op.K * width, outputs = op.N * width;
  const auto row_in = [&](int64_t i) {
    return x + i / each * op.in[0].token_step + (op.in[0].offset + i % each * op.in[0].row_step) * width;
  };
  const auto row_out = [&](int64_t i) {
    return out + i / each * op.out.token_step + (op.out.offset + i % each * op.out.row_step) * width;
  };
  static thread_local Division all;
  Division& division = all;  // the caller's, whichever thread reads it
  division.make(tokens, each, op.experts, linear::num_pieces(op), [&](int64_t i) {
    if (op.code == HEADS) return i % each;
    const tokenwise::Row named = tokenwise::row_of(op.in[1], index + i / each * op.in[1].token_step, 0);
    return choices::index_at(named, i % each, op.experts);
  });
  const bool are_alone = division.groups.size() == division.order.size();  // then rows are read and written where they lie
  const int64_t count = division.order.size();
  const bool in_blocks = op.format == BLOCKS;
  if (!are_alone) room.resize(count * (inputs + outputs));
  if (in_blocks) {
    int64_t needed = 0;
    for (Group& group : division.groups) {
      group.first_line = needed;
      needed += linear::rounded_lines(op, group.count);
    }
    if (int64_t(rounded.size()) < needed) rounded.resize(needed);
    pool.run(count, [&](int64_t p) {
      const Group& group = division.holding(p);
      linear::round_row(op, row_in(division.order[p]), p - group.begin, group.count, rounded.data() + group.first_line);
    });
  } else if (!are_alone) {
    pool.run(count, [&](int64_t p) { std::memcpy(room.data() + p * inputs, row_in(division.order[p]), inputs); });
  }
  pool.run(division.pieces, [&](int64_t piece) {
    const Group& group = division.of(piece);
    Op own = op;
    own.weight = static_cast<const char*>(op.weight) + group.expert * linear::num_panels(op) * linear::panel_bytes(op);
    if (op.bias) own.bias = static_cast<const char*>(op.bias) + group.expert * outputs;
    const int64_t i = division.order[group.begin];
    const void* from = are_alone ? row_in(i) : room.data() + group.begin * inputs;
    if (in_blocks) from = rounded.data() + group.first_line;
    void* const to = are_alone ? row_out(i) : room.data() + count * inputs + group.begin * outputs;
    linear::run_piece(own, piece - group.first_piece, from, group.count, to);
  });
  if (!are_alone)
    pool.run(count, [&](int64_t p) {
      std::memcpy(row_out(division.order[p]), room.data() + count * inputs + p * outputs, outputs);
    });
  return int64_t(division.groups.size());
}

}  // namespace experts
