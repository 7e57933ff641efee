// Rotary embedding (Su et al. 2021) in the Hugging Face convention, fused with the KV write.
#include "attention.h"
#include "rows.h"

namespace kvr {
namespace {

// y: x with every pair (d, d + half) turned by the position's angle.
void rotate(const float* x, const float* cosines, const float* sines, int half, float* y) {
  for (int d = 0; d < half; d++) {
    const float a = x[d], b = x[d + half];
    y[d] = a * cosines[d] - b * sines[d];
    y[d + half] = b * cosines[d] + a * sines[d];
  }
}

void store_query(Bfloat16Dot, const float* x, float scale, int dim, uint8_t* queries, size_t at) {
  uint16_t* to = reinterpret_cast<uint16_t*>(queries) + at;
  for (int d = 0; d < dim; d += kLanes) store_bf16(to + d, load(x + d) * splat(scale));
}
void store_query(Float32Dot, const float* x, float scale, int dim, uint8_t* queries, size_t at) {
  float* to = reinterpret_cast<float*>(queries) + at;
  for (int d = 0; d < dim; d += kLanes) store(to + d, load(x + d) * splat(scale));
}

// x, or in `room` its norm where there is one.
const float* head_normed(const KvrModel& model, const float* weight, const float* x, float* room) {
  if (weight == nullptr) return x;
  rms_norm(x, weight, model.head_dim, model.rms_norm_eps, room);
  return room;
}

template <class Dot>
void rotate_row(const KvrModel& model, const KvView& kv, const KvrLayer& layer,
                const int32_t* block_table, int position, const float* qkv, int rows, int row,
                uint8_t* queries) {
  const int dim = model.head_dim, half = dim / 2, group = model.num_heads / model.num_kv_heads;
  const float* cosines = layer.cosines + size_t(position) * half;
  const float* sines = layer.sines + size_t(position) * half;
  // Scores come out in units of log2, so that softmax needs no multiplication before 2^x.
  const float scale = 1.44269504f * model.attention_scale;
  alignas(64) float rotated[kLargestHeadDim], normed[kLargestHeadDim];
  for (int head = 0; head < model.num_heads; head++, qkv += dim) {
    rotate(head_normed(model, layer.query_norm, qkv, normed), cosines, sines, half, rotated);
    const size_t at = (size_t(head / group) * rows + row) * group + head % group;
    store_query(Dot(), rotated, scale, dim, queries, at * dim);
  }
  const float* values = qkv + size_t(model.num_kv_heads) * dim;
  for (int head = 0; head < model.num_kv_heads; head++, qkv += dim, values += dim) {
    rotate(head_normed(model, layer.key_norm, qkv, normed), cosines, sines, half, rotated);
    write_kv(kv, Dot(), block_table, position, head, rotated, values);
  }
}

}  // namespace

void rotate_and_write(const KvrModel& model, const KvrCache& cache, int layer,
                      const Segment& segment, const float* qkv, int rows, int first, int last,
                      uint8_t* queries) {
  const KvView kv(model, cache, layer);
  const size_t width = size_t(model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
  for (int i = first; i < last; i++) {
    const int row = segment.first_row + i;
    const auto rotate_one = cache.kind == KVR_FLOAT32 ? rotate_row<Float32Dot>
                            : cache.kind == KVR_INT8  ? rotate_row<Int8Dot>
                                                      : rotate_row<Bfloat16Dot>;
    rotate_one(model, kv, model.layers[layer], segment.block_table, segment.start + i,
               qkv + row * width, rows, row, queries);
  }
}

}  // namespace kvr
