// How weights lie in memory: panels of 32 outputs, and one policy struct per weight kind.
//
// A panel holds its 32 columns (outputs) side by side, so that one vector load takes the same
// input of several outputs. Float kinds: 32-bit lanes [inputs / per lane][32], a lane being one
// float32 or two bfloat16 inputs. Byte kinds: blocks of one group of inputs, each
//   [32] scales, (Q4_1: [32] minima,) then quads of inputs [quads][32 columns][4 inputs].
// Values are the GGUF file's own. Bytes are stored as w + 128; a nibble pair holds quad j in its
// low half and quad j + 4 in its high half. pack.py writes this, tiles.h reads it.
#pragma once

#include "abi.h"
#include "simd.h"

namespace kvr {

constexpr int kPanelColumns = 32;

struct Float32Dot {
  static constexpr int kKind = KVR_FLOAT32, kPerLane = 1;
  static KVR_INLINE Floats step(Floats acc, Ints w, Ints x) {
    return acc + as_floats(w) * as_floats(x);
  }
};

struct Bfloat16Dot {
  static constexpr int kKind = KVR_BFLOAT16, kPerLane = 2;
  static KVR_INLINE Floats step(Floats acc, Ints w, Ints x) { return dot_pairs(acc, w, x); }
};

// Byte kinds: w = scale * value + minimum.
template <int kind, int group, bool nibbles, bool float_scales, bool minima>
struct ByteKind {
  static constexpr int kKind = kind, kGroup = group;
  static constexpr bool kNibbles = nibbles, kMinima = minima;
  static constexpr int kScaleBytes = float_scales ? 4 : 2;
  static constexpr int kValues = kPanelColumns * kScaleBytes * (minima ? 2 : 1);
  static constexpr int kBlockBytes = kValues + kPanelColumns * group / (nibbles ? 2 : 1);

  static KVR_INLINE Floats scales(const uint8_t* block, int column) {
    if (float_scales) return load(reinterpret_cast<const float*>(block) + column);
    return load_f16(reinterpret_cast<const uint16_t*>(block) + column);
  }
  static KVR_INLINE Floats minimum(const uint8_t* block, int column) {
    return load_f16(reinterpret_cast<const uint16_t*>(block) + kPanelColumns + column);
  }
};

using Int8 = ByteKind<KVR_INT8, 64, false, true, false>;
using Q8_0 = ByteKind<KVR_Q8_0, 32, false, false, false>;
using Q4_0 = ByteKind<KVR_Q4_0, 32, true, false, false>;
using Q4_1 = ByteKind<KVR_Q4_1, 32, true, false, true>;

// Inputs that share one activation scale; 0 for float kinds.
inline int group_of(int kind) {
  switch (kind) {
    case KVR_INT8: return Int8::kGroup;
    case KVR_Q8_0:
    case KVR_Q4_0:
    case KVR_Q4_1: return 32;
    default: return 0;
  }
}

inline size_t panel_bytes(int kind, int inputs) {
  switch (kind) {
    case KVR_FLOAT32: return size_t(inputs) * kPanelColumns * 4;
    case KVR_BFLOAT16: return size_t(inputs) * kPanelColumns * 2;
    case KVR_INT8: return size_t(inputs / Int8::kGroup) * Int8::kBlockBytes;
    case KVR_Q8_0: return size_t(inputs / 32) * Q8_0::kBlockBytes;
    case KVR_Q4_0: return size_t(inputs / 32) * Q4_0::kBlockBytes;
    default: return size_t(inputs / 32) * Q4_1::kBlockBytes;
  }
}

}  // namespace kvr
