// y = x W^T + b for a few rows of bf16 activations, at the speed of memory.
//
// Decoding reads every weight once per pass and multiplies it with a handful of rows, so the only thing that counts is how
// fast weights stream in. `panel.h` says how they lie; `panel_vectors.h` multiplies, or where the processor has matrix tiles,
// `panel_tiles.h`.

#include <cstdint>

#include "panel_vectors.h"
#include "shim.h"

extern "C" {

void outrider_panel_linear(const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N) {
  const auto multiply = outrider_has_tiles() ? outrider_panel_linear_tiles : outrider_panel_linear_vectors;
  multiply(x, M, K, panels, bias, out, N);
}

void outrider_panel_linear_vectors(
    const bf16* x, int64_t M, int64_t K, const bf16* panels, const bf16* bias, bf16* out, int64_t N) {
  const int64_t num_panels = (N + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (K * N > SERIAL)
  for (int64_t p = 0; p < num_panels; ++p) vectors::multiply_panels(x, M, K, panels, bias, out, N, p, p + 1);
}

// The same for programs that AOTInductor made: it calls this by name.
AOTITorchError aoti_torch_cpu_panel_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* result) {
  Call call;
  if (open_call(x, panels, bias, out_features, result, call)) return 1;
  outrider_panel_linear(
      call.x, call.M, call.K, static_cast<const bf16*>(call.weights), call.bias, call.out, out_features);
  return 0;
}

}  // extern "C"
