// Prints the bits that every word of native/lanes.h gives for numbers made from a counter. What is undefined by design is left out:
// numbers too large for an int, e^x above 0, mantissas of 0.

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "functions.h"
#include "lanes.h"

static uint64_t state = 1;
static uint32_t bits() {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return uint32_t(z ^ z >> 31);
}
static float between(float low, float high) { return low + (high - low) * float(bits() >> 8) * 0x1p-24f; }

template <class Number>
static void print(const char* name, const Number* numbers, int count) {
  std::printf("%s", name);
  for (int i = 0; i < count; ++i) {
    uint64_t all = 0;
    std::memcpy(&all, numbers + i, sizeof(Number));
    numbers[i] == numbers[i] ? std::printf(" %" PRIx64, all) : std::printf(" nan");  // whose bits are each processor's own
  }
  std::printf("\n");
}
static void print(const char* name, Floats x) {
  float all[16];
  store(all, x);
  print(name, all, 16);
}
static void print(const char* name, Doubles x) {
  double all[8];
  store(all, x);
  print(name, all, 8);
}
static void print(const char* name, Ints x) {
  int32_t all[16];
  store(all, x);
  print(name, all, 16);
}
static void print(const char* name, Pairs x) {
  bf16 all[32];
  store_pairs(all, x);
  print(name, all, 32);
}
static void print(const char* name, unsigned mask) { print(name, &mask, 1); }

static void of_floats(const float* x, const float* y, Mask some) {
  const Floats a = load(x), b = load(y);
  print("sum", a + b), print("difference", a - b), print("product", a * b), print("quotient", a / b);
  print("multiply_add", multiply_add(a, b, floats(x[3]))), print("subtract_product", subtract_product(a, b, floats(y[5])));
  print("larger", larger(a, b)), print("smaller", smaller(a, b)), print("absolute", absolute(a)), print("rounded", rounded(a));
  print("root", root(absolute(a))), print("load_some", load_some(some, x)), print("load_some others", load_some(some, x, b));
  print("choose", choose(Mask(some ^ 0x5a5a), a, b)), print("keep", keep(Mask(some ^ 0x33cc), a));
  print("masks", is_greater(a, b)), print("masks", is_at_least(a, b)), print("masks", is_equal(a, a)), print("masks", is_no_number(a));
  const float found[2] = {sum_of(a), largest_of(a)};
  print("sum_of, largest_of", found, 2);
  Floats mantissa, power;
  split(absolute(a), mantissa, power);
  print("mantissa", mantissa), print("power", power);
  print("times_power_of_two", times_power_of_two(a, rounded(b))), print("exponential", exponential(floats(0) - absolute(a)));
  print("truncated", truncated(a)), print("nearest", nearest(a)), print("to_floats", to_floats(nearest(a * floats(1000))));
  float partly[16] = {};
  store_some(some, partly, a);
  print("store_some", partly, 16);
  bf16 rounded_to[16] = {};
  store_some(some, rounded_to, a);
  print("store_some bf16", rounded_to, 16), print("load_some bf16", load_some(some, rounded_to));
  const Doubles wide = low_doubles(a), other = high_doubles(b);
  print("doubles", wide + other), print("doubles", wide - other), print("doubles", wide * other), print("doubles", wide / other);
  print("doubles", multiply_add(wide, other, doubles(x[1]))), print("doubles", larger(wide, other));
  print("masks", is_greater(wide, other)), print("doubles", choose(HalfMask(some), wide, other));
  Doubles digits, exponent;
  split(multiply_add(wide, wide, doubles(1)), digits, exponent);
  print("digits", digits), print("exponent", exponent);
  double sums[1] = {sum_of(wide)}, half[8] = {};
  print("sum_of", sums, 1);
  const HalfMask few = HalfMask(first16(some % 9));
  store_some(few, half, wide);
  print("store_some", half, 8), print("load_some", load_some(few, half));
}

