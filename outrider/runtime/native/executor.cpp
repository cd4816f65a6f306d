// Runs a program: phase by phase, each divided among threads in its own way.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attend.h"
#include "choices.h"
#include "drafting.h"
#include "experts.h"
#include "growing.h"
#include "indexer.h"
#include "linear.h"
#include "pool.h"
#include "program.h"
#include "recurrent.h"
#include "scan.h"
#include "tokenwise.h"

namespace {

constexpr int64_t FEW = 4;  // tokens that one thread computes alone, faster than another wakes up

// Memory that passes use one after the other.
struct Room {
  std::vector<char> attention;   // what it leaves between two parts
  std::vector<char> experts;     // rows side by side
  std::vector<Line> rounded;     // inputs of the linear layers of a phase, and where each layer's begin
  std::vector<int64_t> starts;
};

// A row of a table in BLOCKS, widened, or of a coded one.
void read_row(const Op& op, int64_t index, char* to) {
  const uint8_t* const panels = static_cast<const uint8_t*>(op.weight);
  if (op.format == PANELS_CODED) return coded::read_row(panels, op.K, index, reinterpret_cast<bf16*>(to));
  if (op.out.is_bf16) blocks::read_row(panels, op.form, op.K, op.group, index, reinterpret_cast<bf16*>(to));
  else blocks::read_row(panels, op.form, op.K, op.group, index, reinterpret_cast<float*>(to));
}

class Execution {
 public:
  Execution(const Program& program, const Pass& pass, Pool& pool, Room& room)
      : program_(program), pass_(pass), pool_(pool), room_(room), tokens_(pass.rows * pass.tokens),
        outputs_(pass.rows * pass.num_columns), head_(pass.arena + program.body_bytes * tokens_) {}

  void run() {
    for (int64_t p = 0; p < program_.num_phases; ++p) {
      const Phase& phase = program_.phases[p];
      const int64_t count = phase.is_head ? outputs_ : tokens_;
      if (phase.kind == LINEARS) linears(phase, count);
      else if (phase.kind == ATTENTIONS) attention(program_.ops[phase.begin]);
      else if (phase.kind == RECURRENT) recurrent(program_.ops[phase.begin]);
      else if (phase.kind == EXPERT_LINEARS) expert_linear(program_.ops[phase.begin], count);
      else tokenwise(phase, count);
    }
    write_logits();
  }

 private:
  // A token's block of a value; `m` counts the tokens of the section that the operation is in.
  char* block(const Operand& o, int64_t m) const {
    switch (o.source) {
      case BODY: return pass_.arena + o.at * tokens_ + m * o.token_step;
      case HEAD: return head_ + o.at * outputs_ + m * o.token_step;
      case CONSTANT: return reinterpret_cast<char*>(o.at);
      case ROTARY: return static_cast<char*>(const_cast<void*>(pass_.tables[o.at])) + pass_.positions[m] * o.token_step;
      case INPUT: return static_cast<char*>(const_cast<void*>(pass_.inputs[o.at])) + m * o.token_step;
      default: return nullptr;
    }
  }

  static int64_t width(const Operand& o) { return o.is_bf16 ? 2 : 4; }

  void linears(const Phase& phase, int64_t count) const {
    int64_t pieces = 0;
    for (int64_t i = phase.begin; i < phase.end; ++i) pieces += linear::num_pieces(program_.ops[i]);
    round_inputs(phase, count);
    pool_.run(pieces, [&](int64_t piece) {
      int64_t i = phase.begin;
      for (; piece >= linear::num_pieces(program_.ops[i]); ++i) piece -= linear::num_pieces(program_.ops[i]);
      const Op& op = program_.ops[i];
      const void* x = input(op, 0);
      if (op.format == BLOCKS) x = room_.rounded.data() + room_.starts[i - phase.begin];
      linear::run_piece(op, piece, x, count, block(op.out, 0));
    });
  }

  const char* input(const Op& op, int64_t m) const { return block(op.in[0], m) + op.in[0].offset * width(op.in[0]); }

  // The inputs of layers in BLOCKS as these take them; layers with one input share it.
  void round_inputs(const Phase& phase, int64_t count) const {
    int64_t needed = 0;
    room_.starts.assign(phase.end - phase.begin, 0);
    for (int64_t i = phase.begin; i < phase.end; ++i) {
      const Op& op = program_.ops[i];
      if (op.format != BLOCKS) continue;
      int64_t like = phase.begin;
      while (like < i && !shares_input(program_.ops[like], op)) ++like;
      room_.starts[i - phase.begin] = like < i ? room_.starts[like - phase.begin] : needed;
      if (like < i) continue;
      needed += linear::rounded_lines(op, count);
      if (int64_t(room_.rounded.size()) < needed) room_.rounded.resize(needed);
      Line* const to = room_.rounded.data() + room_.starts[i - phase.begin];
      const auto row = [&](int64_t m) { linear::round_row(op, input(op, m), m, count, to); };
      if (count > FEW) pool_.run(count, row);
      else for (int64_t m = 0; m < count; ++m) row(m);
    }
  }

