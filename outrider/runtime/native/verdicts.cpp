// The verdict on a whole batch's drafts, by one call after a pass of the target: laws of its outputs, coins and noise, and the rule that
// decides with them. Each row by itself: which path of its draft is kept, and the token after it.
//
//     table (B, N + 1, V) fp32: scores, or laws where `options` is null   options (B, 4) fp64, see laws.h
//     proposals (B, N + 1, V) fp32, null: all tokens were placed          sampled (B, N) bool, null: all were drawn that could be
//     tokens, parents (B, N) int64, parents null: chains                  lengths (B,) int64
//     seeds, starts (B,): of the rows' random streams                     noise (B, N + 1) pointers to (V,) fp64, null: not made yet
//     -> found (B, 3 + N) int64: nodes kept, next token, whether the path ends at a leaf, the path, padded with -1
//
// A row whose temperature is 0 has point masses, on which all rules agree: no law is made of it, its tokens are compared.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "chains.h"
#include "gumbel.h"
#include "laws.h"
#include "races.h"
#include "trees.h"

namespace {

constexpr int64_t SERIAL = 1 << 15;   // numbers below which a second thread costs more than it does
constexpr int64_t KEPT = 1 << 20;     // numbers of laws whose memory waits for the next step
constexpr uint64_t NOISE_STREAM = 3;  // `Purpose.GUMBEL`

enum Rule : int64_t { TOKEN, BLOCK, TRAVERSAL, COUPLED };

// As outrider/verifiers/kernels.py writes it down: eight bytes each.
struct Call {
  const float* table;
  const double* options;
  const float* proposals;
  const int64_t *tokens, *parents, *lengths;
  const bool* sampled;
  int64_t B, N, V;
  Rule rule;
  int64_t replacement;
  const uint64_t* seeds() const { return reinterpret_cast<const uint64_t*>(this + 1); }
  const int64_t* starts() const { return reinterpret_cast<const int64_t*>(this + 1) + B; }
  const double* const* noise() const { return reinterpret_cast<const double* const*>(this + 1) + 2 * B; }
};

class Row {
 public:
  Row(const Call& call, const float* laws, int64_t b)
      : call_(call), b_(b), scores_(call.table + outputs()), laws_(laws ? laws + outputs() : nullptr),
        proposals_(call.proposals ? call.proposals + outputs() : nullptr), tokens_(call.tokens + b * call.N),
        parents_(call.parents ? call.parents + b * call.N : nullptr), sampled_(call.sampled ? call.sampled + b * call.N : nullptr),
        length_(call.lengths[b]), coins_{call.seeds()[b], uint64_t(call.starts()[b])} {}

  // False where the scores are none to decide with
  bool decide(int64_t* found) const {
    Kept kept{-1, 0};
    if (is_greedy()) {
      std::vector<int64_t> best(length_ + 1);
      for (int64_t output = 0; output <= length_; ++output)
        if ((best[output] = largest(scores_ + output * call_.V, call_.V)) < 0) return false;
      kept = follow([&](int64_t output) { return best[output]; });
    } else if (call_.rule == COUPLED) {
      std::vector<double> made;
      kept = follow([&](int64_t output) { return winner(laws_ + output * call_.V, noise(output, made), call_.V); });
    } else if (parents_) {
      kept = Tree(laws_, proposals_, tokens_, parents_, sampled_, length_, call_.V, call_.replacement, coins_).decide(laws_);
    } else {
      kept = Chain{laws_, proposals_, tokens_, sampled_, length_, call_.V, call_.rule != TOKEN}.decide(coins_);
    }
    write(kept, found);
    return true;
  }

 private:
  int64_t outputs() const { return b_ * (call_.N + 1) * call_.V; }
  bool is_greedy() const { return call_.options && call_.options[4 * b_] == 0; }
  int64_t parent(int64_t node) const { return parents_ ? parents_[node] : node - 1; }

  // The first child of a node (-1: of the pending token) from `from` on; the row's length where there is none
  int64_t child(int64_t node, int64_t from) const {
    while (from < length_ && parent(from) != node) ++from;
    return from;
  }

  // Down the draft as long as it says what was chosen at each output
  template <typename Choose>
  Kept follow(Choose choose) const {
    for (int64_t end = -1;;) {
      const int64_t choice = choose(end + 1);
      int64_t node = child(end, end + 1);
      while (node < length_ && tokens_[node] != choice) node = child(end, node + 1);
      if (node == length_) return {end, choice};
      end = node;
    }
  }

  // Of the text position after `output`'s tokens: the row's own, or made now. A drafter that shares it asked for what it needed, and
  // after the last draft token nobody asks again
  const double* noise(int64_t output, std::vector<double>& made) const {
    if (const double* known = call_.noise()[b_ * (call_.N + 1) + output]) return known;
    made.resize(call_.V);
    int64_t position = int64_t(coins_.start);
    for (int64_t node = output - 1; node >= 0; node = parent(node)) ++position;
    double* table = made.data();
    make_noise(coins_.seed, NOISE_STREAM, &position, &table, 1, call_.V);
    return table;
  }

  void write(Kept kept, int64_t* found) const {
    int64_t count = 0;
    for (int64_t node = kept.end; node >= 0; node = parent(node)) ++count;
    found[0] = count;
    found[1] = kept.next;
    found[2] = child(kept.end, 0) == length_;
    std::fill(found + 3, found + 3 + call_.N, -1);
    for (int64_t node = kept.end; node >= 0; node = parent(node)) found[2 + count--] = node;
  }

  const Call& call_;
  int64_t b_;
  const float *scores_, *laws_, *proposals_;
  const int64_t *tokens_, *parents_;
  const bool* sampled_;
  int64_t length_;
  Coins coins_;
};

bool is_all_greedy(const Call& call) {
  for (int64_t b = 0; b < call.B; ++b)
    if (!call.options || call.options[4 * b] != 0) return false;
  return true;
}

}  // namespace

extern "C" {

// False where an output that counts has scores that are no numbers, infinite or all masked
bool outrider_verdicts(const Call* at, int64_t* found) {
  const Call& call = *at;
  const int64_t M = call.N + 1, size = call.B * M * call.V;
  std::unique_ptr<float[]> made;
  const float* laws = call.options ? nullptr : call.table;
  if (call.options && !is_all_greedy(call)) {
    static thread_local std::vector<float> kept(KEPT);  // memory that was used before costs no page faults
    if (size > KEPT) made.reset(new float[size]);
    float* room = made ? made.get() : kept.data();
    if (!make_laws(call.table, call.lengths, call.options, call.B, M, call.V, /* point_masses */ false, room)) return false;
    laws = room;
  }
  const auto decide = [&](int64_t b) { return Row(call, laws, b).decide(found + b * (3 + call.N)); };
  int64_t whole = 1;
  if (call.B == 1 || size <= SERIAL) {  // no region with an `if`: noise would be made within it by threads begun for each time
    for (int64_t b = 0; b < call.B; ++b) whole = decide(b) && whole;
    return whole;
  }
#pragma omp parallel for schedule(dynamic) reduction(&& : whole)
  for (int64_t b = 0; b < call.B; ++b) whole = decide(b) && whole;
  return whole;
}

}  // extern "C"
