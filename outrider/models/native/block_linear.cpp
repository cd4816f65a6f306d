// The linear layers and rows of `block_panels.h` as operations of torch.

#include <vector>

#include "block_panels.h"
#include "shim.h"

extern "C" {

// x (M, K), panels in this form and group, bias (N) or null -> out (M, N)
void outrider_block_linear(
    const bf16* x, int64_t M, int64_t K, const uint8_t* panels, int64_t form, int64_t group, const bf16* bias, bf16* out,
    int64_t N) {
  const int64_t count = blocks::num_blocks(K, group);
  thread_local std::vector<Inputs> inputs;
  inputs.resize(M * count);
  Inputs* const rounded = inputs.data();  // the caller's, whichever thread reads it
#pragma omp parallel for schedule(static) if (M > 8)
  for (int64_t m = 0; m < M; ++m) row_to_bytes(x + m * K, K, count, rounded + m * count);
#pragma omp parallel for schedule(static) if (K * N > SERIAL)
  for (int64_t p = 0; p < (N + PANEL - 1) / PANEL; ++p)
    blocks::multiply_panels(rounded, M, K, panels, form, group, bias, out, N, p, p + 1);
}

// Rows of W: tokens (count) -> out (count, K)
void outrider_block_rows(const int64_t* tokens, int64_t count, int64_t K, const uint8_t* panels, int64_t form, int64_t group, bf16* out) {
  for (int64_t i = 0; i < count; ++i) blocks::read_row(panels, form, K, group, tokens[i], out + i * K);
}

AOTITorchError aoti_torch_cpu_block_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t out_features, int64_t form, int64_t group,
    AtenTensorHandle* result) {
  Call call;
  if (open_call(x, panels, bias, out_features, result, call)) return 1;
  outrider_block_linear(
      call.x, call.M, call.K, static_cast<const uint8_t*>(call.weights), form, group, call.bias, call.out, out_features);
  return 0;
}

AOTITorchError aoti_torch_cpu_block_rows(
    AtenTensorHandle tokens, AtenTensorHandle panels, int64_t size, int64_t form, int64_t group,
    AtenTensorHandle* result) {
  int64_t dim = 0, numel = 0;
  int64_t* sizes = nullptr;
  bool contiguous = false;
  void *from = nullptr, *read = nullptr, *to = nullptr;
  if (aoti_torch_is_contiguous(tokens, &contiguous) || !contiguous) return 1;
  if (aoti_torch_get_dim(tokens, &dim) || aoti_torch_get_sizes(tokens, &sizes) || aoti_torch_get_numel(tokens, &numel)) return 1;
  std::vector<int64_t> shape(sizes, sizes + dim), strides(dim + 1, 1);
  shape.push_back(size);
  for (int64_t d = dim; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  if (aoti_torch_empty_strided(
          dim + 1, shape.data(), strides.data(), aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, result))
    return 1;
  if (aoti_torch_get_data_ptr(tokens, &from) || aoti_torch_get_data_ptr(panels, &read) ||
      aoti_torch_get_data_ptr(*result, &to))
    return 1;
  outrider_block_rows(
      static_cast<const int64_t*>(from), numel, size, static_cast<const uint8_t*>(read), form, group, static_cast<bf16*>(to));
  return 0;
}

}  // extern "C"
