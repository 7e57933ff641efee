// Vectors of 32-bit lanes, as wide as the instruction set this file is compiled for.
//
// Arithmetic is the compiler's own (+ - * on vector types); what it cannot express, the dot
// products and conversions, comes from exactly one of the headers included at the bottom.
// Kernels above this file never name an instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#define KVR_UNROLL _Pragma("unroll")
#else
// Accumulator arrays live in registers only when every loop over them is unrolled.
#define KVR_UNROLL _Pragma("GCC unroll 32")
#endif
#define KVR_INLINE inline __attribute__((always_inline))

namespace kvr {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVR_AVX512 1
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVR_AVX2 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int kVectorBytes = kLanes * 4;
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef float LooseFloats __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t LooseInts __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

KVR_INLINE Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
KVR_INLINE Ints load_bits(const void* p) { return *static_cast<const LooseInts*>(p); }
KVR_INLINE void store(float* p, Floats v) { *reinterpret_cast<LooseFloats*>(p) = v; }
KVR_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
KVR_INLINE Floats as_floats(Ints v) { return (Floats)v; }
KVR_INLINE Ints as_ints(Floats v) { return (Ints)v; }

// bfloat16 is the upper half of a float; halves of a lane are its two bfloat16 neighbours.
KVR_INLINE Floats first_of_pairs(Ints v) { return as_floats(v << 16); }
KVR_INLINE Floats second_of_pairs(Ints v) { return as_floats(v & int32_t(0xffff0000)); }

KVR_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // nearest, ties to even
}
// The nearest float16, ties to even; the largest one for all that is larger. x >= 0.
inline uint16_t to_f16(float x) {
  if (!(x < 65504.0f)) return 0x7bff;
  if (x < 6.103515625e-05f) return uint16_t(__builtin_rintf(x * 16777216.0f));  // subnormal
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t((bits - 0x38000000u) >> 13);
}
KVR_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
KVR_INLINE float from_f16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
  if (exponent == 0) {  // zero and subnormals: mantissa units of 2^-24
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t biased = exponent == 31 ? 255 : exponent + 112;
  const uint32_t bits = sign | (biased << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace kvr

#if defined(KVR_AVX512)
#include "simd_avx512.h"
#elif defined(KVR_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace kvr {

KVR_INLINE Floats zeros() { return splat(0.0f); }
KVR_INLINE Floats magnitude(Floats v) { return as_floats(as_ints(v) & int32_t(0x7fffffff)); }

// 2^x by a Taylor polynomial around the nearest integer (|rest| <= 1/2, scaled by ln 2).
// Degree 4 is good to 4e-5, enough where the result is rounded to bfloat16; degree 6 to 2e-7.
template <int kDegree>
KVR_INLINE Floats exp2(Floats x) {
  static_assert(kDegree == 4 || kDegree == 6, "no other polynomial is listed");
  const Floats whole = round_nearest(x), rest = x - whole;
  Floats p = splat(9.6181291e-3f);
  if (kDegree == 6) {
    p = splat(1.5403530e-4f);
    p = p * rest + splat(1.3333558e-3f);
    p = p * rest + splat(9.6181291e-3f);
  }
  p = p * rest + splat(5.5504109e-2f);
  p = p * rest + splat(2.4022651e-1f);
  p = p * rest + splat(6.9314718e-1f);
  p = p * rest + splat(1.0f);
  return times_power_of_two(p, whole);
}

// x * sigmoid(x). The bound keeps 2^-x finite; below it the result is zero to 1e-35.
template <int kDegree>
KVR_INLINE Floats silu(Floats x) {
  const Floats exponent = maximum(x, splat(-87.0f)) * splat(-1.44269504f);
  return x * reciprocal(splat(1.0f) + exp2<kDegree>(exponent));
}

// v, no further from zero than `bound`.
KVR_INLINE Floats within(Floats v, float bound) {
  const Floats lowest = splat(-bound);
  return zeros() - maximum(zeros() - maximum(v, lowest), lowest);
}

// 1 - 2 / (1 + e^2x), to 2e-7 of one; beyond 15 it is one.
KVR_INLINE Floats tanh(Floats x) {
  const Floats power = exp2<6>(within(x, 15.0f) * splat(2.88539008f));
  return splat(1.0f) - splat(2.0f) * reciprocal(splat(1.0f) + power);
}

// The tanh form, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), as
// x * sigmoid(2u). Beyond 9.9 the sigmoid is 0 or 1 to 1e-36, and 2^-2u still finite.
template <int kDegree>
KVR_INLINE Floats gelu(Floats x) {
  const Floats near = within(x, 9.9f);
  const Floats inner = near * (splat(1.0f) + splat(0.044715f) * near * near);
  const Floats exponent = inner * splat(-2.30220820f);  // -2 * sqrt(2 / pi) * log2(e)
  return x * reciprocal(splat(1.0f) + exp2<kDegree>(exponent));
}

}  // namespace kvr