  static bool shares_input(const Op& a, const Op& b) {
    return a.format == BLOCKS && linear::num_blocks(a) == linear::num_blocks(b) && a.in[0].source == b.in[0].source &&
           a.in[0].at == b.in[0].at && a.in[0].offset == b.in[0].offset && a.K == b.K;
  }

  void attention(const Op& op) const {
    if (op.in[0].is_bf16) attention_in<bf16>(op);
    else attention_in<float>(op);
  }

  template <typename Number>
  void attention_in(const Op& op) const {
    const char* const queries = block(op.in[0], 0);
    char* const out = block(op.out, 0);
    if (op.code == CHOICE) return indexer::run<Number>(op, pass_, queries, block(op.in[1], 0), out, pool_, room_.attention);
    const char *sinks = block(attend::sinks_of(op), 0), *chosen = op.chosen ? block(op.in[1], 0) : nullptr;
    attend::run<Number>(op, pass_, queries, sinks, chosen, out, pool_, room_.attention);
  }

  void recurrent(const Op& op) const {
    const auto at = [&](const Operand& o, int64_t m) { return block(o, m); };
    if (op.code == CONVOLUTION) recurrent::convolve(op, pass_, at, pool_);
    else if (op.code == SCAN) recurrent::scan(op, pass_, at, pool_);
    else recurrent::delta_rule(op, pass_, at, pool_);
  }

  void expert_linear(const Op& op, int64_t count) const {
    const int64_t read = experts::run(op, count, block(op.in[0], 0), block(op.in[1], 0), block(op.out, 0), pool_, room_.experts, room_.rounded);
    if (pass_.experts_read && op.code == EXPERTS) *pass_.experts_read += read;
  }

  void tokenwise(const Phase& phase, int64_t count) const {
    const auto all = [&](int64_t m) {
      for (int64_t i = phase.begin; i < phase.end; ++i) token(program_.ops[i], m);
    };
    if (count > FEW) return pool_.run(count, all);
    for (int64_t m = 0; m < count; ++m) all(m);
  }

  void token(const Op& op, int64_t m) const {
    const int64_t b = m / pass_.tokens, t = m % pass_.tokens;
    switch (op.code) {
      case EMBED: {
        const int64_t wanted = (op.by_position ? pass_.positions : pass_.ids)[m] + op.layer, bound = int64_t(op.numbers[0]);
        const int64_t bytes = op.cols * width(op.out), index = bound && wanted >= bound ? 0 : std::clamp<int64_t>(wanted, 0, op.N - 1);
        if (op.format != TABLE) return read_row(op, index, block(op.out, m));
        std::memcpy(block(op.out, m), static_cast<const char*>(op.weight) + index * bytes, bytes);
        return;
      }
      case STORE: {
        void* const cache = (op.is_value ? pass_.values : pass_.keys)[op.layer];
        const int64_t bytes = op.cols * width(op.in[0]), place = pass_.origin(op, b) + pass_.starts[b] + pass_.known + t;
        for (int64_t r = 0; r < op.rows; ++r)
          std::memcpy(static_cast<char*>(cache) + (place * op.rows + r) * bytes,
                      block(op.in[0], m) + (op.in[0].offset + r * op.in[0].row_step) * width(op.in[0]), bytes);
        return;
      }
      case SIGNAL: {
        char* const to = static_cast<char*>(pass_.signals[op.layer]);
        const int64_t bytes = op.cols * width(op.in[0]);
        if (to) std::memcpy(to + m * bytes, block(op.in[0], m) + op.in[0].offset * width(op.in[0]), bytes);
        return;
      }
      case GATHER: {
        const int64_t row = m / pass_.num_columns, column = pass_.rows_differ ? m : m % pass_.num_columns;
        const int64_t from = row * pass_.tokens + pass_.columns[column];
        std::memcpy(block(op.out, m), block(op.in[0], from) + op.in[0].offset * width(op.in[0]), op.cols * width(op.out));
        return;
      }
      default: {
        const char* const in[3] = {block(op.in[0], m), block(op.in[1], m), block(op.in[2], m)};
        char* const out = block(op.out, m);
        switch (op.code) {
          case TOP: return choices::top(op, in, out);
          case TAKE: return choices::take(op, in, out);
          case PUT: return choices::put(op, in, out);
          default: return tokenwise::run(op, in, out);
        }
      }
    }
  }

  void write_logits() const {
    constexpr int64_t chunk = 1 << 13;
    const int64_t size = program_.vocab_size, chunks = (size + chunk - 1) / chunk;
    pool_.run(outputs_ * chunks, [&](int64_t piece) {
      const int64_t m = piece / chunks, end = std::min(size, (piece % chunks + 1) * chunk);
      const tokenwise::Row from = tokenwise::row_of(program_.logits, block(program_.logits, m), 0);
      for (int64_t v = piece % chunks * chunk; v < end; v += 16)
        store_some(first16(end - v), pass_.logits + m * size + v, from.read(v, first16(end - v)));
    });
  }

