// Best-first trees of draft tokens for a batch: a pass that catches up, the likeliest children of each row's best nodes, a pass over these
// nodes, and so on, level by level; the best nodes of all make the draft. The rule is that of BestFirstGrowth in outrider/trees/growth.py.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "pool.h"
#include "program.h"
#include "top_tokens.h"

// What trees are grown with beside their first pass, in which row b may end before its last token: at columns[b].
struct Growing {
  int64_t nodes;               // N: room of each row's tree
  int64_t top_k, max_depth;    // nodes that a level expands, children of each; levels
  double min_gain;             // growth ends with a level that adds fewer expected accepted tokens
  int64_t width;               // scores that count, of each output's
  int64_t last_position;       // none beyond is known
  const int64_t* budgets;      // (B,) nodes of each row; 0: none
  const double* temperatures;  // (B,)
  const double* const* noise;  // (B, max_depth) tables of rows that race, by the depth of the parent, null of others
  const int64_t* known;        // (V',) ids of the tokens that have scores; null: their own indices
  char* carried;               // where passes leave a hidden state of each token, which its children are given; null: none is
  int64_t carried_bytes;       // of one
  int64_t* lengths;            // (B,) nodes of each draft
  int64_t *tokens, *parents;   // (B, N)
  double* values;              // (B, N) of every node the product of the shares on its path
  int64_t* fed;                // (B, N) which of the tokens after the first pass a node was; -1: none
};

namespace growing {

// One row's tree; output 0 follows the pending token, output 1 + n node n.
class Tree {
 public:
  std::vector<int64_t> tokens, parents, depths;
  std::vector<int64_t> fed_at;       // of every node, which of the tokens after the first pass it was; -1: it was not fed
  std::vector<int64_t> frontier{0};  // outputs that get children
  std::vector<char> features;        // of the nodes that are fed now, what they are given
  int64_t top_k;

  Tree(const Growing& g, int64_t budget)
      : top_k(std::min({g.top_k, budget, g.width})), budget_(budget), expanded_(std::min(g.top_k, budget)),
        levels_left_(std::min(g.max_depth, budget)), min_gain_(g.min_gain) {}

  bool wants() const { return levels_left_ > 0; }

  // The children of every output of the frontier: ids and shares (., top_k)
  void add(const int64_t* ids, const float* shares) {
    const double before = best_sum();
    const int64_t first = int64_t(tokens.size());
    for (const int64_t output : frontier)
      for (int64_t rank = 0; rank < top_k; ++rank, ++ids, ++shares) {
        tokens.push_back(*ids);
        parents.push_back(output - 1);
        depths.push_back(output ? depths[output - 1] + 1 : 0);
        fed_at.push_back(-1);
        values_.push_back(*shares > 0 ? values_[output] * double(*shares) : 0.);
      }
    std::vector<int64_t> level(int64_t(tokens.size()) - first);
    std::iota(level.begin(), level.end(), first + 1);
    std::stable_sort(level.begin(), level.end(), [&](int64_t a, int64_t b) { return values_[a] > values_[b]; });
    level.resize(std::min(int64_t(level.size()), expanded_));
    std::sort(level.begin(), level.end());
    frontier = std::move(level);
    --levels_left_;
    if (best_sum() - before < min_gain_) levels_left_ = 0;
  }

  // The frontier's nodes are fed next, from token `known` on; what the pass before left of its own, from token `before` on, is in `states`
  void feed(const Growing& g, int64_t known, int64_t before, const char* states, const char* pending_state) {
    features.clear();
    for (const int64_t output : frontier) {
      const int64_t node = output - 1, parent = parents[node];
      const char* const state = parent < 0 ? pending_state : states + (fed_at[parent] - before) * g.carried_bytes;
      if (g.carried) features.insert(features.end(), state, state + g.carried_bytes);
      fed_at[node] = known++;
    }
  }

  double value(int64_t node) const { return values_[node + 1]; }

