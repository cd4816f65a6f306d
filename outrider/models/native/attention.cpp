// Attention of a few bf16 queries over our cache, one (row, head, query) at a time.
//
//     query (B, heads, T, D)   keys (slots, capacity, KV heads, D)   values (..., Dv)   mask (B, 1, >= T, S) additive
//     -> (B, T, heads, Dv);  row b reads slot b; head h reads KV head h / (heads / KV heads); softmax in fp32
//
// The general kernels multiply whole blocks of 512 keys through a BLAS that is made for large matrices: 60 to 100
// microseconds where the arithmetic takes five. Here only visible keys are read. Every query is computed by itself, over
// its visible keys closed up, in cache order: its bits depend on nothing but its own path, be it decoding, prefill, or a
// tree where keys of other branches lie in between.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

constexpr int64_t SERIAL = 1 << 13;  // query-key pairs below which a second thread costs more than it does

struct Shape {
  int64_t rows, heads, queries, size, value_size, kv_heads, capacity, num_keys, mask_queries;
  int64_t row_stride, head_stride, query_stride;  // of `query`, in elements
};

inline float widen(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline bool is_hidden(bf16 mask) { return mask == 0xff80; }  // -inf

inline float dot(const bf16* a, const bf16* b, int64_t size) {
  Floats sum = floats(0);
  for (int64_t d = 0; d < size; d += 32) sum = add_products(sum, load_pairs(a + d, size - d), load_pairs(b + d, size - d));
  return sum_of(sum);
}

// out[0 .. size) = sum of weights[j] * values[places[j]]
void mix(const float* weights, const bf16* values, const int32_t* places, int64_t count, int64_t stride, int64_t size,
         float scale, bf16* out) {
  for (int64_t d = 0; d < size; d += 64) {
    const int64_t left = size - d;
    Mask some[4];
    Floats sum[4];
    for (int i = 0; i < 4; ++i) {
      some[i] = first16(left - 16 * i);
      sum[i] = floats(0);
    }
    for (int64_t j = 0; j < count; ++j) {
      const Floats weight = floats(weights[j]);
      const bf16* value = values + places[j] * stride + d;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sum[i] = multiply_add(weight, load_some(some[i], value + 16 * i), sum[i]);
    }
    for (int i = 0; i < 4; ++i) {
      const Floats scaled = sum[i] * floats(scale);
      store_some(some[i], out + d + 16 * i, scaled);
    }
  }
}

void attend_one(const bf16* query, const bf16* keys, const bf16* values, const bf16* mask, const Shape& s, float scale,
                float* scores, int32_t* places, bf16* out) {
  int64_t end = s.num_keys, count = 0;
  while (end > 0 && is_hidden(mask[end - 1])) --end;
  for (int64_t at = 0; at < end; ++at) {
    places[count] = int32_t(at);
    count += !is_hidden(mask[at]);
  }
  const int64_t stride = s.kv_heads * s.size, padded = (count + 15) / 16 * 16;
  float most = -std::numeric_limits<float>::infinity();
  bool broken = false;  // a NaN among the scores must reach the output
  for (int64_t j = 0; j < count; ++j) {
    const int64_t at = places[j];
    scores[j] = dot(query, keys + at * stride, s.size) * scale + widen(mask[at]);
    most = std::max(most, scores[j]);
    broken |= std::isnan(scores[j]);
  }
  for (int64_t j = count; j < padded; ++j) scores[j] = -std::numeric_limits<float>::infinity();
  Floats total = floats(0);
  for (int64_t j = 0; j < padded; j += 16) {
    const Floats score = load(scores + j);
    const Mask seen = ~is_equal(score, floats(-std::numeric_limits<float>::infinity()));
    const Floats weight = keep(seen, exponential(score - floats(most)));
    store(scores + j, weight);
    total = total + weight;
  }
  const float mass = broken ? std::numeric_limits<float>::quiet_NaN() : sum_of(total);
  mix(scores, values, places, count, s.kv_heads * s.value_size, s.value_size, count ? 1.f / mass : 0.f, out);
}

void attend(const bf16* query, const bf16* keys, const bf16* values, const bf16* mask, const Shape& s, float scale, bf16* out) {
  const int64_t group = s.heads / s.kv_heads, tasks = s.rows * s.queries * s.heads;
#pragma omp parallel if (tasks * s.num_keys > SERIAL)
  {
    std::vector<float> scores(s.num_keys + 16);
    std::vector<int32_t> places(s.num_keys + 1);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t h = task % s.heads, t = task / s.heads % s.queries, b = task / s.heads / s.queries;
      const int64_t slot = b * s.capacity * s.kv_heads, head = h / group;
      attend_one(query + b * s.row_stride + h * s.head_stride + t * s.query_stride, keys + slot * s.size + head * s.size,
                 values + slot * s.value_size + head * s.value_size, mask + (b * s.mask_queries + t) * s.num_keys, s, scale,
                 scores.data(), places.data(), out + task * s.value_size);
    }
  }
}

bool last_is_dense(AtenTensorHandle tensor, int64_t dim) {
  int64_t stride = 0;
  return !aoti_torch_get_stride(tensor, dim - 1, &stride) && stride == 1;
}

}  // namespace

extern "C" {

// `shape`: rows, heads, queries, size, value size, KV heads, capacity, keys, mask queries, strides of row, head and query
void outrider_cache_attention(const bf16* query, const bf16* keys, const bf16* values, const bf16* mask,
                              const int64_t* shape, double scale, bf16* out) {
  Shape s;
  std::memcpy(&s, shape, sizeof s);
  attend(query, keys, values, mask, s, float(scale), out);
}

// The same for programs that AOTInductor made: it calls this by name.
AOTITorchError aoti_torch_cpu_cache_attention(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
                                              AtenTensorHandle mask, double scale, AtenTensorHandle* result) {
  int64_t *q = nullptr, *qs = nullptr, *k = nullptr, *v = nullptr, *m = nullptr;
  bool dense_keys = false, dense_values = false, dense_mask = false;
  void* at[5];
  if (aoti_torch_get_sizes(query, &q) || aoti_torch_get_strides(query, &qs) || aoti_torch_get_sizes(keys, &k) ||
      aoti_torch_get_sizes(values, &v) || aoti_torch_get_sizes(mask, &m))
    return 1;
  if (aoti_torch_is_contiguous(keys, &dense_keys) || aoti_torch_is_contiguous(values, &dense_values) ||
      aoti_torch_is_contiguous(mask, &dense_mask) || !(dense_keys && dense_values && dense_mask) || !last_is_dense(query, 4))
    return 1;
  const Shape s{q[0], q[1], q[2], q[3], v[3], k[2], k[1], m[3], m[2], qs[0], qs[1], qs[2]};
  const int64_t sizes[4] = {s.rows, s.queries, s.heads, s.value_size};
  const int64_t strides[4] = {s.queries * s.heads * s.value_size, s.heads * s.value_size, s.value_size, 1};
  if (aoti_torch_empty_strided(4, sizes, strides, aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cpu(), 0, result))
    return 1;
  const AtenTensorHandle tensors[5] = {query, keys, values, mask, *result};
  for (int i = 0; i < 5; ++i)
    if (aoti_torch_get_data_ptr(tensors[i], &at[i])) return 1;
  attend(static_cast<const bf16*>(at[0]), static_cast<const bf16*>(at[1]), static_cast<const bf16*>(at[2]),
         static_cast<const bf16*>(at[3]), s, float(scale), static_cast<bf16*>(at[4]));
  return 0;
}

}  // extern "C"
