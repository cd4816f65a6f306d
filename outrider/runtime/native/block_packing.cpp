// GGUF's blocks put into panels of 32 outputs, as `models/gguf/formats.py` describes both: byte for byte what it makes with torch.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t WIDTH = 32, BLOCK = 32;       // outputs of a panel, inputs of a block in it
using Row = const uint8_t* __restrict;          // a group of inputs of one output, as the file has it

const int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4

// 16 bytes -> 32 codes: the low halves of all, then the high ones. Eight at a time: as single bytes compilers leave them single.
inline void halves(Row from, uint8_t* codes) {
  constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
  uint64_t both[2];
  std::memcpy(both, from, 16);
  const uint64_t each[4] = {both[0] & LOW, both[1] & LOW, both[0] >> 4 & LOW, both[1] >> 4 & LOW};
  std::memcpy(codes, each, BLOCK);
}

inline void levels(uint8_t* codes) {
  for (int i = 0; i < BLOCK; ++i) codes[i] = uint8_t(LEVELS[codes[i]] + 128);
}

// 32 bytes -> 32 codes of some bits each
inline void bits(Row from, int shift, uint8_t mask, uint8_t* codes) {
  for (int i = 0; i < BLOCK; ++i) codes[i] = uint8_t(from[i] >> shift) & mask;
}

inline void more_bits(Row from, int shift, uint8_t mask, int to, uint8_t* codes) {
  for (int i = 0; i < BLOCK; ++i) codes[i] |= uint8_t(((from[i] >> shift) & mask) << to);
}

// bit n of four bytes is the fifth of code n
inline void fifth(Row from, uint8_t* codes) {
  constexpr uint64_t EACH = 0x0101010101010101, OWN = 0x8040201008040201, CARRY = 0x7f7f7f7f7f7f7f7f;
  for (int i = 0; i < 4; ++i) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= (((from[i] * EACH & OWN) + CARRY) >> 3) & EACH << 4;  // a byte that is not 0 carries into its own top bit
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// number k of eight steps and eight shifts of 6 bits in 12 bytes
inline void six_bits(Row from, int k, int8_t* steps, int8_t* shifts) {
  const uint8_t *first = from, *second = from + 4, *rest = from + 8;
  steps[0] = int8_t(k < 4 ? first[k] & 63 : (rest[k - 4] & 15) | first[k - 4] >> 6 << 4);
  shifts[0] = int8_t(k < 4 ? second[k] & 63 : rest[k - 4] >> 4 | second[k - 4] >> 6 << 4);
}

// A format: bytes of a group in the file, inputs of a group, bits of a code in a panel, bytes of a factor, where scale and zero lie
// (-1: no zero), steps of a block, whether it has shifts. `take` gives the codes of block k of a group, its steps and shifts.
template <int SIZE_, int GROUP_, int BITS_, int SCALE_, int ZERO_ = -1, int STEPS_ = 0, bool SHIFTS_ = false, int FACTOR_ = 2>
struct Format {
  static constexpr int SIZE = SIZE_, GROUP = GROUP_, BITS = BITS_, SCALE = SCALE_, ZERO = ZERO_, STEPS = STEPS_, FACTOR = FACTOR_;
  static constexpr bool SHIFTS = SHIFTS_;
};

struct Q4_0 : Format<18, 32, 4, 0> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 2, codes); }
};
struct Q4_1 : Format<20, 32, 4, 0, 2> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 4, codes); }
};
struct Q5_0 : Format<22, 32, 5, 0> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 6, codes), fifth(b + 2, codes); }
};
struct Q5_1 : Format<24, 32, 5, 0, 2> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 8, codes), fifth(b + 4, codes); }
};
struct Q8_0 : Format<34, 32, 8, 0> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) {
    for (int i = 0; i < BLOCK; ++i) codes[i] = b[2 + i] ^ 0x80;
  }
};
struct Iq4Nl : Format<18, 32, 8, 0> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 2, codes), levels(codes); }
};
struct Mxfp4 : Format<17, 32, 4, 0, -1, 0, false, 1> {
  static void take(Row b, int, uint8_t* codes, int8_t*, int8_t*) { halves(b + 1, codes); }
};
struct Q2K : Format<84, 256, 4, 80, 82, 2, true> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t* shifts) {
    bits(b + 16 + k / 4 * 32, k % 4 * 2, 3, codes);
    for (int i = 0; i < 2; ++i) steps[i] = int8_t(b[2 * k + i] & 15), shifts[i] = int8_t(b[2 * k + i] >> 4);
  }
};
struct Q3K : Format<110, 256, 6, 108, -1, 2> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t*) {
    bits(b + 32 + k / 4 * 32, k % 4 * 2, 3, codes), more_bits(b, k, 1, 2, codes);
    for (int i = 0; i < BLOCK; ++i) codes[i] += 32 - 4;
    for (int i = 0; i < 2; ++i) {
      const int n = 2 * k + i, low = b[96 + n % 8] >> (n / 8 * 4) & 15, high = b[104 + n % 4] >> (n / 4 * 2) & 3;
      steps[i] = int8_t((low | high << 4) - 32);
    }
  }
};
struct Q4K : Format<144, 256, 4, 0, 2, 1, true> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t* shifts) {
    bits(b + 16 + k / 2 * 32, k % 2 * 4, 15, codes), six_bits(b + 4, k, steps, shifts);
  }
};
struct Q5K : Format<176, 256, 5, 0, 2, 1, true> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t* shifts) {
    bits(b + 48 + k / 2 * 32, k % 2 * 4, 15, codes), more_bits(b + 16, k, 1, 4, codes), six_bits(b + 4, k, steps, shifts);
  }
};
struct Q6K : Format<210, 256, 6, 208, -1, 2> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t*) {
    bits(b + k / 4 * 64 + k % 2 * 32, k % 4 / 2 * 4, 15, codes), more_bits(b + 128 + k / 4 * 32, k % 4 * 2, 3, 4, codes);
    std::memcpy(steps, b + 192 + 2 * k, 2);
  }
};
struct Iq4Xs : Format<136, 256, 8, 0, -1, 1> {
  static void take(Row b, int k, uint8_t* codes, int8_t* steps, int8_t*) {
    halves(b + 8 + k * 16, codes), levels(codes);
    steps[0] = int8_t(((b[4 + k / 2] >> (k % 2 * 4) & 15) | (b[2 + k / 4] >> (k % 4 * 2) & 3) << 4) - 32);
  }
};

