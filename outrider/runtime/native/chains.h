// Verdicts on chains by the rules of outrider/verifiers/block.py and token.py, whose mathematics are in
// outrider/sampling/{block,rejection}.py. Coins are looked at from the longest prefix down, so that sums over the vocabulary are made
// only for prefixes that may still win.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "residuals.h"

struct Chain {
  const float *laws, *proposals;  // (N + 1, V)
  const int64_t* tokens;
  const bool* sampled;
  int64_t length, V;
  bool is_block;

  const float* law(int64_t output) const { return laws + output * V; }
  Node node(int64_t i) const {
    const bool is_drawn = proposals && (!sampled || sampled[i]);
    return {is_drawn ? proposals + i * V : nullptr, tokens[i]};
  }
  float ratio(int64_t i) const {
    const Node at = node(i);
    if (at.token < 0 || at.token >= V) return 0;  // no token of the target's
    const float p = law(i)[at.token];
    return at.law ? p / std::max(at.law[at.token], std::numeric_limits<float>::min()) : p;
  }

  // Tokens kept by the rule of tokens
  int64_t agreed(const Coins& coins) const {
    int64_t kept = 0;
    while (kept < length && coins.accept(kept) < double(std::min(1.f, ratio(kept)))) ++kept;
    return kept;
  }

  // Tokens kept by the rule of blocks; `scale` becomes the weight of that prefix
  int64_t longest(const Coins& coins, float& scale) const {
    std::vector<float> weights(length + 1, 1.f);
    for (int64_t i = 0; i < length; ++i) weights[i + 1] = std::min(1.f, weights[i] * ratio(i));
    int64_t kept = length;
    for (; kept > 0; --kept) {
      const float weight = weights[kept];
      if (kept == length) {
        if (coins.accept(kept - 1) < double(weight)) break;
        continue;
      }
      const float left = float(surplus(law(kept), node(kept), weight, V)), most = left + (1 - weight);
      if (coins.accept(kept - 1) < double(most > 0 ? left / most : 1.f)) break;
    }
    scale = weights[kept];
    return kept;
  }

  // Tokens kept, and the one after them
  Kept decide(const Coins& coins) const {
    float scale = 1;
    const int64_t kept = is_block && proposals ? longest(coins, scale) : agreed(coins);
    int64_t next = -1;
    if (kept < length) {
      std::vector<float> rest(V);
      for (int64_t v = 0; v < V; v += 16) {
        const Mask some = first16(V - v);
        store_some(some, rest.data() + v, excess(law(kept), node(kept), scale, v, some));
      }
      next = drawn(rest.data(), V, coins.draw());
    }
    // all was kept, or nothing is left of the law, which only rounding does
    return {kept - 1, next < 0 ? drawn(law(kept), V, coins.draw()) : next};
  }
};
