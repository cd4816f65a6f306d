// y = x W^T + b where W is kept in 4 or 8 bits: a draft that reads a quarter or half of its target's bytes.
//
//     panels[N / 32][K / group]    32 scales, for 4 bits also 32 zeros (bf16); then group / 32 blocks
//     block, 4 bits                [4][2][16 outputs][4 bytes]   8 inputs a line: the low halves are inputs 0 to 3, the high ones 4 to 7
//     block, 8 bits                [8][2][16 outputs][4 bytes]   4 inputs a line
//
// w = (code - middle) * scale + zero, middle being 8 or 128. A thread reads its share front to back, as in `panel.h`.
//
// Activations are rounded to 8 bits, 32 at a time with a scale of their own, so that the 32 products of a block add up exactly,
// as integers, 64 of them an instruction; each block's sum then joins one fp32 accumulator per output and row. Nothing depends
// on the rows beside it, and a pass over one row waits for memory alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shim.h"

#define WITH_BYTE_PRODUCTS __attribute__((target("avx512vnni")))

namespace {

constexpr int64_t BLOCK = 32;                          // inputs whose products add up as integers
constexpr int64_t VECTORS = BLOCK * PANEL / 64;        // of a block's codes, one byte each: [BLOCK / 4][2]
constexpr int64_t ROWS = 64;                           // rows that share one reading of a panel
constexpr int64_t AHEAD = 8192;                        // bytes; the hardware's own prefetch stops at pages
template <int BITS>
constexpr int64_t BYTES = BLOCK * PANEL * BITS / 8;    // of a block
template <int BITS>
constexpr int32_t MIDDLE = 1 << (BITS - 1);            // the code that stands for no weight

// 32 inputs of a row: x = code * scale.
struct Inputs {
  int8_t codes[BLOCK];
  float scale;
  int32_t sum;  // of the codes
};

Inputs to_bytes(const bf16* x, int64_t count) {
  const __mmask16 low_some = count >= 16 ? 0xffff : (1u << count) - 1;
  const __mmask16 high_some = count >= 32 ? 0xffff : count <= 16 ? 0 : (1u << (count - 16)) - 1;
  const __m512 low = widen(_mm256_maskz_loadu_epi16(low_some, x)), high = widen(_mm256_maskz_loadu_epi16(high_some, x + 16));
  const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
  const __m512 steps = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
  const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, steps));
  const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, steps));
  Inputs found;
  _mm_storeu_si128((__m128i*)found.codes, _mm512_cvtepi32_epi8(first));
  _mm_storeu_si128((__m128i*)(found.codes + 16), _mm512_cvtepi32_epi8(second));
  found.scale = largest / 127;
  found.sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
  return found;
}

// (M, K) -> (M, blocks), zeros behind K.
void all_to_bytes(const bf16* x, int64_t M, int64_t K, int64_t blocks, Inputs* inputs) {
#pragma omp parallel for schedule(static) if (M > 8)
  for (int64_t m = 0; m < M; ++m)
    for (int64_t b = 0; b < blocks; ++b)
      inputs[m * blocks + b] = to_bytes(x + m * K + b * BLOCK, std::clamp<int64_t>(K - b * BLOCK, 0, BLOCK));
}

// What codes of a group are multiplied with, and what is added.
template <int BITS>
struct Factors {
  static constexpr int64_t SIZE = (BITS == 4 ? 2 : 1) * PANEL * sizeof(bf16);
  __m512 scales[2], zeros[2];

  void read(const uint8_t* at) {
    for (int half = 0; half < 2; ++half) {
      scales[half] = widen(_mm256_loadu_si256((const __m256i*)at + half));
      zeros[half] = BITS == 4 ? widen(_mm256_loadu_si256((const __m256i*)at + 2 + half)) : _mm512_setzero_ps();
    }
  }
};

// A block's codes, a byte each: vector 2 k + h holds inputs 4 k to 4 k + 3 of outputs 16 h to 16 h + 15.
template <int BITS>
inline void read_codes(const uint8_t* block, __m512i (&codes)[VECTORS]) {
  const __m512i half_byte = _mm512_set1_epi8(15);
#pragma GCC unroll 16
  for (int64_t line = 0; line < BYTES<BITS> / 64; ++line) {
    const __m512i bytes = _mm512_loadu_si512(block + 64 * line);
    if constexpr (BITS == 8) {
      codes[line] = bytes;
    } else {
      codes[line / 2 * 4 + line % 2] = _mm512_and_si512(bytes, half_byte);
      codes[line / 2 * 4 + line % 2 + 2] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), half_byte);
    }
  }
}

