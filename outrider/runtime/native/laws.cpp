// Laws by themselves, for rules whose verdict is not made here.
//
//     scores (B, M, V) fp32   lengths (B,) int64   options (B, 4) fp64: temperature (0: a point mass), top-k, top-p, min-p
//     -> laws (B, M, V) fp32

#include "laws.h"

extern "C" {

// `shape`: B, M, V. False where there is something to refuse.
bool outrider_laws(const float* scores, const int64_t* lengths, const double* options, const int64_t* shape, float* laws) {
  return make_laws(scores, lengths, options, shape[0], shape[1], shape[2], /* point_masses */ true, laws);
}

}  // extern "C"
