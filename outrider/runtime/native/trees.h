// Verdicts on trees by traversal: the first node in post-order whose coin shows heads is kept with its whole path. The rule is that of
// outrider/sampling/traversal.py, which has the mathematics. A law is copied when something is first taken from it, and the walk ends
// with the first heads, so what follows costs nothing.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "residuals.h"

// What may still be said after a node, `scale` times `weights`, and what its next child was drawn from; null: nothing is drawn there.
struct Output {
  const float *weights, *proposal;
  float scale = 1, mass = 1;  // mass: weight of the path that ends here
  std::vector<float> own_weights, own_proposal;
};

class Tree {
 public:
  Tree(const float* laws, const float* proposals, const int64_t* tokens, const int64_t* parents, const bool* sampled,
       int64_t length, int64_t V, bool replacement, const Coins& coins)
      : tokens_(tokens), parents_(parents), sampled_(sampled), coins_(coins), length_(length), V_(V), replacement_(replacement),
        outputs_(length + 1) {
    for (int64_t o = 0; o <= length; ++o) {
      outputs_[o].weights = laws + o * V;
      outputs_[o].proposal = proposals ? proposals + o * V : nullptr;
    }
  }

  // The node that is kept with its path, and the token after it
  Kept decide(const float* laws) {
    int64_t end = -1;
    visit(0, end);
    const int64_t next = drawn(outputs_[end + 1].weights, V_, coins_.draw());
    return {end, next < 0 ? drawn(laws + (end + 1) * V_, V_, coins_.draw()) : next};  // only rounding leaves nothing of a law
  }

 private:
  // Whether some node below this output is kept: `end`
  bool visit(int64_t output, int64_t& end) {
    for (int64_t node = next_child(output, 0); node < length_;) {
      const int64_t sibling = next_child(output, node + 1);
      Output& own = outputs_[node + 1];
      own.mass = std::min(1.f, ratio(output, node));
      own.scale *= own.mass;
      if (visit(node + 1, end)) return true;
      if (coins_.accept(node) < double(own.mass)) return end = node, true;
      reject(outputs_[output], node, sibling < length_);
      node = sibling;
    }
    return false;
  }

  int64_t next_child(int64_t output, int64_t from) const {
    while (from < length_ && parents_[from] + 1 != output) ++from;
    return from;
  }

  bool is_known(int64_t token) const { return token >= 0 && token < V_; }

  Node proposed(const Output& parent, int64_t node) const {
    const bool is_drawn = parent.proposal && (!sampled_ || sampled_[node]);
    return {is_drawn ? parent.proposal : nullptr, tokens_[node]};
  }

  float ratio(int64_t output, int64_t node) const {
    const Output& parent = outputs_[output];
    const Node at = proposed(parent, node);
    if (!is_known(at.token)) return 0;  // no token of the target's
    const float wanted = parent.scale * parent.weights[at.token];
    return at.law ? wanted / std::max(at.law[at.token], std::numeric_limits<float>::min()) : wanted;
  }

  // A child is out: its parent now stands for [a p - q]+, rescaled
  void reject(Output& parent, int64_t node, bool has_sibling) {
    const Node at = proposed(parent, node);
    const float total = float(surplus(parent.weights, at, parent.scale, V_)), all = total + (1 - parent.mass);
    if (all > 0) {  // else this child is kept with certainty, and only rounding leads here
      parent.own_weights.resize(V_);
      for (int64_t v = 0; v < V_; v += 16) {
        const Mask some = first16(V_ - v);
        store_some(some, parent.own_weights.data() + v, excess(parent.weights, at, parent.scale, v, some));
      }
      parent.weights = parent.own_weights.data();
      parent.scale = 1 / all;
      parent.mass = total / all;
    }
    if (has_sibling && parent.proposal && !replacement_) remove(parent, at.token);
  }

  // The next sibling was drawn from what is left
  void remove(Output& parent, int64_t token) {
    if (!is_known(token)) return;
    std::vector<float>& law = parent.own_proposal;
    if (law.empty()) law.assign(parent.proposal, parent.proposal + V_);
    parent.proposal = law.data();
    law[token] = 0;
    Doubles sum = doubles(0);
    for (int64_t v = 0; v < V_; v += 16) sum = add_up(sum, load_some(first16(V_ - v), law.data() + v));
    const double total = sum_of(sum);
    if (!(total > 0)) return;
    for (float& share : law) share = float(share / total);  // 1 / total may be beyond fp32
  }

  const int64_t *tokens_, *parents_;
  const bool* sampled_;
  const Coins& coins_;
  int64_t length_, V_;
  bool replacement_;
  std::vector<Output> outputs_;
};
