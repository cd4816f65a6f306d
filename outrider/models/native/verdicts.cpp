// Verdicts on chains, row by row: which prefix is kept, and the token behind it. The rules are those of
// outrider/verifiers/block.py and token.py, whose mathematics are in outrider/sampling/{block,rejection}.py.
//
//     laws, proposals (B, N + 1, V) fp32   tokens (B, N) int64   lengths (B,) int64   sampled (B, N) bool, null: all
//     coins (B, N), draws (B,) fp64 in [0, 1)   -> verdicts (B, 2) int64: tokens kept, next token
//
// `proposals` null: every token was placed. Coins are looked at from the longest prefix down, so that sums over the vocabulary are
// made only for prefixes that may still win.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "residuals.h"

namespace {

constexpr int64_t SERIAL = 1 << 17;  // numbers below which a second thread costs more than it does

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
  int64_t agreed(const double* coins) const {
    int64_t kept = 0;
    while (kept < length && coins[kept] < double(std::min(1.f, ratio(kept)))) ++kept;
    return kept;
  }

  // Tokens kept by the rule of blocks; `scale` becomes the weight of that prefix
  int64_t longest(const double* coins, float& scale) const {
    std::vector<float> weights(length + 1, 1.f);
    for (int64_t i = 0; i < length; ++i) weights[i + 1] = std::min(1.f, weights[i] * ratio(i));
    int64_t kept = length;
    for (; kept > 0; --kept) {
      const float weight = weights[kept];
      if (kept == length) {
        if (coins[kept - 1] < double(weight)) break;
        continue;
      }
      const float left = float(surplus(law(kept), node(kept), weight, V)), most = left + (1 - weight);
      if (coins[kept - 1] < double(most > 0 ? left / most : 1.f)) break;
    }
    scale = weights[kept];
    return kept;
  }

  void decide(const double* coins, double draw, int64_t* verdict, std::vector<float>& rest, std::vector<double>& parts) const {
    float scale = 1;
    const int64_t kept = is_block && proposals ? longest(coins, scale) : agreed(coins);
    int64_t next = -1;
    if (kept < length) {
      rest.resize(V);
      for (int64_t v = 0; v < V; v += 16) {
        const __mmask16 some = first16(V - v);
        _mm512_mask_storeu_ps(rest.data() + v, some, excess(law(kept), node(kept), scale, v, some));
      }
      next = drawn(rest.data(), V, draw, parts);
    }
    // all was kept, or nothing is left of the law, which only rounding does
    if (next < 0) next = drawn(law(kept), V, draw, parts);
    verdict[0] = kept;
    verdict[1] = next;
  }
};

}  // namespace

extern "C" {

// `shape`: B, N, V, 1 for the rule of blocks and 0 for that of tokens
void outrider_chain_verdicts(const float* laws, const float* proposals, const int64_t* tokens, const int64_t* lengths,
                             const bool* sampled, const double* coins, const double* draws, const int64_t* shape,
                             int64_t* verdicts) {
  const int64_t B = shape[0], N = shape[1], V = shape[2];
#pragma omp parallel if (B > 1 && B * (N + 1) * V > SERIAL)
  {
    std::vector<float> rest;
    std::vector<double> parts;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < B; ++b) {
      const int64_t outputs = b * (N + 1) * V;
      const Chain chain{laws + outputs, proposals ? proposals + outputs : nullptr, tokens + b * N,
                        sampled ? sampled + b * N : nullptr, lengths[b], V, shape[3] != 0};
      chain.decide(coins + b * N, draws[b], verdicts + 2 * b, rest, parts);
    }
  }
}

}  // extern "C"
