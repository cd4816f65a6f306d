// The processor's own limit for bf16: products between registers, no memory, by the instruction our kernels use here.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "score_tiles.h"

namespace {

constexpr int64_t TURNS = 200'000;  // a millisecond and more
constexpr int CHAINS = IS_WIDE ? 16 : 12;  // of products: they cover an instruction's latency, and fit into registers

// Returns the flops of TURNS turns.
#ifdef __AVX512BF16__
int64_t by_vectors() {  // of `vdpbf16ps`: 32 products
  const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80), small = (__m512bh)_mm512_set1_epi16(0x3c00);
  __m512 sums[CHAINS];
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_setzero_ps();
  for (int64_t turn = 0; turn < TURNS; ++turn) {
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) {
      sums[c] = _mm512_dpbf16_ps(sums[c], one, small);
      asm volatile("" : "+v"(sums[c]));  // nothing may be folded away
    }
  }
  return TURNS * CHAINS * 32 * 2;
}
#else
int64_t by_vectors() {  // of `vfmadd231ps`: 8 products, of bf16 that were widened
  const __m256 one = _mm256_set1_ps(1.f), small = _mm256_set1_ps(0x1p-7f);
  __m256 sums[CHAINS];
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm256_setzero_ps();
  for (int64_t turn = 0; turn < TURNS; ++turn) {
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) {
      sums[c] = _mm256_fmadd_ps(one, small, sums[c]);
      asm volatile("" : "+x"(sums[c]));  // nothing may be folded away
    }
  }
  return TURNS * CHAINS * 8 * 2;
}
#endif

#if defined(__AVX512BF16__) && (defined(__clang__) || __GNUC__ >= 11)

// The same of tiles with `rows` rows of 32 inputs, times 16 outputs; four sums cover the latency.
__attribute__((target("amx-tile,amx-bf16"))) int64_t by_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  std::fill_n(shapes.bytes_per_row, 6, 64);
  std::fill_n(shapes.rows, 5, rows);  // four sums and the tile of x
  shapes.rows[5] = 16;                // pairs of inputs of the weights
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);  // zeroes all tiles
  for (int64_t turn = 0; turn < TURNS; turn += 4) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
  return TURNS * rows * 16 * 32 * 2;
}

#else
int64_t by_tiles(int) { return 0; }
#endif

}  // namespace

extern "C" double flops_per_s(int threads, int rows) {
  int64_t flops = 0;
  const bool tiles = has_tiles();
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : flops)
  flops += tiles ? by_tiles(std::min(rows, 16)) : by_vectors();
  return flops / (omp_get_wtime() - start);
}
