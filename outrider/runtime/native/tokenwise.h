// Operations on the numbers of one token: sixteen at a time, in fp32, rounded to the dtype of the value that they are written to.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "functions.h"
#include "program.h"

namespace tokenwise {

// One row of an operand's numbers.
struct Row {
  const char* base;
  int64_t step;
  bool is_bf16;

  float one(int64_t c) const {
    if (!is_bf16) return reinterpret_cast<const float*>(base)[c * step];
    const uint32_t bits = uint32_t(reinterpret_cast<const bf16*>(base)[c * step]) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  Floats read(int64_t c, Mask some) const {
    if (step == 1) {
      if (is_bf16) return load_some(some, reinterpret_cast<const bf16*>(base) + c);
      return load_some(some, reinterpret_cast<const float*>(base) + c);
    }
    if (step == 0) return floats(one(0));
    alignas(64) float numbers[16] = {};
    for (int64_t i = 0; i < 16 && (some >> i & 1); ++i) numbers[i] = one(c + i);
    return load(numbers);
  }
  void write(int64_t c, Mask some, Floats x) const {
    char* to = const_cast<char*>(base);
    if (step == 1) {
      if (is_bf16) return store_some(some, reinterpret_cast<bf16*>(to) + c, x);
      return store_some(some, reinterpret_cast<float*>(to) + c, x);
    }
    alignas(64) float numbers[16];
    alignas(64) bf16 rounded[16];
    store(numbers, x);
    store_some(0xffff, rounded, x);
    for (int64_t i = 0; i < 16 && (some >> i & 1); ++i) {
      if (is_bf16) reinterpret_cast<bf16*>(to)[(c + i) * step] = rounded[i];
      else reinterpret_cast<float*>(to)[(c + i) * step] = numbers[i];
    }
  }
  void write_one(int64_t c, float x) const { Row{base + c * step * (is_bf16 ? 2 : 4), 1, is_bf16}.write(0, 1, floats(x)); }
};

inline Row row_of(const Operand& o, const char* block, int64_t r) {
  const int64_t width = o.is_bf16 ? 2 : 4;
  return {block + (o.offset + r * o.row_step) * width, o.col_step, o.is_bf16 != 0};
}

// Rows of whole vectors that lie side by side, and rows of one number for all columns: read and written without asking each time.
template <typename Number>
struct Dense {
  Number* at;
  int64_t row_step;
  Dense row(int64_t r) const { return {at + r * row_step, row_step}; }
  Floats read(int64_t c, Mask some) const { return load_some(some, at + c); }
  void write(int64_t c, Mask some, Floats x) const { store_some(some, at + c, x); }
};
struct Same {
  Floats number;
  Floats read(int64_t, Mask) const { return number; }
};
struct SameRows {
  const Operand& o;
  const char* block;
  Same row(int64_t r) const { return {floats(row_of(o, block, r).one(0))}; }
};
struct AnyRows {
  const Operand& o;
  const char* block;
  Row row(int64_t r) const { return row_of(o, block, r); }
};

// Calls `act` with the rows of an operand whose columns lie side by side.
template <typename Act>
void with_dense(const Operand& o, const char* block, const Act& act) {
  char* const to = const_cast<char*>(block);
  if (o.is_bf16) act(Dense<bf16>{reinterpret_cast<bf16*>(to) + o.offset, o.row_step});
  else act(Dense<float>{reinterpret_cast<float*>(to) + o.offset, o.row_step});
}

// out = function of the rows of one operand or two; `ARE_WHOLE`: they are whole vectors
template <bool ARE_WHOLE, typename Function, typename Out, typename... Operands>
void map_rows(const Op& op, const Function& function, const Out& out, const Operands&... in) {
  const auto row = [&](const auto& to, const auto&... x) {
    for (int64_t c = 0; c < op.cols; c += 16) {
      const Mask some = ARE_WHOLE ? 0xffff : first16(op.cols - c);
      to.write(c, some, function(x.read(c, some)...));
    }
  };
  for (int64_t r = 0; r < op.rows; ++r) row(out.row(r), in.row(r)...);
}

template <typename Function>
void map(const Op& op, const char* const* in, char* out, const Function& function) {
  if (op.cols % 16 || op.out.col_step != 1 || op.in[0].col_step != 1)
    return map_rows<false>(op, function, AnyRows{op.out, out}, AnyRows{op.in[0], in[0]});
  with_dense(op.out, out, [&](auto to) {
    with_dense(op.in[0], in[0], [&](auto x) { map_rows<true>(op, function, to, x); });
  });
}

// The same of two operands, the second of which may be one number for each row
template <typename Function>
void map_two(const Op& op, const char* const* in, char* out, const Function& function) {
  if (op.cols % 16 || op.out.col_step != 1 || op.in[0].col_step != 1 || (op.in[1].col_step | 1) != 1)
    return map_rows<false>(op, function, AnyRows{op.out, out}, AnyRows{op.in[0], in[0]}, AnyRows{op.in[1], in[1]});
  with_dense(op.out, out, [&](auto to) {
    with_dense(op.in[0], in[0], [&](auto a) {
      if (op.in[1].col_step == 0) map_rows<true>(op, function, to, a, SameRows{op.in[1], in[1]});
      else with_dense(op.in[1], in[1], [&](auto b) { map_rows<true>(op, function, to, a, b); });
    });
  });
}

// The second number where the first is not 0, else the third
inline void where(const Op& op, const char* const* in, char* out) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const Row to = row_of(op.out, out, r), asked = row_of(op.in[0], in[0], r);
    const Row yes = row_of(op.in[1], in[1], r), no = row_of(op.in[2], in[2], r);
    for (int64_t c = 0; c < op.cols; c += 16) {
      const Mask some = first16(op.cols - c);
      to.write(c, some, choose(is_equal(asked.read(c, some), floats(0)), no.read(c, some), yes.read(c, some)));
    }
  }
}

