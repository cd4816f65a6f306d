// Sixteen numbers at a time: the words all kernels are written in, for AVX-512 (`lanes_avx512.h`), for pairs of AVX2's registers
// (`lanes_avx2.h`) and for fours of NEON's (`lanes_neon.h`), and what is built from them.
//
//     Floats    16 fp32              Doubles   8 fp64             Ints   16 int32
//     Pairs     16 pairs of bf16     Bytes     16 fours of bytes
//     Mask      a bit for each lane; masks of loads and stores are those of the first so many lanes (`first16`)

#pragma once

#include <cstdint>
#include <initializer_list>

using bf16 = uint16_t;
using Mask = uint16_t;
using HalfMask = uint8_t;  // of eight lanes

#ifdef __AVX512BF16__
#include "lanes_avx512.h"
#elif defined(__ARM_NEON)
#include "lanes_neon.h"
#else
#include "lanes_avx2.h"
#endif

// A mask of the first `count` lanes, all of them where there are more
inline Mask first16(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : Mask((1u << count) - 1); }

// e^x for x <= 0: 2^n times a degree-6 polynomial on [-ln 2 / 2, ln 2 / 2], relative error about 1e-7
inline Floats exponential(Floats x) {
  x = larger(x, floats(-87.f));
  const Floats n = rounded(x * floats(1.44269504f));
  Floats r = subtract_product(n, floats(0.693359375f), x);
  r = subtract_product(n, floats(-2.12194440e-4f), r);
  Floats p = floats(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = multiply_add(p, r, floats(c));
  return times_power_of_two(p, n);
}

// `sum` with sixteen more numbers in it
inline Doubles add_up(Doubles sum, Floats values) { return sum + low_doubles(values) + high_doubles(values); }
