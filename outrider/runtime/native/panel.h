// What both kernels for linear layers share: the layout of the weights and the way results are written.
//
//     panels[N / 32][K / 2][32 outputs][2 inputs]   bf16, N and K padded with zeros
//
// Within a panel, pairs of inputs of all 32 outputs lie side by side: what `vdpbf16ps` multiplies with one pair of a row, and
// sixteen of them what `tdpbf16ps` multiplies with a tile of rows. A thread reads its share front to back and never waits
// for an address.

#pragma once

#include <cstdint>

#include "lanes.h"

constexpr int64_t PANEL = 32;        // outputs of a panel: two vectors of 16 accumulators
constexpr int64_t LINE = 32;         // numbers of a cache line
constexpr int64_t SERIAL = 1 << 16;  // weights below which a second thread costs more than it does

// Where a panel's results go: `count` outputs of rows that are N apart.
struct Output {
  const bf16* bias;
  bf16* at;
  int64_t N, count;

  void write(int64_t row, Floats low, Floats high) const {
    const Mask some_low = first16(count), some_high = first16(count - 16);
    if (bias) {
      low = low + load_some(some_low, bias);
      high = high + load_some(some_high, bias + 16);
    }
    store_some(some_low, at + row * N, low);
    store_some(some_high, at + row * N + 16, high);
  }
};
