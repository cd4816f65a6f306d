// What keys and values of the cache are multiplied from: panels of a range of 64 positions, laid out anew.
//
//     keys     [size / 2][64 positions][2 numbers]           bf16; fp32: [size][64 positions]
//     values   [value_size / 64][64 / 2 positions][64 numbers][2 positions]    bf16; fp32: [value_size / 64][64 positions][64 numbers]
//
// In both, what a lane adds up lies in one lane, so that sums run over numbers of a key, or over positions, in order. What is not there
// is 0.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace panels {

constexpr int64_t RANGE = 64, WIDTH = 64;  // positions of a range; columns of a panel

template <typename Number>
constexpr int64_t TOGETHER = sizeof(Number) == 2 ? 2 : 1;  // what a lane multiplies at once

// Word c of row r -> word r of to + c * WIDTH. Rows have `count` words, at most 16.
#ifdef __AVX512BF16__
inline void transpose(const uint32_t* const* rows, int64_t count, uint32_t* to) {
  __m512i row[16], four[16];
  const Mask some = first16(count);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) row[r] = _mm512_maskz_loadu_epi32(some, rows[r]);
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {  // four[r + j]: words j, 4 + j, 8 + j, 12 + j of rows r to r + 3
    const __m512i a = _mm512_unpacklo_epi32(row[r], row[r + 1]), b = _mm512_unpackhi_epi32(row[r], row[r + 1]);
    const __m512i c = _mm512_unpacklo_epi32(row[r + 2], row[r + 3]), d = _mm512_unpackhi_epi32(row[r + 2], row[r + 3]);
    four[r] = _mm512_unpacklo_epi64(a, c);
    four[r + 1] = _mm512_unpackhi_epi64(a, c);
    four[r + 2] = _mm512_unpacklo_epi64(b, d);
    four[r + 3] = _mm512_unpackhi_epi64(b, d);
  }
  const auto put = [&](int64_t c, __m512i column) {
    if (c < count) _mm512_storeu_si512(to + c * WIDTH, column);
  };
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(four[j], four[4 + j], 0x44), b = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(four[j], four[4 + j], 0xee), d = _mm512_shuffle_i32x4(four[8 + j], four[12 + j], 0xee);
    put(j, _mm512_shuffle_i32x4(a, b, 0x88));
    put(4 + j, _mm512_shuffle_i32x4(a, b, 0xdd));
    put(8 + j, _mm512_shuffle_i32x4(c, d, 0x88));
    put(12 + j, _mm512_shuffle_i32x4(c, d, 0xdd));
  }
}

// Two rows of `count` numbers, at most 32, side by side
inline void interleave(const bf16* first, const bf16* second, int64_t count, bf16* to) {
  const __mmask32 some = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  const __m512i a = _mm512_maskz_loadu_epi16(some, first), b = _mm512_maskz_loadu_epi16(some, second);
  const __m512i count16 = counting().all;  // every other number is the second row's, which begins at 32
  const __m512i from_low = _mm512_or_si512(_mm512_or_si512(count16, _mm512_slli_epi32(count16, 16)), _mm512_set1_epi32(32 << 16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, from_low, b));
  _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, _mm512_add_epi16(from_low, _mm512_set1_epi16(16)), b));
}
#elif defined(__ARM_NEON)
inline void transpose(const uint32_t* const* rows, int64_t count, uint32_t* to) {
  for (int64_t begin = 0; begin < count; begin += 4)
    for (int64_t first = 0; first < 16; first += 4) {  // four rows, four words of each
      const int64_t words = std::min<int64_t>(4, count - begin);
      uint32_t found[4][4] = {};
      for (int r = 0; r < 4; ++r) std::memcpy(found[r], rows[first + r] + begin, 4 * words);
      const uint32x4x2_t a = vtrnq_u32(vld1q_u32(found[0]), vld1q_u32(found[1])), b = vtrnq_u32(vld1q_u32(found[2]), vld1q_u32(found[3]));
      const uint64x2_t halves[4] = {
          vreinterpretq_u64_u32(a.val[0]), vreinterpretq_u64_u32(a.val[1]), vreinterpretq_u64_u32(b.val[0]), vreinterpretq_u64_u32(b.val[1])};
      for (int64_t c = 0; c < words; ++c) {
        const uint64x2_t x = halves[c % 2], y = halves[2 + c % 2];
        vst1q_u32(to + (begin + c) * WIDTH + first, vreinterpretq_u32_u64(c < 2 ? vzip1q_u64(x, y) : vzip2q_u64(x, y)));
      }
    }
}

