// What AVX2 and AVX-512 have in common: hints to the processor, and single numbers.

#pragma once

#include <immintrin.h>

#include <cstdint>

inline void relax() { _mm_pause(); }
inline void fetch_near(const void* at) { _mm_prefetch(at, _MM_HINT_T0); }
// To the second level. As assembly, since compilers drop a loop that does nothing but fetch.
inline void fetch_far(const void* at) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(at))); }

// The value itself: keeps a compiler from joining a product and the sum it goes into
inline float settled(float x) {
  asm("" : "+x"(x));
  return x;
}
inline float widen_half(uint16_t half) { return _cvtsh_ss(half); }
