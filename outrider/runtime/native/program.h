// A pass as the executor sees it: `outrider/runtime/binding.py` writes these structures, eight bytes a field, in this order.

#pragma once

#include <cstdint>

#include "lanes.h"

enum Code : int64_t {  // as in outrider/runtime/ops.py
  LINEAR = 0, EMBED, ATTENTION, STORE, GATHER, SIGNAL, EXPERTS, CONVOLUTION, DELTA_RULE, SCAN,
  COPY = 10, ADD, SUB, MUL, DIV, NEG, SQUARE, RSQRT, SQRT, TANH, SIGMOID, SILU, GELU, GELU_TANH, RELU, RECIPROCAL, CLAMP,
  EXP, LOG, SOFTPLUS, WHERE, GREATER, AT_LEAST, EQUAL, NOT, LARGER, SMALLER, EXPM1, LOG1P,
  MEAN = 40, SUM, LAYER_NORM, RMS_NORM, SOFTMAX,
  TOP = 50, TAKE, PUT,
  HEADS = 60, CHOICE
};

enum Source : int64_t { NOTHING, BODY, HEAD, CONSTANT, ROTARY, INPUT };  // where a value lies: made by the body or head, or known before

// Numbers of one token: (rows, cols) of them, steps in numbers, 0 where one number serves all.
struct Operand {
  Source source;
  int64_t at;          // BODY, HEAD: bytes a token in front of it; CONSTANT: its address; ROTARY, INPUT: which one
  int64_t token_step;  // bytes from a token's block to the next one's
  int64_t offset, row_step, col_step;
  int64_t is_bf16;
};

enum Format : int64_t { PANELS_BF16, PANELS_FP32, BLOCKS, TABLE, FLOATS, PANELS_CODED };  // of a weight: `linear.h` says how each lies

struct Op {
  Code code;
  int64_t rows, cols;
  Operand out, in[5];
  double numbers[2];
  // LINEAR, EMBED, and EXPERTS and HEADS, whose layers lie one after the other; BLOCKS and FLOATS alone have a form, and inputs that share a scale.
  // ATTENTION: `weight` is null, or ALiBi's slope of each head, fp32; CHOICE: `in[0]` queries, `in[1]` weights of heads
  Format format;
  int64_t form, group;
  const void *weight, *bias;
  int64_t K, N, experts;
  // EMBED: `weight` is the table, N its rows, K their length; the index is `by_position` or by id, `layer` is added to it;
  // one that is not below numbers[0], where that is not 0, counts as 0
  int64_t by_position;
  // STORE, ATTENTION: of this layer; SIGNAL: which one; CONVOLUTION, DELTA_RULE, SCAN: the state
  int64_t layer;
  int64_t is_value;
  int64_t heads, kv_heads, size, value_size;
  int64_t values_in_keys;  // ATTENTION: values are the first numbers of keys, not in memory of their own
  int64_t window;
  int64_t sees_all;  // ATTENTION: each token sees the whole pass
  int64_t is_short;  // STORE, ATTENTION: of a layer whose slots may be short, `Pass::bases`
  int64_t chosen;    // ATTENTION: tokens see these many positions at most, those that in[1] says; 0: all
  double scale, softcap;
};

enum Kind : int64_t { TOKENWISE, LINEARS, ATTENTIONS, EXPERT_LINEARS, RECURRENT };  // how a phase is split among threads

struct Phase {
  Kind kind;
  int64_t begin, end;  // operations
  int64_t is_head;     // over the rows whose logits are asked for
};

struct Program {
  int64_t num_ops, num_phases;
  const Op* ops;
  const Phase* phases;
  int64_t body_bytes, head_bytes;  // of values, a token
  Operand logits;
  int64_t vocab_size, hidden_bytes, is_bf16;
};

// What a pass does to the running states of one row, which have two buffers: `outrider/kv/state_slots.py`.
struct Move {
  int64_t base, begin, end;  // this buffer is brought from the first `begin` tokens forward to the first `end`, by their records
  int64_t source, target;    // the buffers that the pass goes on from, and leaves the state after its last token in
  int64_t is_recorded;       // whether its tokens leave records
};

struct Pass {
  int64_t rows, tokens, capacity;      // B, T, positions of a slot
  const int64_t *ids, *positions;      // (B, T)
  const int64_t* starts;               // (B,) positions in front of the pass
  const int32_t *depths, *paths;       // (B, T), and (B, T, known + T): tree tokens on the way to each one; null: chains
  int64_t known;                       // tokens of each row's tree that the cache holds after `starts`, in front of the pass's own
  void* const* keys;                   // of each layer
  void* const* values;
  const void* const* tables;           // rotary, by position
  const void* const* inputs;           // (B, T) blocks each, that are given with the pass
  void* const* states;                 // of each recurrent operation: (slots, 2, its size) fp32
  void* const* records;                // (slots, num_records, its bytes), of position p at p % num_records
  const Move* moves;                   // (B,), and after them those of the passes that follow in the same call
  int64_t num_records;
  void* const* signals;                // where hidden states go, null where nobody wants them
  const int64_t* columns;              // (K,) tokens of each row whose logits are asked for; (B, K) where rows differ
  int64_t num_columns, rows_differ;
  const int64_t* bases;                // (B,) positions that come first in a short slot; null: none is short
  int64_t short_capacity;              // positions of a short slot
  float* logits;                       // (B, K, V)
  char* arena;                         // of the body's values, then the head's, then what attention leaves
  int64_t* experts_read;               // grows by the experts that each product of experts reads; null where nobody asks

  // The tokens of its tree on the way to a token
  const int32_t* path(int64_t row, int64_t token) const { return paths + (row * tokens + token) * (known + tokens); }
  // The place after the last token of a row
  int64_t end(int64_t row) const { return starts[row] + known + tokens; }
  // The token that a token of a tree follows; none where it follows what the cache holds
  int64_t parent(int64_t row, int64_t token) const {
    const int64_t m = row * tokens + token;
    return depths[m] ? path(row, token)[depths[m] - 1] : -1;
  }
  // Where a position on a token's own path lies in its slot
  int64_t place(int64_t row, int64_t token, int64_t position) const {
    const int64_t inside = position - starts[row];
    return paths && inside >= 0 ? starts[row] + path(row, token)[inside] : position;
  }
  // Where position 0 of a row lies in a layer, in positions; in front of a short slot, of which nobody reads
  int64_t origin(const Op& op, int64_t row) const {
    return op.is_short && bases ? row * short_capacity - bases[row] : row * capacity;
  }
  // The position after the last one of the slot
  int64_t slot_end(const Op& op, int64_t row) const { return op.is_short && bases ? bases[row] + short_capacity : capacity; }
};
