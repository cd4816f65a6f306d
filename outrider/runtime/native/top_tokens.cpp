// The likeliest tokens after outputs of a pass, for drafters that remember them or branch on them.

#include <cstdint>
#include <vector>

#include "top_tokens.h"

extern "C" {

// scores (., stride) fp32   shape: n, stride, V, k   outputs (n,): rows of the scores -> ids (n, k), -1 where there are no more.
// `temperatures` (n,) fp64, null: only ids are wanted; else `shares` (n, k): of each in the law at this temperature.
void outrider_top_tokens(const float* scores, const int64_t* shape, const int64_t* outputs, const double* temperatures, int64_t* ids,
                         float* shares) {
  const int64_t n = shape[0], stride = shape[1], V = shape[2], k = shape[3];
  std::vector<top_tokens::Found> found;
  for (int64_t i = 0; i < n; ++i, ids += k) {
    const float* row = scores + outputs[i] * stride;
    top_tokens::find(row, V, k, found);
    for (int64_t rank = 0; rank < k; ++rank) ids[rank] = rank < int64_t(found.size()) ? found[rank].id : -1;
    if (temperatures) top_tokens::share(row, V, float(temperatures[i]), found, k, shares + i * k);
  }
}

}  // extern "C"