inline void interleave(const bf16* first, const bf16* second, int64_t count, bf16* to) {
  const Pairs x = load_pairs(first, count), y = load_pairs(second, count);
  const auto both = [&](uint32x4_t x, uint32x4_t y, bf16* to) {
    const uint16x8_t a = vreinterpretq_u16_u32(x), b = vreinterpretq_u16_u32(y);
    vst1q_u16(to, vzip1q_u16(a, b));
    vst1q_u16(to + 8, vzip2q_u16(a, b));
  };
  both(x.a, y.a, to);
  both(x.b, y.b, to + 16);
  both(x.c, y.c, to + 32);
  both(x.d, y.d, to + 48);
}
#else
inline void transpose(const uint32_t* const* rows, int64_t count, uint32_t* to) {
  for (int64_t begin = 0; begin < count; begin += 8)
    for (int64_t first = 0; first < 16; first += 8) {  // eight rows, eight words of each
      const int64_t words = std::min<int64_t>(8, count - begin);
      const __m256i some = lanes8((1u << words) - 1);
      __m256i row[8], two[8], four[8];
      for (int r = 0; r < 8; ++r) row[r] = _mm256_maskload_epi32(reinterpret_cast<const int*>(rows[first + r] + begin), some);
      for (int r = 0; r < 8; r += 2) {
        two[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
        two[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
      }
      for (int r = 0; r < 8; r += 4)  // four[r + j]: words j and 4 + j of rows r to r + 3
        for (int j = 0; j < 2; ++j) {
          four[r + 2 * j] = _mm256_unpacklo_epi64(two[r + j], two[r + 2 + j]);
          four[r + 2 * j + 1] = _mm256_unpackhi_epi64(two[r + j], two[r + 2 + j]);
        }
      for (int64_t c = 0; c < words; ++c) {
        const __m256i low = four[c % 4], high = four[4 + c % 4];
        const __m256i column = c < 4 ? _mm256_permute2x128_si256(low, high, 0x20) : _mm256_permute2x128_si256(low, high, 0x31);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (begin + c) * WIDTH + first), column);
      }
    }
}

inline void interleave(const bf16* first, const bf16* second, int64_t count, bf16* to) {
  const Pairs a = load_pairs(first, count), b = load_pairs(second, count);
  const auto both = [&](__m256i a, __m256i b, bf16* to) {
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, _mm256_permute2x128_si256(low, high, 0x31));
  };
  both(a.low, b.low, to);
  both(a.high, b.high, to + 32);
}
#endif

// Rows of the cache that come next, brought to the second level a line at a time, between products: all at once, they would keep
// other loads waiting.
struct Fetch {
  const char* row;
  int64_t apart, bytes, left;  // from row to row; of a row; lines
  int64_t each = 1, at = 0;    // lines a step; where in the row

  template <typename Number>
  Fetch(const Number* first, int64_t apart, int64_t size, int64_t count)
      : row(reinterpret_cast<const char*>(first)), apart(apart * int64_t(sizeof(Number))), bytes(size * int64_t(sizeof(Number))),
        left(count * ((bytes + 63) / 64)) {}
  void divide(int64_t steps) { each = (left + steps - 1) / steps; }

  void step() {
    for (int64_t i = 0; i < each && left > 0; ++i, --left) {
      fetch_far(row + at);
      if ((at += 64) < bytes) continue;
      at = 0;
      row += apart;
    }
  }
};

// Keys of a range -> a panel, up to the next whole sixteen. `at(j)`: the j-th of `count`.
template <typename Number, typename At>
void pack_keys(int64_t count, int64_t size, const At& at, Number* panel) {
  const int64_t words = size / TOGETHER<Number>;
  for (int64_t j = 0; j < count; j += 16) {
    const uint32_t* rows[16];
    for (int64_t r = 0; r < 16; ++r) rows[r] = reinterpret_cast<const uint32_t*>(at(std::min(j + r, count - 1)));
    for (int64_t w = 0; w < words; w += 16) {
      transpose(rows, std::min<int64_t>(16, words - w), reinterpret_cast<uint32_t*>(panel) + w * WIDTH + j);
      for (auto& row : rows) row += 16;
    }
  }
}

