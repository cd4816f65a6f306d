// y = x W^T + b, piece by piece: some panels of the weight for all rows of x. Which kernel multiplies depends on how the weight lies:
//
//     PANELS_BF16   panel.h, by matrix tiles where the processor has them, else by vectors
//     PANELS_CODED  coded_panels.h, the same numbers in three quarters of the bytes, by the same kernels
//     PANELS_FP32   panels[N / 32][K][32 outputs] fp32
//     FLOATS        float_panels.h, fp8 with scales
//     BLOCKS        block_tiles.h, integers with scales; x is rounded to 8 bits for them, once for all pieces (`round_row`)
//
// Each output of each row is added up in one order, whatever stands beside it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "block_tiles.h"
#include "float_panels.h"
#include "panel_vectors.h"
#include "program.h"
#include "score_tiles.h"

namespace linear {

constexpr int64_t PIECE = 32 << 10;  // bytes of weights at least, that is a microsecond or two

inline int64_t num_panels(const Op& op) { return (op.N + PANEL - 1) / PANEL; }
inline int64_t panel_bytes(const Op& op) {
  if (op.format == BLOCKS) return blocks::panel_bytes(op.form, op.K, op.group);
  if (op.format == PANELS_CODED) return coded::panel_bytes(op.K);
  if (op.format == FLOATS) return float_panels::panel_bytes(op.K, op.group);
  return op.K * PANEL * (op.format == PANELS_BF16 ? 2 : 4);
}
inline int64_t panels_a_piece(const Op& op) { return std::max<int64_t>(1, PIECE / panel_bytes(op)); }
inline int64_t num_pieces(const Op& op) { return (num_panels(op) + panels_a_piece(op) - 1) / panels_a_piece(op); }

constexpr int ROWS_FP32 = IS_WIDE ? 8 : 2;  // of x at once: so many sums are registers

template <int M>
void multiply_fp32(const float* x, int64_t K, const float* panel, const float* bias, float* out, int64_t N, int64_t count) {
  const Mask some_low = first16(count), some_high = first16(count - 16);
  Floats low[M], high[M];
  for (int m = 0; m < M; ++m) low[m] = high[m] = floats(0);
  for (int64_t k = 0; k < K; ++k, panel += PANEL) {
    const Floats first = load(panel), second = load(panel + 16);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats input = floats(x[m * K + k]);
      low[m] = multiply_add(input, first, low[m]);
      high[m] = multiply_add(input, second, high[m]);
    }
  }
  for (int m = 0; m < M; ++m) {
    if (bias) {
      low[m] = low[m] + load_some(some_low, bias);
      high[m] = high[m] + load_some(some_high, bias + 16);
    }
    store_some(some_low, out + m * N, low[m]);
    store_some(some_high, out + m * N + 16, high[m]);
  }
}

inline void panels_fp32(const float* x, int64_t M, const Op& op, float* out, int64_t begin, int64_t end) {
  const float *weight = static_cast<const float*>(op.weight), *bias = static_cast<const float*>(op.bias);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t start = p * PANEL, count = std::min(PANEL, op.N - start);
    const float *panel = weight + start * op.K, *shift = bias ? bias + start : nullptr;
    int64_t m = 0;
    for (; m + ROWS_FP32 <= M; m += ROWS_FP32)
      multiply_fp32<ROWS_FP32>(x + m * op.K, op.K, panel, shift, out + m * op.N + start, op.N, count);
    for (; m < M; ++m) multiply_fp32<1>(x + m * op.K, op.K, panel, shift, out + m * op.N + start, op.N, count);
  }
}

inline void panels_bf16(const Op& op, const bf16* x, int64_t M, bf16* out, int64_t begin, int64_t end) {
  const bf16 *weight = static_cast<const bf16*>(op.weight), *bias = static_cast<const bf16*>(op.bias);
#ifdef HAS_TILES
  if (has_tiles()) return tiles::multiply_panels(x, M, op.K, weight, bias, out, op.N, begin, end);
#endif
  vectors::multiply_panels(x, M, op.K, weight, bias, out, op.N, begin, end);
}

inline void panels_coded(const Op& op, const bf16* x, int64_t M, bf16* out, int64_t begin, int64_t end) {
  const uint8_t* const weight = static_cast<const uint8_t*>(op.weight);
  const bf16* const bias = static_cast<const bf16*>(op.bias);
#ifdef HAS_TILES
  if (has_tiles()) return tiles::multiply_coded_panels(x, M, op.K, weight, bias, out, op.N, begin, end);
#endif
  vectors::multiply_coded_panels(x, M, op.K, weight, bias, out, op.N, begin, end);
}

// Inputs that BLOCKS fill up with zeros, in blocks.
inline int64_t num_blocks(const Op& op) { return blocks::num_blocks(op.K, op.group); }

// Memory for so many rows of x as BLOCKS take them.
inline int64_t rounded_lines(const Op& op, int64_t rows) { return ::rounded_lines(rows, num_blocks(op)); }

// Row m of so many as BLOCKS take it.
inline void round_row(const Op& op, const void* x, int64_t m, int64_t rows, Line* to) {
  if (op.out.is_bf16) ::round_row(static_cast<const bf16*>(x), m, rows, op.K, num_blocks(op), to);
  else ::round_row(static_cast<const float*>(x), m, rows, op.K, num_blocks(op), to);
}

template <class Number>
void blocks_piece(const Op& op, const Line* x, int64_t M, void* out, int64_t begin, int64_t end) {
  blocks::multiply_panels(x, M, op.K, static_cast<const uint8_t*>(op.weight), op.form, op.group, static_cast<const Number*>(op.bias),
                          static_cast<Number*>(out), op.N, begin, end);
}

// One piece of out (M, N) = x (M, K) W^T + b; `x` rounded for BLOCKS.
inline void run_piece(const Op& op, int64_t piece, const void* x, int64_t M, void* out) {
  const int64_t begin = piece * panels_a_piece(op), end = std::min(begin + panels_a_piece(op), num_panels(op));
  switch (op.format) {
    case BLOCKS:
      if (op.out.is_bf16) return blocks_piece<bf16>(op, static_cast<const Line*>(x), M, out, begin, end);
      return blocks_piece<float>(op, static_cast<const Line*>(x), M, out, begin, end);
    case TABLE: return;  // of tables alone
    case FLOATS:
      return float_panels::multiply_panels(
          static_cast<const bf16*>(x), M, op.K, static_cast<const uint8_t*>(op.weight), op.group,
          static_cast<const bf16*>(op.bias), static_cast<bf16*>(out), op.N, begin, end);
    case PANELS_FP32:
      return panels_fp32(static_cast<const float*>(x), M, op, static_cast<float*>(out), begin, end);
    case PANELS_BF16: return panels_bf16(op, static_cast<const bf16*>(x), M, static_cast<bf16*>(out), begin, end);
    case PANELS_CODED: return panels_coded(op, static_cast<const bf16*>(x), M, static_cast<bf16*>(out), begin, end);
  }
}

}  // namespace linear
