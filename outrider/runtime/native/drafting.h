// Chains of draft tokens for a batch: a pass that catches up, a token picked for each row, a pass over these, and so on; or one pass that
// makes the logits of all tokens, which at most the token before corrects.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "picks.h"
#include "pool.h"
#include "program.h"

// What a draft is made with beside its first pass, in which row b may end before its last token: at columns[b].
struct Drafting {
  int64_t nodes;               // tokens that each row gets
  int64_t vocab;               // V, of tokens and laws; the program's logits may be of another one
  int64_t last_position;       // none beyond is known; what stands there is cut off later
  const int64_t* sources;      // (V,) where the logit of each token stands, -1: nowhere; null: in its own place, as far as there is one
  int64_t feeds_sources;       // the next pass is fed the source of a token, not the token
  double outside;              // the logit of tokens that have none
  const double* options;       // (B, 4), see laws.h; temperature 0: the likeliest token, of equals the lowest id
  const double* uniforms;      // (B, nodes) of rows that draw
  const double* const* noise;  // (B, nodes) tables (V,) of rows that race, null of others
  float* const* laws;          // (B,) tables (nodes, V) that the laws of rows that draw are written to, null of others
  int64_t* found;              // (B, nodes) the tokens
  const char* carried;         // where passes leave a hidden state of each token, which the next pass is given; null: none is
  int64_t carried_bytes;       // of one
};

// A draft that one pass makes, with what it is preceded and corrected by; of passes that are null there is none.
struct Levels {
  const Program* context;      // reads what the cache lacks
  const Pass* unread;
  const Program* block;        // makes logits (B, K, width): the k-th are those of a row's k-th token
  const Pass* pass;
  const Program* correction;   // of one token a row: makes a level's logits of the token before (its id) and those of `block` (its
  const Pass* corrected;       //   first input, fp32), and where the draft has something carried, of that (its second)
  const Drafting* drafting;    // null: `pass` alone is wanted; else `carried` is a hidden state of the tokens of `pass`
};

namespace drafting {

inline int64_t source_of(const Drafting& d, int64_t token) { return d.sources ? d.sources[token] : token; }

// Scores of the tokens from the program's logits (width,): those themselves where nothing has to be moved
inline const float* scores_of(const Drafting& d, const float* logits, int64_t width) {
  if (!d.sources && width >= d.vocab) return logits;
  thread_local std::vector<float> room;
  room.resize(d.vocab);
  for (int64_t v = 0; v < d.vocab; ++v) {
    const int64_t source = source_of(d, v);
    room[v] = source < 0 || source >= width ? float(d.outside) : logits[source];
  }
  return room.data();
}

// The token of row b at this node; -1 where its scores are none to pick from
inline int64_t pick(const Drafting& d, const float* scores, int64_t b, int64_t node) {
  Options own;
  std::memcpy(&own, d.options + 4 * b, sizeof own);
  if (own.temperature == 0) return largest(scores, d.vocab);
  thread_local Scratch scratch;
  thread_local std::vector<float> room;
  const double* noise = d.noise ? d.noise[b * d.nodes + node] : nullptr;
  if (noise) room.resize(d.vocab);
  float* law = noise ? room.data() : d.laws[b] + node * d.vocab;
  if (!picks::make_law(scores, d.vocab, own, law, scratch)) return -1;
  return noise ? winner(law, noise, d.vocab) : drawn(law, d.vocab, d.uniforms[b * d.nodes + node]);
}

// `run(pass)` makes the logits of a pass. False where a row's are none to pick from; what was found is worth nothing then.
template <typename Run>
bool run_chain(const Drafting& d, const Pass& first, int64_t width, Pool& pool, const Run& run) {
  const int64_t B = first.rows;
  std::vector<int64_t> ids(B), positions(B), starts(first.starts, first.starts + B), ends(first.columns, first.columns + B);
  std::vector<char> given(d.carried ? B * d.carried_bytes : 0);
  const void* const inputs[] = {given.data()};
  Pass pass = first;
  for (int64_t node = 0;; ++node) {
    run(pass);
    std::atomic<bool> is_whole = true;
    pool.run(B, [&](int64_t b) {
      const int64_t token = pick(d, scores_of(d, pass.logits + b * width, width), b, node);
      if (token < 0) is_whole = false;
      d.found[b * d.nodes + node] = token;
    });
    if (!is_whole) return false;
    if (node + 1 == d.nodes) return true;
    for (int64_t b = 0; b < B; ++b) {
      const int64_t token = d.found[b * d.nodes + node];
      if (d.carried) std::memcpy(given.data() + b * d.carried_bytes, d.carried + (b * pass.tokens + ends[b]) * d.carried_bytes, d.carried_bytes);
      ids[b] = d.feeds_sources ? source_of(d, token) : token;
      starts[b] += ends[b] + 1;
      positions[b] = std::min(starts[b], d.last_position);
      ends[b] = 0;
    }
    pass.tokens = 1;
    if (pass.moves) pass.moves += B;
    pass.ids = ids.data(), pass.positions = positions.data(), pass.starts = starts.data(), pass.columns = ends.data();
    if (d.carried) pass.inputs = inputs;
  }
}

// Picks the tokens of these levels, whose logits lie `apart` from one another, those of two rows `rows_apart`. False as above.
inline bool pick_levels(const Drafting& d, int64_t B, int64_t begin, int64_t end, const float* logits, int64_t apart, int64_t rows_apart,
                        int64_t width, Pool& pool) {
  std::atomic<bool> is_whole = true;
  pool.run(B * (end - begin), [&](int64_t piece) {
    const int64_t b = piece / (end - begin), node = piece % (end - begin);
    const int64_t token = pick(d, scores_of(d, logits + node * apart + b * rows_apart, width), b, begin + node);
    if (token < 0) is_whole = false;
    d.found[b * d.nodes + begin + node] = token;
  });
  return is_whole;
}

// `run(program, pass)` makes a pass.
template <typename Run>
bool run_levels(const Levels& all, Pool& pool, const Run& run) {
  if (all.unread) run(*all.context, *all.unread);
  run(*all.block, *all.pass);
  if (!all.drafting) return true;
  const Drafting& d = *all.drafting;
  const Pass& block = *all.pass;
  const int64_t B = block.rows, K = block.num_columns, width = all.block->vocab_size;
  if (!all.correction) return pick_levels(d, B, 0, d.nodes, block.logits, width, K * width, width, pool);
  std::vector<int64_t> before(B);
  std::vector<float> logits(B * width);
  std::vector<char> states(d.carried ? B * d.carried_bytes : 0);
  const void* const inputs[] = {logits.data(), states.data()};
  Pass pass = *all.corrected;
  pass.ids = before.data(), pass.inputs = inputs;
  for (int64_t node = 0; node < d.nodes; ++node) {
    for (int64_t b = 0; b < B; ++b) {
      before[b] = node ? d.found[b * d.nodes + node - 1] : block.ids[b * block.tokens];
      std::memcpy(logits.data() + b * width, block.logits + (b * K + node) * width, width * sizeof(float));
      if (d.carried)
        std::memcpy(states.data() + b * d.carried_bytes, d.carried + (b * block.tokens + block.columns[node]) * d.carried_bytes, d.carried_bytes);
    }
    run(*all.correction, pass);
    if (!pick_levels(d, B, node, node + 1, pass.logits, 0, width, width, pool)) return false;
  }
  return true;
}

}  // namespace drafting
