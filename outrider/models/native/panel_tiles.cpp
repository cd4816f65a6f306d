// y = x W^T + b by matrix tiles (Intel AMX), all panels of a layer: `panel_tiles.h` multiplies.

#include "panel_tiles.h"

#ifdef HAS_TILES

#include <omp.h>

extern "C" {

bool outrider_has_tiles() {
  static const bool given = tiles::ask_for_tiles();
  return given;
}

void outrider_panel_linear_tiles(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N) {
  const int64_t num_panels = (N + PANEL - 1) / PANEL;
#pragma omp parallel if (K * N > SERIAL)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    tiles::multiply_panels(
        x, M, K, panels, bias, out, N, num_panels * thread / threads, num_panels * (thread + 1) / threads);
  }
}

}  // extern "C"

#else  // no tiles here, or a compiler that does not know them

extern "C" {

bool outrider_has_tiles() { return false; }

void outrider_panel_linear_tiles(const bf16*, int64_t, int64_t, const bf16*, const bf16*, bf16*, int64_t) {}

}  // extern "C"

#endif