// Values of a range -> panels; positions up to the next whole pair.
template <typename Number, typename At>
void pack_values(int64_t count, int64_t size, const At& at, Number* panel) {
  for (int64_t d = 0; d < size; d += WIDTH, panel += RANGE * WIDTH) {
    const int64_t width = std::min(WIDTH, size - d);
    for (int64_t j = 0; j < count; j += TOGETHER<Number>) {
      Number* const to = panel + j * WIDTH;
      if constexpr (sizeof(Number) == 2) {
        static const bf16 nothing[WIDTH] = {};
        const bf16 *first = at(j) + d, *second = j + 1 < count ? at(j + 1) + d : nothing;
        interleave(first, second, std::min<int64_t>(32, width), to);
        interleave(first + 32, second + 32, std::max<int64_t>(0, width - 32), to + 64);
      } else {
        std::memcpy(to, at(j) + d, width * sizeof(Number));
        std::fill_n(to + width, WIDTH - width, Number(0));
      }
    }
  }
}

inline Floats add(Floats sum, Floats a, Floats b) { return multiply_add(a, b, sum); }
inline Floats add(Floats sum, Pairs a, Pairs b) { return add_products(sum, a, b); }
inline Floats same(const float* at) { return floats(*at); }
inline Pairs same(const bf16* at) { return same_pair(at); }
inline Floats lane(const float* at) { return load(at); }
inline Pairs lane(const bf16* at) { return load_pairs(at); }

constexpr int ROWS = IS_WIDE ? 6 : 2, VECTORS = IS_WIDE ? 4 : 2;  // of sums that are registers

// sums (M, 16 V) = kept * sums + rows times a panel, over `depth` numbers of a row; without `kept`, the product alone
// A function by itself: inlined into its callers, its sums leave the registers
template <int M, int V, typename Number>
__attribute__((noinline)) void multiply(const Number* rows, int64_t row_step, int64_t depth, const Number* panel, const float* kept,
                                        float* sums, int64_t sum_step, Fetch& fetch) {
  Floats sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[m][v] = kept ? load(sums + m * sum_step + 16 * v) * floats(kept[m]) : floats(0);
  for (int64_t k = 0; k < depth; k += TOGETHER<Number>) {
    fetch.step();
    decltype(lane(panel)) columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = lane(panel + k * WIDTH + 16 * TOGETHER<Number> * v);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto number = same(rows + m * row_step + k);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] = add(sum[m][v], number, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + m * sum_step + 16 * v, sum[m][v]);
}

inline int64_t steps_of(int64_t count, int64_t depth) { return (count + ROWS - 1) / ROWS * (WIDTH / (16 * VECTORS)) * depth; }

// The same for any number of rows, and the first `columns` of the panel at least
template <typename Number>
void multiply_rows(int64_t count, const Number* rows, int64_t row_step, int64_t depth, const Number* panel, const float* kept,
                   float* sums, int64_t sum_step, Fetch& fetch, int64_t columns = WIDTH) {
  for (int64_t m = 0; m < count; m += ROWS)
    for (int64_t v = 0; v < columns; v += 16 * VECTORS) {
      const auto go = [&]<int M>() {
        const auto several = [&]<int V>() {
          multiply<M, V>(rows + m * row_step, row_step, depth, panel + v * TOGETHER<Number>, kept ? kept + m : nullptr,
                         sums + m * sum_step + v, sum_step, fetch);
        };
        if (columns - v <= 16) several.template operator()<1>();
        else if (columns - v <= 32) several.template operator()<2>();
        else several.template operator()<VECTORS>();
      };
      switch (std::min<int64_t>(ROWS, count - m)) {
        case 1: go.template operator()<1>(); break;
        case 2: go.template operator()<2>(); break;
        case 3: go.template operator()<ROWS < 3 ? 1 : 3>(); break;
        case 4: go.template operator()<ROWS < 4 ? 1 : 4>(); break;
        case 5: go.template operator()<ROWS < 5 ? 1 : 5>(); break;
        default: go.template operator()<ROWS>(); break;
      }
    }
}

}  // namespace panels