static void of_codes(const uint8_t* codes, const int8_t* inputs) {
  const Bytes all = load_bytes(codes), low = low_halves(all), high = high_halves(all);
  alignas(16) static const uint8_t levels[16] = {1, 24, 44, 62, 78, 93, 106, 118, 129 - 10, 120, 121, 122, 123, 124, 125, 126};
  print("add_products", add_products(ints(7), all, inputs)), print("low", add_small_products(ints(0), low, inputs));
  print("high", add_small_products(ints(0), high, inputs)), print("levels", add_small_products(ints(0), looked_up(levels, low), inputs));
  print("up", add_small_products(ints(0), with_bits<2>(low, all, 0x30), inputs));
  print("down", add_small_products(ints(0), with_bits<-3>(low, all, 0x10), inputs));
  print("is_at_most", is_at_most(add_products(ints(0), low, inputs), ints(50))), print("counting", counting() + ints(3));
  const int32_t sum = sum_of(add_products(ints(1), all, inputs));
  print("sum_of", &sum, 1);
  int8_t bytes[16];
  store_bytes(bytes, nearest(load_small(inputs)));
  print("store_bytes", bytes, 16), print("load_small", load_small(inputs)), print("load_powers", load_powers(codes));
  uint16_t halves[16];
  std::memcpy(halves, codes, sizeof halves);
  print("load_halves", load_halves(halves));
  const float half = widen_half(halves[0]);
  print("widen_half", &half, 1);
  uint8_t normal[64];
  for (int i = 0; i < 64; ++i) normal[i] = codes[i] | 0x08;  // an exponent that is not 0
  print("has_small", has_small(all)), print("has_small", has_small(load_bytes(normal)));
  print("evens", widen_evens(all, false)), print("odds", widen_odds(all, false));
  print("join_firsts", join_firsts(all, low)), print("join_lasts", join_lasts(all, low));
  print("evens", widen_evens(load_bytes(normal), true)), print("odds", widen_odds(load_bytes(normal), true));
}

static void of_pairs(const bf16* x, const bf16* y, int64_t count) {
  print("load", load(x)), print("load_pairs", load_pairs(x, count)), print("same_pair", same_pair(x + 2));
#ifndef __AVX512BF16__  // its products round otherwise
  print("add_products bf16", add_products(floats(0.5f), load_pairs(x), load_pairs(y)));
#endif
}

int main() {
  for (int round = 0; round < 300; ++round) {
    float x[16], y[16];
    for (float& number : x) number = between(-30, 30);
    for (float& number : y) number = between(-30, 30);
    if (round % 3 == 1) x[round % 16] = y[round % 16], x[(round + 5) % 16] = 1e-40f;
    of_floats(x, y, first16(round % 18));
    if (round % 3 == 2) {  // what is no number, and what is no finite one
      x[round % 16] = std::numeric_limits<float>::quiet_NaN(), y[(round + 3) % 16] = std::numeric_limits<float>::quiet_NaN();
      x[(round + 7) % 16] = std::numeric_limits<float>::infinity();
      print("larger", larger(load(x), load(y))), print("smaller", smaller(load(x), load(y))), print("masks", is_no_number(load(x)));
      print("masks", is_greater(load(x), load(y))), print("masks", is_at_least(load(x), load(y))), print("sum", load(x) + load(y));
      bf16 rounded_to[16];
      store_some(0xffff, rounded_to, load(x));
      print("masks", is_no_number(load(rounded_to)));
    }
    alignas(64) uint8_t codes[64];
    int8_t inputs[16];
    for (uint8_t& code : codes) code = uint8_t(bits());
    for (int8_t& input : inputs) input = int8_t(int(bits() % 255) - 127);
    of_codes(codes, inputs);
    bf16 first[32], second[32];
    for (bf16& number : first) number = bf16(0x3f00 + bits() % 0x200 + (bits() & 0x8000));
    for (bf16& number : second) number = bf16(0x3f00 + bits() % 0x200 + (bits() & 0x8000));
    of_pairs(first, second, round % 34);
  }
}
