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

template <typename Function>
void map(const Op& op, const char* const* in, char* out, int64_t count, const Function& function) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const Row to = row_of(op.out, out, r), a = row_of(op.in[0], in[0], r), b = count > 1 ? row_of(op.in[1], in[1], r) : a;
    for (int64_t c = 0; c < op.cols; c += 16) {
      const Mask some = first16(op.cols - c);
      to.write(c, some, function(a.read(c, some), count > 1 ? b.read(c, some) : floats(0)));
    }
  }
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
inline void softmax(int64_t cols, const Row& x, const Row& to) {
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

inline void reduce(const Op& op, const char* const* in, char* out) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const Row to = row_of(op.out, out, r), x = row_of(op.in[0], in[0], r);
    if (op.code == MEAN || op.code == SUM) {
      const float all = sum(op.cols, [&](int64_t c, Mask some) { return x.read(c, some); });
      to.write(0, 1, floats(op.code == MEAN ? all / float(op.cols) : all));
      continue;
    }
    if (op.code == SOFTMAX) {
      softmax(op.cols, x, to);
      continue;
    }
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
}

// One operation on one token; `in` and `out` are its blocks.
inline void run(const Op& op, const char* const* in, char* out) {
  const auto unary = [&](auto f) { map(op, in, out, 1, [&](Floats a, Floats) { return f(a); }); };
  const auto binary = [&](auto f) { map(op, in, out, 2, f); };
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
