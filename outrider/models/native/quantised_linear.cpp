// y = x W^T + b where W is kept in 4 or 8 bits: a draft that reads a quarter or half of its target's bytes.
//
//     panels[N / 32][K / group]    32 scales, for 4 bits also 32 zeros (bf16); then group / 32 blocks
//     block, 4 bits                [4][2][16 outputs][4 bytes]   8 inputs a line: the low halves are inputs 0 to 3, the high ones 4 to 7
//     block, 8 bits                [8][2][16 outputs][4 bytes]   4 inputs a line
//
// w = (code - middle) * scale + zero, middle being 8 or 128. A thread reads its share front to back, as in `panel.h`.
//
// Activations are rounded to 8 bits (`rounded_inputs.h`), so that the 32 products of a block add up exactly; each block's sum then
// joins one fp32 accumulator per output and row. Nothing depends on the rows beside it, and a pass over one row waits for memory
// alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "rounded_inputs.h"
#include "shim.h"

namespace {

constexpr int64_t ROWS = 64;  // rows that share one reading of a panel
template <int BITS>
constexpr int64_t BYTES = BLOCK * PANEL * BITS / 8;  // of a block
template <int BITS>
constexpr int32_t MIDDLE = 1 << (BITS - 1);  // the code that stands for no weight

// What codes of a group are multiplied with, and what is added.
template <int BITS>
struct Factors {
  static constexpr int64_t SIZE = (BITS == 4 ? 2 : 1) * PANEL * sizeof(bf16);
  Floats scales[2], zeros[2];

  void read(const uint8_t* from) {
    const bf16* const at = reinterpret_cast<const bf16*>(from);
    for (int half = 0; half < 2; ++half) {
      scales[half] = load(at + 16 * half);
      zeros[half] = BITS == 4 ? load(at + PANEL + 16 * half) : floats(0);
    }
  }
};

// A block's codes, a byte each: vector 2 k + h holds inputs 4 k to 4 k + 3 of outputs 16 h to 16 h + 15.
template <int BITS>
inline void read_codes(const uint8_t* block, Bytes (&codes)[VECTORS]) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < BYTES<BITS> / 64; ++line) {
    const Bytes bytes = load_bytes(block + 64 * line);
    if constexpr (BITS == 8) {
      codes[line] = bytes;
    } else {
      codes[line / 2 * 4 + line % 2] = low_halves(bytes);
      codes[line / 2 * 4 + line % 2 + 2] = high_halves(bytes);
    }
  }
}

template <int BITS>
inline Ints multiply_four(Ints sum, Bytes codes, const int8_t* inputs) {
  return BITS == 4 ? add_small_products(sum, codes, inputs) : add_products(sum, codes, inputs);
}

// Adds one row's products with a block to sums (32,).
template <int BITS>
inline void multiply_row(const Inputs& x, const Bytes (&codes)[VECTORS], const Factors<BITS>& factors, float* sums) {
  const int32_t codes_sum = x.sums[0] + x.sums[1];
  Ints products[2];
  products[0] = products[1] = ints(-MIDDLE<BITS> * codes_sum);
#pragma GCC unroll 8
  for (int64_t k = 0; k < BLOCK / 4; ++k) {
    products[0] = multiply_four<BITS>(products[0], codes[2 * k], x.codes + 4 * k);
    products[1] = multiply_four<BITS>(products[1], codes[2 * k + 1], x.codes + 4 * k);
  }
  const Floats scale = floats(x.scale), sum = floats(x.scale * codes_sum);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Floats found = to_floats(products[half]) * scale;
    Floats total = multiply_add(found, factors.scales[half], load(sums + 16 * half));
    if constexpr (BITS == 4) total = multiply_add(sum, factors.zeros[half], total);
    store(sums + 16 * half, total);
  }
}

// Up to ROWS rows (of inputs (rows, blocks)) times one panel -> sums (rows, 32). `fetch`: it comes from memory.
template <int BITS>
void multiply(
    const Inputs* x, int64_t rows, int64_t blocks, const uint8_t* at, int64_t blocks_per_group, bool fetch, float* sums) {
  std::memset(sums, 0, rows * PANEL * sizeof(float));
  Factors<BITS> factors;
  Bytes codes[VECTORS];
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
        output.write(r, load(sums + r * PANEL), load(sums + r * PANEL + PANEL / 2));
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
