// What both kernels for linear layers share: the layout of the weights and the way results are written.
//
//     panels[N / 32][K / 2][32 outputs][2 inputs]   bf16, N and K padded with zeros
//
// Within a panel, pairs of inputs of all 32 outputs lie side by side: what `vdpbf16ps` multiplies with one pair of a row, and
// sixteen of them what `tdpbf16ps` multiplies with a tile of rows. A thread reads its share front to back and never waits
// for an address.

#pragma once

#include <immintrin.h>

#include <cstdint>

using bf16 = uint16_t;
constexpr int64_t PANEL = 32;        // outputs of a panel: two vectors of 16 accumulators
constexpr int64_t LINE = 32;         // numbers of a cache line
constexpr int64_t SERIAL = 1 << 16;  // weights below which a second thread costs more than it does

inline __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }

// Where a panel's results go: `count` outputs of rows that are N apart.
struct Output {
  const bf16* bias;
  bf16* at;
  int64_t N, count;

  void write(int64_t row, __m512 low, __m512 high) const {
    const __mmask16 some_low = count >= 16 ? 0xffff : (1u << count) - 1;
    const __mmask16 some_high = count >= PANEL ? 0xffff : count <= 16 ? 0 : (1u << (count - 16)) - 1;
    if (bias) {
      low = _mm512_add_ps(low, widen(_mm256_maskz_loadu_epi16(some_low, bias)));
      high = _mm512_add_ps(high, widen(_mm256_maskz_loadu_epi16(some_high, bias + 16)));
    }
    _mm256_mask_storeu_epi16(at + row * N, some_low, (__m256i)_mm512_cvtneps_pbh(low));
    _mm256_mask_storeu_epi16(at + row * N + 16, some_high, (__m256i)_mm512_cvtneps_pbh(high));
  }
};

extern "C" {

// x (M, K), panels as above, bias (N) or null -> out (M, N)
using PanelLinear = void(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N);

bool outrider_has_tiles();                // whether this processor and system have bf16 tiles (AMX)
PanelLinear outrider_panel_linear;          // by tiles where there are, else by vectors
PanelLinear outrider_panel_linear_vectors;  // AVX-512
PanelLinear outrider_panel_linear_tiles;    // only where there are tiles
}
