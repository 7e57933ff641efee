// Any CPU, four lanes; NEON's dot products where the build has them. Included by simd.h only.
#pragma once

#include <cmath>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace kvr {

#if defined(__ARM_NEON)
constexpr int kTileVectors = 4;  // 32 registers: 6 rows of half a panel
constexpr int kTileRows = 6;
constexpr int kByteTileRows = 3;
constexpr int kNibbleTileRows = 3;
#else
constexpr int kTileVectors = 2;
constexpr int kTileRows = 4;
constexpr int kByteTileRows = 2;
constexpr int kNibbleTileRows = 2;
#endif

KVR_INLINE Floats splat(float x) { return Floats{x, x, x, x}; }
KVR_INLINE Ints splat(int32_t x) { return Ints{x, x, x, x}; }
KVR_INLINE Floats select(Ints mask, Floats yes, Floats no) {
  return as_floats((as_ints(yes) & mask) | (as_ints(no) & ~mask));
}
KVR_INLINE Floats maximum(Floats a, Floats b) { return select((Ints)(a > b), a, b); }
KVR_INLINE float sum(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }
KVR_INLINE int32_t sum(Ints v) { return (v[0] + v[2]) + (v[1] + v[3]); }
KVR_INLINE float largest(Floats v) {
  return std::fmax(std::fmax(v[0], v[2]), std::fmax(v[1], v[3]));
}
// Adding and taking away 1.5 * 2^23 leaves the nearest integer, for |v| below 2^22.
KVR_INLINE Floats round_nearest(Floats v) {
  const Floats magic = splat(12582912.0f), bounded = maximum(v, splat(-2097152.0f));
  return (bounded + magic) - magic;
}
KVR_INLINE Ints round_to_ints(Floats v) {
  return as_ints(v + splat(12582912.0f)) - splat(int32_t(0x4b400000));
}
// p is in [0.7, 1.5]; below 2^-126 the result is exactly zero, as masked scores need.
KVR_INLINE Floats times_power_of_two(Floats p, Floats exponent) {
  const Ints bits = as_ints(p) + (round_to_ints(maximum(exponent, splat(-127.0f))) << 23);
  return as_floats(bits & (Ints)(exponent >= splat(-126.0f)));
}
KVR_INLINE Floats reciprocal(Floats v) { return splat(1.0f) / v; }
KVR_INLINE Floats first_lanes(int count, Floats v, Floats other) {
  return select((Ints)(Ints{0, 1, 2, 3} < splat(count)), v, other);
}

KVR_INLINE Floats load_f16(const uint16_t* p) {
  return Floats{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])};
}
// 32 integers as bfloat16, which holds every int8.
KVR_INLINE void widen_bytes(const int8_t* q, uint16_t* to) {
  for (int i = 0; i < 32; i++) to[i] = to_bf16(float(q[i]));
}
KVR_INLINE void store_bytes(int8_t* p, Ints v) {
  for (int i = 0; i < 4; i++) p[i] = int8_t(v[i]);
}
KVR_INLINE void store_bf16(uint16_t* p, Floats v) {
  for (int i = 0; i < 4; i++) p[i] = to_bf16(v[i]);
}

// acc + w0 * x0 + w1 * x1 in every lane, w and x being pairs of bfloat16.
KVR_INLINE Floats dot_pairs(Floats acc, Ints w, Ints x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Floats)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)x);
#else
  acc = acc + first_of_pairs(w) * first_of_pairs(x);
  return acc + second_of_pairs(w) * second_of_pairs(x);
#endif
}

// Stored bytes are w + 128; flipping the top bit gives w itself, so there is no bias to undo.
constexpr int kByteBias = 0;
KVR_INLINE Ints dot_signed(Ints acc, Ints w, Ints x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
#else
  // Byte b of every lane is brought to the top and shifted back with its sign.
  acc = acc + ((w << 24) >> 24) * ((x << 24) >> 24);
  acc = acc + ((w << 16) >> 24) * ((x << 16) >> 24);
  acc = acc + ((w << 8) >> 24) * ((x << 8) >> 24);
  return acc + (w >> 24) * (x >> 24);
#endif
}
KVR_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
  return dot_signed(acc, w ^ splat(int32_t(0x80808080)), x);
}
KVR_INLINE Ints dot_nibbles(Ints acc, Ints w, Ints x) { return dot_signed(acc, w, x); }

}  // namespace kvr
