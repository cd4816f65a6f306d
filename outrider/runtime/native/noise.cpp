// Gumbel noise by itself, for drafters that share it with the verifier.

#include "gumbel.h"

extern "C" {

// positions (n,) int64 -> n tables (V,) fp64
void outrider_noise(uint64_t seed, uint64_t stream, const int64_t* positions, double* const* noise, int64_t n, int64_t V) {
  make_noise(seed, stream, positions, noise, n, V);
}

}  // extern "C"
