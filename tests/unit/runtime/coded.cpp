// Coded panels against panels of bf16, by vectors: every number that bf16 has comes back, and products have the same bits.
// Prints what differs, or "same" and how many escapes there were.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "coded_panels.h"
#include "panel_vectors.h"

static uint64_t state = 1;
static uint32_t bits() {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return uint32_t(z ^ z >> 31);
}
// High bytes as trained weights have them, sixteen of them, each as often as it is large
static bf16 usual() { return bf16((bits() & 0x80) << 8 | (0x3d - __builtin_ctz(bits() | 0x80)) << 8 | (bits() & 0xff)); }

static std::vector<bf16> lines_of(const std::vector<bf16>& weight, int64_t N, int64_t K) {
  std::vector<bf16> lines((N + PANEL - 1) / PANEL * PANEL * K);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) lines[n / PANEL * PANEL * K + k / 2 * 2 * PANEL + n % PANEL * 2 + k % 2] = weight[n * K + k];
  return lines;
}

// Their bytes lie in headers, which are aligned as panels have to be.
static std::vector<coded::Header> coded_of(const std::vector<bf16>& weight, int64_t N, int64_t K, int64_t& escapes) {
  const int64_t count = (N + PANEL - 1) / PANEL, bytes = coded::panel_bytes(K);
  std::vector<coded::Header> headers(count);
  const auto rows = [&](int64_t p) { return coded::Rows{weight.data() + p * PANEL * K, std::min(PANEL, N - p * PANEL), K}; };
  escapes = 0;
  for (int64_t p = 0; p < count; ++p) {
    coded::choose_table(rows(p), headers[p]);
    headers[p].escapes_at = (count - p) * bytes + 4 * escapes;
    escapes += headers[p].num_escapes;
  }
  std::vector<coded::Header> panels((count * bytes + 4 * escapes) / sizeof(coded::Header) + 1);
  uint8_t* const at = reinterpret_cast<uint8_t*>(panels.data());
  for (int64_t p = 0; p < count; ++p) {
    std::memcpy(at + p * bytes, &headers[p], sizeof headers[p]);
    coded::encode(rows(p), at + p * bytes);
  }
  return panels;
}

static bool check(const std::vector<bf16>& weight, int64_t N, int64_t K, bool are_finite) {
  int64_t escapes;
  const std::vector<bf16> lines = lines_of(weight, N, K);
  const std::vector<coded::Header> aligned = coded_of(weight, N, K, escapes);
  const uint8_t* const panels = reinterpret_cast<const uint8_t*>(aligned.data());
  std::vector<bf16> decoded(K * PANEL), row(K);
  for (int64_t p = 0; p < (N + PANEL - 1) / PANEL; ++p) {
    coded::Reader whole(panels + p * coded::panel_bytes(K));
    whole.decode(0, K / coded::EACH, decoded.data());
    if (std::memcmp(decoded.data(), lines.data() + p * PANEL * K, decoded.size() * 2)) return std::printf("panel %d differs\n", int(p)), false;
  }
  for (int64_t n = 0; n < N; ++n) {
    coded::read_row(panels, K, n, row.data());
    if (std::memcmp(row.data(), weight.data() + n * K, K * 2)) return std::printf("row %d differs\n", int(n)), false;
  }
  if (!are_finite) return std::printf("same %d\n", int(escapes)), true;
  for (int64_t M : {1, 2, 3, 4, 5, 8, 9, 17, 64, 65, 70}) {
    std::vector<bf16> x(M * K), bias(N), expected(M * N), found(M * N);
    for (bf16& one : x) one = bf16(0x3f00 + bits() % 0x100 + (bits() & 0x8000));
    for (bf16& one : bias) one = usual();
    vectors::multiply_panels(x.data(), M, K, lines.data(), bias.data(), expected.data(), N, 0, (N + PANEL - 1) / PANEL);
    vectors::multiply_coded_panels(x.data(), M, K, panels, bias.data(), found.data(), N, 0, (N + PANEL - 1) / PANEL);
    if (std::memcmp(expected.data(), found.data(), found.size() * 2)) return std::printf("%d rows, %d inputs differ\n", int(M), int(K)), false;
  }
  return std::printf("same %d\n", int(escapes)), true;
}

int main() {
  std::vector<bf16> all(1 << 16);
  for (int64_t i = 0; i < 1 << 16; ++i) all[i] = bf16(i * 40503 % (1 << 16));
  if (!check(all, 64, 1024, false) || !check(all, 1024, 64, false)) return 1;
  for (int64_t K : {4, 36, 384, 388, 1000}) {
    for (int64_t rare : {0, 3, 100, 5000}) {  // one in so many numbers is any that is finite
      std::vector<bf16> weight(77 * K);
      for (bf16& one : weight) one = rare && bits() % rare == 0 ? bf16(bits() % 0x7f80 | (bits() & 0x8000)) : usual();
      if (!check(weight, 77, K, true)) return 1;
    }
  }
}