  const Program& program_;
  const Pass& pass_;
  Pool& pool_;
  Room& room_;
  int64_t tokens_, outputs_;
  char* head_;
};

struct Workers {
  explicit Workers(int64_t threads) : pool(threads) {}
  Pool pool;
  Room room;
};

}  // namespace

extern "C" {

void* outrider_runtime_workers(int64_t threads) { return new Workers(threads); }
void outrider_runtime_dismiss(void* workers) { delete static_cast<Workers*>(workers); }
bool outrider_runtime_has_tiles() { return has_tiles(); }
const char* outrider_runtime_compiler() {
#ifdef __clang__
  return __VERSION__;
#else
  return "GCC " __VERSION__;
#endif
}
int64_t outrider_runtime_sizes() {
  return sizeof(Growing) * 1000000000000000 + sizeof(Levels) * 1000000000000 + sizeof(Drafting) * 1000000000 + sizeof(Op) * 1000000 + sizeof(Phase) * 10000 + sizeof(Pass);
}

// What `program` makes of `pass`; one pass at a time on the same workers.
void outrider_runtime_run(const Program* program, const Pass* pass, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  Execution(*program, *pass, own.pool, own.room).run();
}

// One linear layer by itself: x (M, K) -> out (M, N).
void outrider_runtime_linear(const Op* op, const char* x, int64_t M, char* out, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  const void* from = x;
  if (op->format == BLOCKS) {
    const int64_t needed = linear::rounded_lines(*op, M), bytes = op->K * (op->out.is_bf16 ? 2 : 4);
    if (int64_t(own.room.rounded.size()) < needed) own.room.rounded.resize(needed);
    Line* const rounded = own.room.rounded.data();
    const auto row = [&](int64_t m) { linear::round_row(*op, x + m * bytes, m, M, rounded); };
    if (M > FEW) own.pool.run(M, row);
    else for (int64_t m = 0; m < M; ++m) row(m);
    from = rounded;
  }
  own.pool.run(linear::num_pieces(*op), [&](int64_t piece) { linear::run_piece(*op, piece, from, M, out); });
}

// The headers of the coded panels of a weight (N, K), without the places of their escapes.
void outrider_code_tables(const bf16* weight, int64_t N, int64_t K, char* headers, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  own.pool.run((N + PANEL - 1) / PANEL, [&](int64_t p) {
    const coded::Rows rows{weight + p * PANEL * K, std::min(PANEL, N - p * PANEL), K};
    coded::choose_table(rows, *reinterpret_cast<coded::Header*>(headers + p * sizeof(coded::Header)));
  });
}

// These panels, with their headers.
void outrider_code_panels(const bf16* weight, int64_t N, int64_t K, const char* headers, uint8_t* panels, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  own.pool.run((N + PANEL - 1) / PANEL, [&](int64_t p) {
    uint8_t* const panel = panels + p * coded::panel_bytes(K);
    std::memcpy(panel, headers + p * sizeof(coded::Header), sizeof(coded::Header));
    coded::encode({weight + p * PANEL * K, std::min(PANEL, N - p * PANEL), K}, panel);
  });
}

// Rows of a table in panels: tokens (count) -> out (count, K).
void outrider_runtime_rows(const Op* op, const int64_t* tokens, int64_t count, char* out) {
  const int64_t bytes = op->K * (op->out.is_bf16 ? 2 : 4);
  for (int64_t i = 0; i < count; ++i) read_row(*op, tokens[i], out + i * bytes);
}

// A chain of draft tokens for each row, after `pass`, whose logits are room for those of one token a row. False where scores are no
// numbers, infinite or all masked.
bool outrider_runtime_draft(const Program* program, const Pass* pass, const Drafting* drafting, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  return drafting::run_chain(*drafting, *pass, program->vocab_size, own.pool,
                             [&](const Pass& next) { Execution(*program, next, own.pool, own.room).run(); });
}

// A tree of draft tokens for each row, after `pass`, in the same way.
bool outrider_runtime_grow(const Program* program, const Pass* pass, const Growing* trees, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  return growing::run_trees(*trees, *pass, program->vocab_size, own.pool,
                            [&](const Pass& next) { Execution(*program, next, own.pool, own.room).run(); });
}

// The drafts that one pass makes, and that pass. False as above.
bool outrider_runtime_levels(const Levels* levels, void* workers) {
  auto& own = *static_cast<Workers*>(workers);
  std::lock_guard<std::mutex> turn(own.pool.turn());
  return drafting::run_levels(*levels, own.pool,
                              [&](const Program& program, const Pass& next) { Execution(program, next, own.pool, own.room).run(); });
}

}  // extern "C"