// Codes of a block of some outputs: four inputs a word, words of 32 outputs side by side. Two words are read as one number, the even
// one below.
template <int BITS>
inline void put(const uint8_t (*codes)[BLOCK], int64_t outputs, uint8_t* to) {
  constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
  constexpr int EXTRA = BITS == 5 ? 1 : 2, PAIRS = 4 / EXTRA;  // of words whose further bits share a word
  constexpr uint64_t HIGH = EXTRA == 1 ? 0x0101010101010101 : 0x0303030303030303;
  for (int64_t o = 0; o < outputs; ++o) {
    const auto word = [to, o](int at, uint64_t value) {
      const uint32_t low = uint32_t(value);
      std::memcpy(to + (at * WIDTH + o) * 4, &low, 4);
    };
    uint64_t pairs[4];
    std::memcpy(pairs, codes[o], BLOCK);
    if constexpr (BITS == 8) {
      for (int i = 0; i < 4; ++i) word(2 * i, pairs[i]), word(2 * i + 1, pairs[i] >> 32);
    } else {
      for (int i = 0; i < 4; ++i) word(i, (pairs[i] & LOW) | (pairs[i] & LOW) >> 28);
    }
    if constexpr (BITS == 5 || BITS == 6) {
      for (int part = 0; part < 4 / PAIRS; ++part) {
        uint64_t found = 0;
        for (int i = 0; i < PAIRS; ++i) found |= (pairs[part * PAIRS + i] >> 4 & HIGH) << 2 * EXTRA * i;
        word(4 + part, found | found >> (32 - EXTRA));
      }
    }
  }
}

template <class F>
void pack(const uint8_t* const* rows, int64_t outputs, int64_t groups, uint8_t* panels) {
  constexpr int64_t STEP_BYTES = WIDTH * F::STEPS * (F::SHIFTS ? 2 : 1), BLOCK_BYTES = STEP_BYTES + BLOCK * WIDTH * F::BITS / 8;
  constexpr int64_t FACTORS = WIDTH * F::FACTOR * (F::ZERO < 0 ? 1 : 2), BLOCKS = F::GROUP / BLOCK;
  uint8_t codes[WIDTH][BLOCK];  // of all outputs, so that words are not read while their bytes are still being written
  int8_t steps[2], shifts[2];
  for (int64_t first = 0; first < outputs; first += WIDTH) {
    const int64_t count = outputs - first < WIDTH ? outputs - first : WIDTH;
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t o = 0; o < count; ++o) {
        Row from = rows[first + o] + group * F::SIZE;
        std::memcpy(panels + o * F::FACTOR, from + F::SCALE, F::FACTOR);
        if constexpr (F::ZERO >= 0) std::memcpy(panels + (WIDTH + o) * F::FACTOR, from + F::ZERO, F::FACTOR);
      }
      panels += FACTORS;
      for (int k = 0; k < BLOCKS; ++k, panels += BLOCK_BYTES) {
        for (int64_t o = 0; o < count; ++o) {
          F::take(rows[first + o] + group * F::SIZE, k, codes[o], steps, shifts);
          for (int i = 0; i < F::STEPS; ++i) {
            panels[i * WIDTH + o] = uint8_t(steps[i]);
            if constexpr (F::SHIFTS) panels[(F::STEPS + i) * WIDTH + o] = uint8_t(shifts[i]);
          }
        }
        put<F::BITS>(codes, count, panels + STEP_BYTES);
      }
    }
  }
}

}  // namespace

extern "C" {

// rows (outputs,): where each output's row lies in the file's format, with GGUF's number of it; panels: zeros.
// False for a format that no panels hold.
bool outrider_pack_blocks(const uint8_t* const* rows, int64_t outputs, int64_t inputs, int64_t kind, uint8_t* panels) {
  const int64_t blocks = inputs / BLOCK, groups = inputs / 256;
  switch (kind) {
    case 2: return pack<Q4_0>(rows, outputs, blocks, panels), true;
    case 3: return pack<Q4_1>(rows, outputs, blocks, panels), true;
    case 6: return pack<Q5_0>(rows, outputs, blocks, panels), true;
    case 7: return pack<Q5_1>(rows, outputs, blocks, panels), true;
    case 8: return pack<Q8_0>(rows, outputs, blocks, panels), true;
    case 10: return pack<Q2K>(rows, outputs, groups, panels), true;
    case 11: return pack<Q3K>(rows, outputs, groups, panels), true;
    case 12: return pack<Q4K>(rows, outputs, groups, panels), true;
    case 13: return pack<Q5K>(rows, outputs, groups, panels), true;
    case 14: return pack<Q6K>(rows, outputs, groups, panels), true;
    case 20: return pack<Iq4Nl>(rows, outputs, blocks, panels), true;
    case 23: return pack<Iq4Xs>(rows, outputs, groups, panels), true;
    case 39: return pack<Mxfp4>(rows, outputs, blocks, panels), true;
    default: return false;
  }
}

}  // extern "C"
