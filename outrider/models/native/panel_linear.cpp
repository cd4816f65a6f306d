// y = x W^T + b for a few rows of bf16 activations, at the speed of memory.
//
// Decoding reads every weight once per pass and multiplies it with a handful of rows, so the only thing that counts is how
// fast weights stream in. W is stored as panels of 32 outputs; within a panel, pairs of inputs of all 32 outputs lie side
// by side (what `vdpbf16ps` multiplies), so that a thread reads its share front to back and never waits for an address:
//
//     panels[N / 32][K / 2][32 outputs][2 inputs]   bf16, N and K padded with zeros
//
// Each output of each row is one fp32 accumulator over k = 0, 2, 4, ...: its bits depend neither on how many rows stand
// beside it nor on the number of threads. Up to 8 rows share one reading of the weights from memory; more rows reuse a
// panel from the cache, 8 at a time. There is no prefetch in the code: the hardware's, on a plain forward stream, is better.

#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int64_t PANEL = 32;         // outputs of a panel: two vectors of 16 accumulators
constexpr int ROWS = 8;               // rows multiplied at once
constexpr int64_t SERIAL = 1 << 16;   // weights below which a second thread costs more than it does

inline __m512bh pair(const bf16* at) {
  int32_t both;
  std::memcpy(&both, at, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

inline __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }

// M rows times one panel: out[m][0 .. count)
template <int M>
void multiply(const bf16* x, int64_t K, const bf16* panel, const bf16* bias, bf16* out, int64_t N, int64_t count) {
  __m512 low[M], high[M];
  for (int m = 0; m < M; ++m) low[m] = high[m] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, panel += 2 * PANEL) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(panel);
    const __m512bh second = (__m512bh)_mm512_loadu_si512(panel + PANEL);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512bh inputs = pair(x + m * K + k);
      low[m] = _mm512_dpbf16_ps(low[m], inputs, first);
      high[m] = _mm512_dpbf16_ps(high[m], inputs, second);
    }
  }
  const __mmask16 some_low = count >= 16 ? 0xffff : (1u << count) - 1;
  const __mmask16 some_high = count >= PANEL ? 0xffff : count <= 16 ? 0 : (1u << (count - 16)) - 1;
  const __m512 bias_low = bias ? widen(_mm256_maskz_loadu_epi16(some_low, bias)) : _mm512_setzero_ps();
  const __m512 bias_high = bias ? widen(_mm256_maskz_loadu_epi16(some_high, bias + 16)) : _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const __m512 sum_low = _mm512_add_ps(low[m], bias_low), sum_high = _mm512_add_ps(high[m], bias_high);
    _mm256_mask_storeu_epi16(out + m * N, some_low, (__m256i)_mm512_cvtneps_pbh(sum_low));
    _mm256_mask_storeu_epi16(out + m * N + 16, some_high, (__m256i)_mm512_cvtneps_pbh(sum_high));
  }
}

using Multiply = void (*)(const bf16*, int64_t, const bf16*, const bf16*, bf16*, int64_t, int64_t);
constexpr Multiply MULTIPLY[ROWS] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                     multiply<5>, multiply<6>, multiply<7>, multiply<8>};

}  // namespace

extern "C" {

// x (M, K), panels as above, bias (N) or null -> out (M, N)
void outrider_panel_linear(const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N) {
  const int64_t num_panels = (N + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (K * N > SERIAL)
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t start = p * PANEL, count = std::min(PANEL, N - start);
    for (int64_t m = 0; m < M; m += ROWS)
      MULTIPLY[std::min<int64_t>(ROWS, M - m) - 1](
          x + m * K, K, panels + start * K, bias ? bias + start : nullptr, out + m * N + start, N, count);
  }
}

// The same for programs that AOTInductor made: it calls this by name.
AOTITorchError aoti_torch_cpu_panel_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* result) {
  int64_t dim = 0, numel = 0;
  int64_t* sizes = nullptr;
  bool contiguous = false;
  void *from = nullptr, *weights = nullptr, *offsets = nullptr, *to = nullptr;
  if (aoti_torch_is_contiguous(x, &contiguous) || !contiguous) return 1;
  if (aoti_torch_get_dim(x, &dim) || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_numel(x, &numel)) return 1;
  std::vector<int64_t> shape(sizes, sizes + dim), strides(dim, 1);
  const int64_t K = shape.back();
  shape.back() = out_features;
  for (int64_t d = dim - 1; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  if (aoti_torch_empty_strided(
          dim, shape.data(), strides.data(), aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, result))
    return 1;
  if (aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(panels, &weights) ||
      aoti_torch_get_data_ptr(*result, &to))
    return 1;
  if (bias && aoti_torch_get_data_ptr(*bias, &offsets)) return 1;
  outrider_panel_linear(
      static_cast<const bf16*>(from), numel / K, K, static_cast<const bf16*>(weights), static_cast<const bf16*>(offsets),
      static_cast<bf16*>(to), out_features);
  return 0;
}

}  // extern "C"