// Adds one row's products with a block to sums (32,).
template <int BITS>
WITH_BYTE_PRODUCTS inline void multiply_row(
    const Inputs& x, const __m512i (&codes)[VECTORS], const Factors<BITS>& factors, float* sums) {
  __m512i products[2];
  products[0] = products[1] = _mm512_set1_epi32(-MIDDLE<BITS> * x.sum);
#pragma GCC unroll 8
  for (int64_t k = 0; k < BLOCK / 4; ++k) {
    int32_t four;
    std::memcpy(&four, x.codes + 4 * k, sizeof four);
    const __m512i inputs = _mm512_set1_epi32(four);
    products[0] = _mm512_dpbusd_epi32(products[0], codes[2 * k], inputs);
    products[1] = _mm512_dpbusd_epi32(products[1], codes[2 * k + 1], inputs);
  }
  const __m512 scale = _mm512_set1_ps(x.scale), sum = _mm512_set1_ps(x.scale * x.sum);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512 found = _mm512_mul_ps(_mm512_cvtepi32_ps(products[half]), scale);
    __m512 total = _mm512_fmadd_ps(found, factors.scales[half], _mm512_load_ps(sums + 16 * half));
    if constexpr (BITS == 4) total = _mm512_fmadd_ps(sum, factors.zeros[half], total);
    _mm512_store_ps(sums + 16 * half, total);
  }
}

// Up to ROWS rows (of inputs (rows, blocks)) times one panel -> sums (rows, 32). `fetch`: it comes from memory.
template <int BITS>
WITH_BYTE_PRODUCTS void multiply(
    const Inputs* x, int64_t rows, int64_t blocks, const uint8_t* at, int64_t blocks_per_group, bool fetch, float* sums) {
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  Factors<BITS> factors;
  __m512i codes[VECTORS];
  for (int64_t block = 0; block < blocks; ++block) {
    if (block % blocks_per_group == 0) {
      if (fetch) _mm_prefetch(at + AHEAD, _MM_HINT_T0), _mm_prefetch(at + AHEAD + 64, _MM_HINT_T0);
      factors.read(at);
      at += Factors<BITS>::SIZE;
    }
    if (fetch)
      for (int64_t line = 0; line < BYTES<BITS>; line += 64) _mm_prefetch(at + AHEAD + line, _MM_HINT_T0);
    read_codes<BITS>(at, codes);
    at += BYTES<BITS>;
    for (int64_t m = 0; m < rows; ++m) multiply_row<BITS>(x[m * blocks + block], codes, factors, sums + m * PANEL);
  }
}

template <int BITS>
void quantised_linear(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, int64_t group, const bf16* bias, bf16* out, int64_t N) {
  const int64_t groups = (K + group - 1) / group, blocks = groups * group / BLOCK;
  const int64_t size = groups * Factors<BITS>::SIZE + blocks * BYTES<BITS>;
  thread_local std::vector<Inputs> inputs;
  inputs.resize(M * blocks);
  const Inputs* const rounded = inputs.data();  // the caller's, whichever thread reads it
  all_to_bytes(x, M, K, blocks, inputs.data());
#pragma omp parallel for schedule(static) if (K * N > SERIAL)
  for (int64_t p = 0; p < (N + PANEL - 1) / PANEL; ++p) {
    alignas(64) float sums[ROWS * PANEL];
    const int64_t start = p * PANEL;
    for (int64_t m = 0; m < M; m += ROWS) {
      const int64_t rows = std::min(ROWS, M - m);
      multiply<BITS>(rounded + m * blocks, rows, blocks, panels + p * size, group / BLOCK, m == 0, sums);
      const Output output{bias ? bias + start : nullptr, out + m * N + start, N, std::min(PANEL, N - start)};
      for (int64_t r = 0; r < rows; ++r)
        output.write(r, _mm512_load_ps(sums + r * PANEL), _mm512_load_ps(sums + r * PANEL + PANEL / 2));
    }
  }
}

}  // namespace

extern "C" {

// x (M, K), panels as above for 4 or 8 `bits`, `group` a multiple of 32, bias (N) or null -> out (M, N)
void outrider_quantised_linear(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, int64_t bits, int64_t group, const bf16* bias, bf16* out,
    int64_t N) {
  (bits == 4 ? quantised_linear<4> : quantised_linear<8>)(x, M, K, panels, group, bias, out, N);
}

AOTITorchError aoti_torch_cpu_quantised_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t out_features, int64_t bits, int64_t group,
    AtenTensorHandle* result) {
  Call call;
  if (open_call(x, panels, bias, out_features, result, call)) return 1;
  outrider_quantised_linear(
      call.x, call.M, call.K, static_cast<const uint8_t*>(call.weights), bits, group, call.bias, call.out, out_features);
  return 0;
}

}  // extern "C"
