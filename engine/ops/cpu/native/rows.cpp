#include "rows.h"

#include <cmath>

#include "simd.h"

namespace kvr {

void rms_norm(const float* x, const float* weight, int size, float eps, float* y) {
  // Two sums, so that one addition need not wait for the last.
  Floats even = zeros(), odd = zeros();
  for (int i = 0; i < size; i += 2 * kLanes) {
    even = even + load(x + i) * load(x + i);
    odd = odd + load(x + i + kLanes) * load(x + i + kLanes);
  }
  const Floats scale = splat(1.0f / std::sqrt(sum(even + odd) / float(size) + eps));
  for (int i = 0; i < size; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
}

void add_row(const float* x, int size, float* y) {
  for (int i = 0; i < size; i += kLanes) store(y + i, load(y + i) + load(x + i));
}

void scale_row(float factor, int size, float* y) {
  for (int i = 0; i < size; i += kLanes) store(y + i, load(y + i) * splat(factor));
}

void cap_row(float cap, int size, float* y) {
  const Floats inverse = splat(1.0f / cap);
  for (int i = 0; i < size; i += kLanes) {
    const int lanes = size - i < kLanes ? size - i : kLanes;
    alignas(64) float part[kLanes] = {};
    std::memcpy(part, y + i, lanes * sizeof(float));
    store(part, splat(cap) * tanh(load(part) * inverse));
    std::memcpy(y + i, part, lanes * sizeof(float));
  }
}

void embed(const KvrModel& model, int token_id, float* y) {
  const size_t size = size_t(model.hidden_size);
  if (model.embedding_kind == KVR_FLOAT32) {
    std::memcpy(y, model.embedding + token_id * size * 4, size * 4);
  } else if (model.embedding_kind == KVR_BFLOAT16) {
    const uint8_t* row = model.embedding + token_id * size * 2;
    for (size_t i = 0; i < size; i++) {
      uint16_t bits;
      std::memcpy(&bits, row + i * 2, 2);
      y[i] = from_bf16(bits);
    }
  } else {  // Q8_0: a float16 scale and 32 signed bytes a block
    const uint8_t* block = model.embedding + token_id * (size / 32) * 34;
    for (size_t i = 0; i < size; i += 32, block += 34) {
      uint16_t bits;
      std::memcpy(&bits, block, 2);
      const float scale = from_f16(bits);
      for (int j = 0; j < 32; j++) y[i + j] = scale * float(int8_t(block[2 + j]));
    }
  }
}

}  // namespace kvr