// Sums over columns: sixteen of them, each in order, then those.
template <typename Function>
float sum(int64_t cols, const Function& number) {
  Floats total = floats(0);
  for (int64_t c = 0; c < cols; c += 16) {
    const Mask some = first16(cols - c);
    total = total + keep(some, number(c, some));
  }
  return sum_of(total);
}

// e^(x - most) / sum; numbers in between are kept in fp32
template <typename Reader>
void softmax(int64_t cols, const Reader& x, const Row& to) {
  thread_local std::vector<float> powers;
  powers.resize(cols);
  Floats most = floats(-std::numeric_limits<float>::infinity());
  for (int64_t c = 0; c < cols; c += 16) {
    const Mask some = first16(cols - c);
    most = larger(choose(some, x.read(c, some), most), most);
  }
  const Floats base = floats(largest_of(most));
  const float total = sum(cols, [&](int64_t c, Mask some) {
    const Floats apart = x.read(c, some) - base;
    const Floats power = choose(is_greater(floats(-87.f), apart), floats(0), exponential(apart));
    const Floats found = choose(is_no_number(apart), apart, power);
    store_some(some, powers.data() + c, found);
    return found;
  });
  for (int64_t c = 0; c < cols; c += 16) {
    const Mask some = first16(cols - c);
    to.write(c, some, load_some(some, powers.data() + c) / floats(total));
  }
}

