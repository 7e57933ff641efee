// The order of KV inside a region, and writing one token into it.
//
// A page is 16 tokens; a block is one or more pages. Attention multiplies pages as they lie:
// queries by keys over lanes of head_dim, probabilities by values over lanes of tokens.
//   bfloat16, order "dot16": region [pages][kv_heads] of
//       keys   [head_dim / 2][16 tokens][2]    a lane is two neighbours of one token's key
//       values [8][head_dim][2]                a lane is two neighbouring tokens' value
//   int8, order "dot16": the same with a byte each, q = value / scale; then, at the region's end,
//       scales float16 [pages][kv_heads][keys, values][16 tokens]. Attention widens a page to
//       bfloat16, which holds every q, and scales scores and weights instead of elements.
//   float32, order "rows": region [2][block_size][kv_heads][head_dim]; attention gathers a page
//       into the same shape with one element a lane: keys [head_dim][16], values [16][head_dim].
#pragma once

#include "abi.h"
#include "panels.h"

namespace kvr {

constexpr int kPageTokens = 16;
constexpr int kLargestHeadDim = 256;

// Multiplies as bfloat16 what is kept as int8 with a scale for each token and head.
struct Int8Dot : Bfloat16Dot {};

// One layer of the cache.
struct KvView {
  uint8_t* base;
  size_t region_bytes;
  int block_size, kv_heads, head_dim;

  KvView(const KvrModel& model, const KvrCache& cache, int layer)
      : base(cache.layers[layer]),
        region_bytes(size_t(cache.region_bytes)),
        block_size(cache.block_size),
        kv_heads(model.num_kv_heads),
        head_dim(model.head_dim) {}

  uint8_t* region(const int32_t* block_table, int position) const {
    return base + size_t(block_table[position / block_size]) * region_bytes;
  }
  // dot16: the keys of one head in the page that holds `position`; its values follow them.
  uint16_t* keys_dot16(const int32_t* block_table, int position, int head) const {
    const int page = position % block_size / kPageTokens;
    return reinterpret_cast<uint16_t*>(region(block_table, position)) +
           size_t(page * kv_heads + head) * 2 * page_elements();
  }
  // int8 in dot16: likewise, and the scales of that page and head.
  int8_t* keys_int8(const int32_t* block_table, int position, int head) const {
    const int page = position % block_size / kPageTokens;
    return reinterpret_cast<int8_t*>(region(block_table, position)) +
           size_t(page * kv_heads + head) * 2 * page_elements();
  }
  uint16_t* scales(const int32_t* block_table, int position, int head) const {
    const int page = position % block_size / kPageTokens;
    uint8_t* all = region(block_table, position) + 2 * value_distance();
    return reinterpret_cast<uint16_t*>(all) + size_t(page * kv_heads + head) * 2 * kPageTokens;
  }
  // rows: the key of one token and head; its value is `value_distance` elements further.
  float* key_row(const int32_t* block_table, int position, int head) const {
    return reinterpret_cast<float*>(region(block_table, position)) +
           (size_t(position % block_size) * kv_heads + head) * head_dim;
  }
  size_t value_distance() const { return size_t(block_size) * kv_heads * head_dim; }
  size_t page_elements() const { return size_t(kPageTokens) * head_dim; }
};

inline void write_kv(const KvView& kv, Bfloat16Dot, const int32_t* block_table, int position,
                     int head, const float* key, const float* value) {
  alignas(64) uint16_t rounded[2 * kLargestHeadDim];
  const int dim = kv.head_dim, token = position % kPageTokens;
  for (int d = 0; d < dim; d += kLanes) {
    store_bf16(rounded + d, load(key + d));
    store_bf16(rounded + dim + d, load(value + d));
  }
  uint16_t* page = kv.keys_dot16(block_table, position, head);
  uint32_t* keys = reinterpret_cast<uint32_t*>(page) + token;
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(rounded);
  for (int d = 0; d < dim / 2; d++) keys[d * kPageTokens] = pairs[d];
  uint16_t* values = page + kv.page_elements() + size_t(token / 2) * dim * 2 + token % 2;
  for (int d = 0; d < dim; d++) values[d * 2] = rounded[dim + d];
}

// q = round(x / scale), where scale is max|x| / 127 in float16; returns the scale.
inline uint16_t quantise_head(const float* x, int dim, int8_t* q) {
  Floats bound = zeros();
  for (int d = 0; d < dim; d += kLanes) bound = maximum(bound, magnitude(load(x + d)));
  const uint16_t half = to_f16(largest(bound) * (1.0f / 127.0f));
  const float scale = from_f16(half);
  const Floats inverse = splat(scale > 0 ? 1.0f / scale : 0.0f), lowest = splat(-127.0f);
  for (int d = 0; d < dim; d += kLanes) {
    // A scale that was rounded down would make the largest ones 128.
    const Floats above = maximum(load(x + d) * inverse, lowest);
    store_bytes(q + d, round_to_ints(zeros() - maximum(zeros() - above, lowest)));
  }
  return half;
}

inline void write_kv(const KvView& kv, Int8Dot, const int32_t* block_table, int position, int head,
                     const float* key, const float* value) {
  alignas(64) int8_t bytes[2 * kLargestHeadDim];
  const int dim = kv.head_dim, token = position % kPageTokens;
  uint16_t* scales = kv.scales(block_table, position, head) + token;
  scales[0] = quantise_head(key, dim, bytes);
  scales[kPageTokens] = quantise_head(value, dim, bytes + dim);
  int8_t* page = kv.keys_int8(block_table, position, head);
  for (int d = 0; d < dim; d++) page[(d / 2 * kPageTokens + token) * 2 + d % 2] = bytes[d];
  int8_t* values = page + kv.page_elements() + size_t(token / 2) * dim * 2 + token % 2;
  for (int d = 0; d < dim; d++) values[d * 2] = bytes[dim + d];
}

inline void write_kv(const KvView& kv, Float32Dot, const int32_t* block_table, int position,
                     int head, const float* key, const float* value) {
  float* row = kv.key_row(block_table, position, head);
  std::memcpy(row, key, kv.head_dim * sizeof(float));
  std::memcpy(row + kv.value_distance(), value, kv.head_dim * sizeof(float));
}

}  // namespace kvr