  // Nodes of the draft, parents before their children
  std::vector<int64_t> chosen() const {
    std::vector<int64_t> nodes = best();
    std::sort(nodes.begin(), nodes.end());
    return nodes;
  }

 private:
  // A path's value only falls and ties go to the earlier node, so the ancestors of a chosen node are chosen, too
  std::vector<int64_t> best() const {
    std::vector<int64_t> nodes;
    for (int64_t node = 0; node < int64_t(tokens.size()); ++node)
      if (values_[node + 1] > 0) nodes.push_back(node);
    std::stable_sort(nodes.begin(), nodes.end(), [&](int64_t a, int64_t b) { return values_[a + 1] > values_[b + 1]; });
    nodes.resize(std::min(int64_t(nodes.size()), budget_));
    return nodes;
  }

  double best_sum() const {
    double sum = 0;
    for (const int64_t node : best()) sum += values_[node + 1];
    return sum;
  }

  std::vector<double> values_{1};  // of every output: the product of the shares on its path
  int64_t budget_, expanded_, levels_left_;
  double min_gain_;
};

// A pass after the first one: every row's frontier, at depths and on paths of its own, after `known` nodes that the cache holds.
struct Feed {
  std::vector<int64_t> ids, positions, columns;
  std::vector<int32_t> depths, paths;
  std::vector<char> features;

