// Panels of bf16 (`panel.h`) in 12 bits a number, without loss: the low byte of each as it is, the high one, sign and most of the
// exponent, as one of sixteen that the panel has most often. Numbers with another high byte are escapes.
//
//     panels[N / 32]    64 bytes: the sixteen, where the panel's escapes lie, how many there are
//                       [K / 4][192 bytes]: 64 of codes, the first pair of four inputs in their low halves, then 128 low bytes
//     after all of them their escapes, by place: (place in the panel) << 8 | high byte
//
// Sixteen bytes of a line belong to eight numbers of the first sixteen outputs and eight of the others, so that putting low and high
// bytes side by side gives the lines of a panel. Kernels read the same numbers in the same order as from a panel of bf16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panel.h"

namespace coded {

constexpr int64_t EACH = 4;                 // inputs decoded at once
constexpr int64_t NUMBERS = EACH * PANEL;   // of so many inputs
constexpr int64_t CODES = 64, FOUR = 192;     // bytes of codes, and of all
constexpr int64_t AHEAD = 4096;               // bytes: beside decoding, the hardware fetches too late
constexpr int64_t MAX_PLACES = 1 << 24;       // numbers of a panel that escapes can name

struct alignas(64) Header {
  uint8_t table[16];
  int64_t escapes_at, num_escapes;  // bytes after this header
};

inline int64_t panel_bytes(int64_t K) { return sizeof(Header) + K / EACH * FOUR; }

// Where the low byte of one of an output's two inputs lies among the 64 of a pair.
inline int64_t place_in_line(int64_t output, int64_t input) { return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2 + input; }

// Four inputs of all outputs: the lines of two pairs.
struct Four {
  Pairs lines[4];
};

// Reads one panel from its first input to its last.
class Reader {
 public:
  explicit Reader(const uint8_t* panel) : header_(reinterpret_cast<const Header*>(panel)), fours_(panel + sizeof(Header)) {
    next_ = reinterpret_cast<const uint32_t*>(panel + header_->escapes_at);
    end_ = next_ + header_->num_escapes;
  }

  const uint8_t* four(int64_t index) const { return fours_ + index * FOUR; }

  // The first four from here on that has an escape, `fours` where none of those has
  int64_t next_escaped(int64_t fours) const { return next_ == end_ ? fours : std::min<int64_t>(*next_ >> 8, fours * NUMBERS) / NUMBERS; }

  // One without escapes
  Four read(int64_t index) const {
    const uint8_t* const at = four(index);
    const Bytes codes = load_bytes(at), low = load_bytes(at + CODES), other_low = load_bytes(at + 2 * CODES);
    const Bytes high = looked_up(header_->table, low_halves(codes)), other_high = looked_up(header_->table, high_halves(codes));
    return {{join_firsts(low, high), join_lasts(low, high), join_firsts(other_low, other_high), join_lasts(other_low, other_high)}};
  }

  void fetch(int64_t index) const {
    const uint8_t* const at = four(index) + AHEAD;
    fetch_near(at), fetch_near(at + 64), fetch_near(at + 128);
  }

  // Fours [begin, end) as lines of bf16, which follow the ones before.
  void decode(int64_t begin, int64_t end, bf16* to) {
    for (int64_t f = begin; f < end; ++f) {
      fetch(f);
      const Four four = read(f);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) store_pairs(to + (f - begin) * NUMBERS + i * LINE, four.lines[i]);
    }
    for (; next_ != end_ && (*next_ >> 8) < end * NUMBERS; ++next_) {
      bf16& number = to[(*next_ >> 8) - begin * NUMBERS];
      number = bf16(number & 0xff) | bf16(*next_ << 8);
    }
  }

 private:
  const Header* header_;
  const uint8_t* fours_;
  const uint32_t *next_, *end_;  // escapes that were not met yet
};

