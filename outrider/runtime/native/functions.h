// Functions of sixteen numbers that activations and norms are made of.

#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, not below 2^-126: 2^n times a degree-6 polynomial on [-1/2, 1/2], relative error about 2e-7
inline Floats power_of_two(Floats x) {
  x = larger(x, floats(-126.f));
  const Floats n = rounded(x), r = x - n;
  Floats p = floats(1.540353039e-4f);
  for (float c : {1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.f}) p = multiply_add(p, r, floats(c));
  return times_power_of_two(p, n);
}

inline Floats negated(Floats x) { return x * floats(-1); }

// e^x for any x
inline Floats any_exponential(Floats x) {
  const Floats small = exponential(negated(absolute(x)));
  const Floats found = choose(is_at_least(floats(0), x), choose(is_greater(floats(-87.f), x), floats(0), small), floats(1) / small);
  const Floats all = choose(is_greater(x, floats(87.f)), floats(std::numeric_limits<float>::infinity()), found);
  return choose(is_no_number(x), x, all);
}

// e^x - 1; near 0, where that cancels, by its series
inline Floats exponential_less_one(Floats x) {
  Floats series = floats(1.f / 40320);
  for (float c : {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f}) series = multiply_add(series, x, floats(c));
  return choose(is_greater(floats(0.5f), absolute(x)), series * x, any_exponential(x) - floats(1));
}

// A function of single numbers, for operations on few of them
template <typename Function>
Floats each(Floats x, const Function& function) {
  alignas(64) float numbers[16];
  store(numbers, x);
  for (float& number : numbers) number = function(number);
  return load(numbers);
}

// 1 / (1 + e^-x), by the exponential of what is not above 0; what is no number stays none
inline Floats sigmoid(Floats x) {
  const Floats e = exponential(negated(absolute(x)));
  const Floats found = choose(is_at_least(x, floats(0)), floats(1), e) / (floats(1) + e);
  return choose(is_no_number(x), x, found);
}

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; near 0, where that cancels, by its series
inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = absolute(x), e = exponential(size * floats(-2)), square = x * x;
  const Floats far = (floats(1) - e) / (floats(1) + e);
  const Floats whole = choose(is_at_least(x, floats(0)), far, negated(far));
  Floats series = multiply_add(square, floats(-17.f / 315), floats(2.f / 15));
  series = multiply_add(square, series, floats(-1.f / 3));
  const Floats near = multiply_add(x * square, series, x);
  return choose(is_no_number(x), x, choose(is_greater(floats(0.1f), size), near, whole));
}

// The error function, absolute error below 2e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26)
inline Floats error_function(Floats x) {
  const Floats size = absolute(x), t = floats(1) / multiply_add(floats(0.3275911f), size, floats(1));
  Floats p = floats(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = multiply_add(p, t, floats(c));
  const Floats found = floats(1) - p * t * exponential(negated(size * size));
  return choose(is_no_number(x), x, choose(is_at_least(x, floats(0)), found, negated(found)));
}

inline Floats gelu(Floats x) { return x * floats(0.5f) * (floats(1) + error_function(x * floats(0.70710678f))); }

inline Floats gelu_by_tangent(Floats x) {
  const Floats inner = floats(0.79788456f) * multiply_add(x * x * x, floats(0.044715f), x);
  return x * floats(0.5f) * (floats(1) + hyperbolic_tangent(inner));
}
