// What a program that AOTInductor made hands over when it calls a linear layer of ours by name, and the tensor that it gets back.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <vector>

#include "panel.h"

struct Call {
  const bf16* x;  // (M, K)
  int64_t M, K;
  const void* weights;
  const bf16* bias;  // or null
  bf16* out;         // (M, out_features)
};

// Reads the arguments and makes the result, of x's shape but for the last dimension. Not 0 where they are not as expected.
inline AOTITorchError open_call(
    AtenTensorHandle x, AtenTensorHandle weights, AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* result,
    Call& call) {
  int64_t dim = 0, numel = 0;
  int64_t* sizes = nullptr;
  bool contiguous = false;
  void *from = nullptr, *read = nullptr, *offsets = nullptr, *to = nullptr;
  if (aoti_torch_is_contiguous(x, &contiguous) || !contiguous) return 1;
  if (aoti_torch_get_dim(x, &dim) || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_numel(x, &numel)) return 1;
  std::vector<int64_t> shape(sizes, sizes + dim), strides(dim, 1);
  const int64_t K = shape.back();
  shape.back() = out_features;
  for (int64_t d = dim - 1; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  if (aoti_torch_empty_strided(
          dim, shape.data(), strides.data(), aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, result))
    return 1;
  if (aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(weights, &read) ||
      aoti_torch_get_data_ptr(*result, &to))
    return 1;
  if (bias && aoti_torch_get_data_ptr(*bias, &offsets)) return 1;
  call = {static_cast<const bf16*>(from), numel / K, K, read, static_cast<const bf16*>(offsets), static_cast<bf16*>(to)};
  return 0;
}