// One row of the weight, as bf16 (K).
inline void read_row(const uint8_t* panels, int64_t K, int64_t index, bf16* out) {
  const uint8_t* const panel = panels + index / PANEL * panel_bytes(K);
  const Header& header = *reinterpret_cast<const Header*>(panel);
  const int64_t output = index % PANEL, byte = place_in_line(output, 0);
  const uint8_t* at = panel + sizeof(Header);
  for (int64_t k = 0; k < K; k += EACH, at += FOUR)
    for (int64_t i = 0; i < 2; ++i) {
      out[k + i] = bf16(header.table[at[byte + i] & 15] << 8 | at[CODES + byte + i]);
      out[k + 2 + i] = bf16(header.table[at[byte + i] >> 4] << 8 | at[2 * CODES + byte + i]);
    }
  const uint32_t* const escapes = reinterpret_cast<const uint32_t*>(panel + header.escapes_at);
  for (int64_t i = 0; i < header.num_escapes; ++i) {
    const int64_t place = escapes[i] >> 8;
    if (place / 2 % PANEL != output) continue;
    bf16& number = out[place / (2 * PANEL) * 2 + place % 2];
    number = bf16(number & 0xff) | bf16(escapes[i] << 8);
  }
}

// ---------------------------------------------------------------- how they are made

// Some rows of a weight (rows, K); those after the last one are 0.
struct Rows {
  const bf16* weight;
  int64_t count, K;
  bf16 at(int64_t output, int64_t k) const { return output < count ? weight[output * K + k] : bf16(0); }
};

// The table and the number of escapes of a panel.
inline void choose_table(const Rows& rows, Header& header) {
  int64_t counts[4][256] = {};
  for (int64_t output = 0; output < std::min(rows.count, PANEL); ++output) {
    const bf16* const row = rows.weight + output * rows.K;
    for (int64_t k = 0; k < rows.K; k += 4)
      for (int64_t i = 0; i < 4; ++i) ++counts[i][row[k + i] >> 8];
  }
  int64_t order[256];
  for (int64_t high = 0; high < 256; ++high) {
    for (int64_t i = 1; i < 4; ++i) counts[0][high] += counts[i][high];
    order[high] = high;
  }
  counts[0][0] += (PANEL - std::min(rows.count, PANEL)) * rows.K;
  std::stable_sort(order, order + 256, [&](int64_t a, int64_t b) { return counts[0][a] > counts[0][b]; });
  std::copy_n(order, 16, header.table);
  header.num_escapes = 0;
  for (int64_t i = 16; i < 256; ++i) header.num_escapes += counts[0][order[i]];
}

// A panel after its header, which is complete.
inline void encode(const Rows& rows, uint8_t* panel) {
  const Header& header = *reinterpret_cast<const Header*>(panel);
  uint8_t *at = panel + sizeof(Header), code_of[256];
  uint32_t* escape = reinterpret_cast<uint32_t*>(panel + header.escapes_at);
  std::memset(code_of, 255, sizeof code_of);
  for (int64_t code = 0; code < 16; ++code) code_of[header.table[code]] = uint8_t(code);
  for (int64_t k = 0; k < rows.K; k += EACH, at += FOUR) {
    for (int64_t pair = 0; pair < 2; ++pair)
      for (int64_t output = 0; output < PANEL; ++output)
        for (int64_t i = 0; i < 2; ++i) {
          const bf16 number = rows.at(output, k + 2 * pair + i);
          const int64_t byte = place_in_line(output, i);
          uint8_t code = code_of[number >> 8];
          if (code == 255) {
            *escape++ = uint32_t(k * PANEL + pair * 2 * PANEL + 2 * output + i) << 8 | number >> 8;
            code = 0;
          }
          at[byte] = pair ? uint8_t(at[byte] | code << 4) : code;
          at[CODES * (1 + pair) + byte] = uint8_t(number);
        }
  }
}

}  // namespace coded
