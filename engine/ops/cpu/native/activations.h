// Input rows of a linear layer in the form its weight kind multiplies.
//
// Float kinds: the rows as float32 or bfloat16. Byte kinds: int8 in groups, x = scale * q, plus
// what the kernel needs of sum(q) per group; all rows of a group lie together, so that a tile
// reaches them at constant distances. Written piece by piece: an epilogue can hand its columns on
// without a float copy of the whole row.
#pragma once

#include "panels.h"

namespace kvr {

// Largest share of a row that is written at once; a multiple of every group.
constexpr int kPieceColumns = 64;

struct Activations {
  int kind = KVR_FLOAT32;
  int inputs = 0;
  int rows = 0;                // room for so many
  uint8_t* values = nullptr;   // float kinds: [rows][inputs]; byte kinds: int8 [groups][rows][group]
  float* scales = nullptr;     // [groups][rows]
  int32_t* offsets = nullptr;  // [groups][rows]; Q4_1: float scale * sum(q), others: int start

  static size_t element_bytes(int kind) {
    return kind == KVR_FLOAT32 ? 4 : kind == KVR_BFLOAT16 ? 2 : 1;
  }
  // Columns an epilogue must deliver together.
  int piece() const { return group_of(kind) == 0 ? 16 : group_of(kind); }

  void write_piece(int row, int column, const float* x) const;
  void write_row(int row, const float* x) const;
};

// Rows to make room for, so that groups of a row are an odd number of cache lines apart: at an even
// distance a tile's rows would fall on few cache sets.
inline int row_distance(int group, int rows) {
  if (group == 0) return rows;
  return group == 64 ? rows | 1 : (rows + 1) / 4 * 4 + 2;
}

// q = round(x * 127 / max|x|), the group's scale max|x| / 127. Returns sum(q).
template <int kGroup>
KVR_INLINE int32_t quantise_group(const float* x, int8_t* q, float* scale) {
  Floats bound = zeros();
  for (int i = 0; i < kGroup; i += kLanes) bound = maximum(bound, magnitude(load(x + i)));
  const float peak = largest(bound);
  *scale = peak * (1.0f / 127.0f);
  const Floats inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
  Ints total = splat(int32_t(0));
  for (int i = 0; i < kGroup; i += kLanes) {
    const Ints rounded = round_to_ints(load(x + i) * inverse);
    total += rounded;
    store_bytes(q + i, rounded);
  }
  return sum(total);
}

// Bits of the float 1.5 * 2^23: adding an integer below 2^22 to them adds it to the float. Sums of
// a group start there, which makes them floats without a conversion.
constexpr int32_t kIntegerFloat = 0x4b400000;

// What tiles.h starts a group's integer accumulators with, or adds as floats for Q4_1.
KVR_INLINE int32_t group_offset(int kind, int32_t total, float scale) {
  if (kind == KVR_Q4_1) {
    const float weighted = scale * float(total);
    int32_t bits;
    std::memcpy(&bits, &weighted, 4);
    return bits;
  }
  return kIntegerFloat - (kind == KVR_Q4_0 ? 8 : kByteBias) * total;
}

inline void Activations::write_piece(int row, int column, const float* x) const {
  const size_t at = size_t(row) * inputs + column;
  if (kind == KVR_FLOAT32) {
    std::memcpy(reinterpret_cast<float*>(values) + at, x, 16 * sizeof(float));
  } else if (kind == KVR_BFLOAT16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(values) + at;
    for (int i = 0; i < 16; i += kLanes) store_bf16(to + i, load(x + i));
  } else {
    const size_t group = size_t(column / group_of(kind)) * rows + row;
    int8_t* q = reinterpret_cast<int8_t*>(values) + group * group_of(kind);
    const int32_t total = kind == KVR_INT8 ? quantise_group<64>(x, q, scales + group)
                                           : quantise_group<32>(x, q, scales + group);
    offsets[group] = group_offset(kind, total, scales[group]);
  }
}

inline void Activations::write_row(int row, const float* x) const {
  for (int column = 0; column < inputs; column += piece()) write_piece(row, column, x + column);
}

}  // namespace kvr
