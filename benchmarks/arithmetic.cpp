// The processor's own limit for bf16: dot products between registers, no memory.
// 16 chains of `vdpbf16ps` cover its latency; each multiplies and adds 32 pairs of numbers.

#include <immintrin.h>

#include <cstdint>

constexpr int CHAINS = 16;

extern "C" float dot_products(int64_t turns, int threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80), small = (__m512bh)_mm512_set1_epi16(0x3c00);
    __m512 sums[CHAINS];
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_setzero_ps();
    for (int64_t turn = 0; turn < turns; ++turn) {
#pragma GCC unroll 16
      for (int c = 0; c < CHAINS; ++c) {
        sums[c] = _mm512_dpbf16_ps(sums[c], one, small);
        asm volatile("" : "+v"(sums[c]));  // nothing may be folded away
      }
    }
#pragma GCC unroll 16  // every loop over the chains: else they live in memory, not in registers
    for (int c = 0; c < CHAINS; ++c) total += _mm512_reduce_add_ps(sums[c]);
  }
  return total;
}