  void lay_out(const Growing& g, const std::vector<Tree>& trees, const std::vector<int64_t>& starts, int64_t known, int64_t T) {
    const int64_t B = int64_t(trees.size());
    ids.assign(B * T, 0), positions.assign(B * T, 0), columns.assign(B * T, 0), depths.assign(B * T, 0);
    paths.assign(B * T * (known + T), 0);
    features.assign(g.carried ? B * T * g.carried_bytes : 0, 0);
    for (int64_t b = 0; b < B; ++b) {
      const Tree& tree = trees[b];
      for (int64_t t = 0; t < T; ++t) {
        const int64_t m = b * T + t;
        int32_t* const path = paths.data() + m * (known + T);
        positions[m] = std::min(starts[b], g.last_position);
        path[0] = int32_t(known + t);  // of what stands in for a node
        if (!tree.wants() || t >= int64_t(tree.frontier.size())) continue;
        int64_t node = tree.frontier[t] - 1;
        columns[m] = t;
        ids[m] = tree.tokens[node];
        depths[m] = int32_t(tree.depths[node]);
        positions[m] = std::min(starts[b] + depths[m], g.last_position);
        for (int64_t d = depths[m]; d >= 0; --d, node = tree.parents[node]) path[d] = int32_t(tree.fed_at[node]);
      }
      if (tree.wants()) std::copy(tree.features.begin(), tree.features.end(), features.begin() + b * T * g.carried_bytes);
    }
  }
};

// The likeliest children of an output, in the softmax of its scores, and for a row that races with its noise: ids and shares (tree.top_k).
// False where scores are none to rank.
inline bool rank(const Growing& g, const Tree& tree, int64_t b, int64_t depth, const float* scores, int64_t* ids, float* shares) {
  thread_local std::vector<float> room;
  thread_local std::vector<top_tokens::Found> found;
  const double temperature = g.temperatures[b];
  if (const double* const noise = g.noise[b * g.max_depth + depth]) {
    room.resize(g.width);
    for (int64_t v = 0; v < g.width; ++v) room[v] = float(std::fma(temperature, noise[g.known ? g.known[v] : v], double(scores[v])));
    scores = room.data();
  }
  top_tokens::find(scores, g.width, tree.top_k, found);
  if (int64_t(found.size()) < tree.top_k) return false;
  top_tokens::share(scores, g.width, float(temperature), found, tree.top_k, shares);
  for (int64_t rank = 0; rank < tree.top_k; ++rank) {
    if (!std::isfinite(shares[rank])) return false;
    ids[rank] = g.known ? g.known[found[rank].id] : found[rank].id;
  }
  return true;
}

// Lays down the best nodes of a tree
inline void finish(const Growing& g, const Tree& tree, int64_t b) {
  const std::vector<int64_t> chosen = tree.chosen();
  g.lengths[b] = int64_t(chosen.size());
  for (int64_t n = 0; n < g.nodes; ++n) {
    const int64_t at = b * g.nodes + n, node = n < int64_t(chosen.size()) ? chosen[n] : -1, parent = node < 0 ? -1 : tree.parents[node];
    g.tokens[at] = node < 0 ? 0 : tree.tokens[node];
    g.fed[at] = node < 0 ? -1 : tree.fed_at[node];
    g.values[at] = node < 0 ? 0 : tree.value(node);
    g.parents[at] = parent < 0 ? -1 : std::lower_bound(chosen.begin(), chosen.end(), parent) - chosen.begin();
  }
}

// `run(pass)` makes the logits of a pass of a program with `vocab` of them. False where a row's are none to rank; what was found is worth
// nothing then. Arena, logits and `carried` have room for the largest pass.
template <typename Run>
bool run_trees(const Growing& g, const Pass& first, int64_t vocab, Pool& pool, const Run& run) {
  const int64_t B = first.rows;
  std::vector<Tree> trees;
  for (int64_t b = 0; b < B; ++b) trees.emplace_back(g, g.budgets[b]);
  std::vector<int64_t> starts(first.starts, first.starts + B), ends(first.columns, first.columns + B), ids;
  std::vector<float> shares;
  std::vector<char> pending(g.carried ? B * g.carried_bytes : 0);
  Feed feed;
  const void* inputs[1];
  Pass pass = first;
  for (int64_t level = 0;; ++level) {
    run(pass);
    const int64_t K = pass.num_columns;
    ids.resize(B * K * g.top_k), shares.resize(B * K * g.top_k);
    std::atomic<bool> is_whole = true;
    pool.run(B * K, [&](int64_t piece) {
      const int64_t b = piece / K, c = piece % K;
      const Tree& tree = trees[b];
      if (!tree.wants() || c >= int64_t(tree.frontier.size())) return;
      const int64_t at = b * K * g.top_k + c * tree.top_k;
      if (!rank(g, tree, b, level, pass.logits + piece * vocab, ids.data() + at, shares.data() + at)) is_whole = false;
    });
    if (!is_whole) return false;
    if (!level)
      for (int64_t b = 0; b < B; ++b) {
        starts[b] += ends[b] + 1;
        if (g.carried) std::memcpy(pending.data() + b * g.carried_bytes, g.carried + (b * pass.tokens + ends[b]) * g.carried_bytes, g.carried_bytes);
      }
    const int64_t known = level ? pass.known + pass.tokens : 0;
    int64_t T = 0;
    for (int64_t b = 0; b < B; ++b) {
      Tree& tree = trees[b];
      if (tree.wants()) tree.add(ids.data() + b * K * g.top_k, shares.data() + b * K * g.top_k);
      if (tree.wants()) {
        const char* const states = level ? g.carried + b * pass.tokens * g.carried_bytes : nullptr;
        tree.feed(g, known, pass.known, states, pending.data() + b * g.carried_bytes);
        T = std::max(T, int64_t(tree.frontier.size()));
      }
    }
    if (!T) break;
    feed.lay_out(g, trees, starts, known, T);
    inputs[0] = feed.features.data();
    pass.tokens = T, pass.num_columns = T, pass.rows_differ = 1, pass.known = known;
    pass.ids = feed.ids.data(), pass.positions = feed.positions.data(), pass.starts = starts.data(), pass.columns = feed.columns.data();
    pass.depths = feed.depths.data(), pass.paths = feed.paths.data();
    if (g.carried) pass.inputs = inputs;
  }
  for (int64_t b = 0; b < B; ++b) finish(g, trees[b], b);
  return true;
}

}  // namespace growing