// Row `r`, whose numbers `x` reads
template <typename Reader>
void reduce_row(const Op& op, const char* const* in, int64_t r, const Reader& x, const Row& to) {
  if (op.code == MEAN || op.code == SUM) {
    const float all = sum(op.cols, [&](int64_t c, Mask some) { return x.read(c, some); });
    return to.write(0, 1, floats(op.code == MEAN ? all / float(op.cols) : all));
  }
  if (op.code == SOFTMAX) return softmax(op.cols, x, to);
  const Floats middle = floats(
      op.code == LAYER_NORM ? sum(op.cols, [&](int64_t c, Mask some) { return x.read(c, some); }) / float(op.cols) : 0.f);
  const float square = sum(op.cols, [&](int64_t c, Mask some) {
    const Floats apart = x.read(c, some) - middle;
    return apart * apart;
  });
  const Floats scale = floats(1) / root(floats(square / float(op.cols) + float(op.numbers[0])));
  const bool is_scaled = op.in[1].source != NOTHING, is_shifted = op.in[2].source != NOTHING;
  for (int64_t c = 0; c < op.cols; c += 16) {
    const Mask some = first16(op.cols - c);
    Floats normed = (x.read(c, some) - middle) * scale;
    if (is_scaled) normed = normed * row_of(op.in[1], in[1], r).read(c, some);
    if (is_shifted) normed = normed + row_of(op.in[2], in[2], r).read(c, some);
    to.write(c, some, normed);
  }
}

inline void reduce(const Op& op, const char* const* in, char* out) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const Row to = row_of(op.out, out, r);
    if (op.in[0].col_step != 1) reduce_row(op, in, r, row_of(op.in[0], in[0], r), to);
    else with_dense(op.in[0], in[0], [&](auto x) { reduce_row(op, in, r, x.row(r), to); });
  }
}

// One operation on one token; `in` and `out` are its blocks.
inline void run(const Op& op, const char* const* in, char* out) {
  const auto unary = [&](auto f) { map(op, in, out, f); };
  const auto binary = [&](auto f) { map_two(op, in, out, f); };
  switch (op.code) {
    case COPY: return unary([](Floats a) { return a; });
    case ADD: return binary([](Floats a, Floats b) { return a + b; });
    case SUB: return binary([](Floats a, Floats b) { return a - b; });
    case MUL: return binary([](Floats a, Floats b) { return a * b; });
    case DIV: return binary([](Floats a, Floats b) { return a / b; });
    case NEG: return unary(negated);
    case SQUARE: return unary([](Floats a) { return a * a; });
    case RSQRT: return unary([](Floats a) { return floats(1) / root(a); });
    case SQRT: return unary(root);
    case TANH: return unary(hyperbolic_tangent);
    case SIGMOID: return unary(sigmoid);
    case SILU: return unary([](Floats a) { return a * sigmoid(a); });
    case GELU: return unary(gelu);
    case GELU_TANH: return unary(gelu_by_tangent);
    case RELU: return unary([](Floats a) { return larger(floats(0), a); });  // what is no number stays none
    case RECIPROCAL: return unary([](Floats a) { return floats(1) / a; });
    case CLAMP: {
      const Floats least = floats(float(op.numbers[0])), most = floats(float(op.numbers[1]));
      return unary([=](Floats a) { return smaller(most, larger(least, a)); });
    }
    case EXP: return unary(any_exponential);
    case EXPM1: return unary(exponential_less_one);
    case LOG: return unary([](Floats a) { return each(a, [](float x) { return std::log(x); }); });
    case LOG1P: return unary([](Floats a) { return each(a, [](float x) { return std::log1p(x); }); });
    case SOFTPLUS: {
      const float factor = float(op.numbers[0]), most = float(op.numbers[1]);
      return unary([=](Floats a) {
        return each(a, [=](float x) { return x * factor > most ? x : std::log1p(std::exp(x * factor)) / factor; });
      });
    }
    case LARGER: return binary([](Floats a, Floats b) { return choose(is_no_number(a), a, larger(a, b)); });
    case SMALLER: return binary([](Floats a, Floats b) { return choose(is_no_number(a), a, smaller(a, b)); });
    case GREATER: return binary([](Floats a, Floats b) { return keep(is_greater(a, b), floats(1)); });
    case AT_LEAST: return binary([](Floats a, Floats b) { return keep(is_at_least(a, b), floats(1)); });
    case EQUAL: return binary([](Floats a, Floats b) { return keep(is_equal(a, b), floats(1)); });
    case NOT: return unary([](Floats a) { return keep(is_equal(a, floats(0)), floats(1)); });
    case WHERE: return where(op, in, out);
    default: return reduce(op, in, out);
  }
}

}  // namespace tokenwise
