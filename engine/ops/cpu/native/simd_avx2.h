// AVX2 with FMA and F16C, and AVX-VNNI where the build has it. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace kvr {

constexpr int kTileVectors = 2;  // half a panel: 16 registers hold no more
constexpr int kTileRows = 4;
constexpr int kByteTileRows = 4;
constexpr int kNibbleTileRows = 4;

KVR_INLINE Floats splat(float x) { return (Floats)_mm256_set1_ps(x); }
KVR_INLINE Ints splat(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
KVR_INLINE Floats maximum(Floats a, Floats b) {
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
}
KVR_INLINE float sum(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
KVR_INLINE int32_t sum(Ints v) {
  __m128i s =
      _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
KVR_INLINE float largest(Floats v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
KVR_INLINE Ints round_to_ints(Floats v) { return (Ints)_mm256_cvtps_epi32((__m256)v); }
KVR_INLINE Floats round_nearest(Floats v) { return (Floats)_mm256_round_ps((__m256)v, 8); }
// p is in [0.7, 1.5]; below 2^-126 the result is exactly zero, as masked scores need.
KVR_INLINE Floats times_power_of_two(Floats p, Floats exponent) {
  const Ints bits = as_ints(p) + (round_to_ints(exponent) << 23);
  return as_floats(bits & (Ints)(exponent >= splat(-126.0f)));
}
KVR_INLINE Floats reciprocal(Floats v) { return splat(1.0f) / v; }
KVR_INLINE Floats first_lanes(int count, Floats v, Floats other) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (Floats)_mm256_blendv_ps((__m256)other, (__m256)v, (__m256)(lane < splat(count)));
}

KVR_INLINE Floats load_f16(const uint16_t* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
KVR_INLINE __m128i low_halves(__m256i v) {  // of 32-bit lanes that fit 16 bits
  const __m256i packed = _mm256_packus_epi32(v, v);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
// 32 integers as bfloat16, which holds every int8.
KVR_INLINE void widen_bytes(const int8_t* q, uint16_t* to) {
  for (int i = 0; i < 32; i++) to[i] = to_bf16(float(q[i]));
}
KVR_INLINE void store_bytes(int8_t* p, Ints v) {
  const __m128i halves = low_halves(_mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xff)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}
KVR_INLINE void store_bf16(uint16_t* p, Floats v) {
  const Ints bits = as_ints(v), odd = (bits >> 16) & 1;
  const __m256i rounded = _mm256_srli_epi32((__m256i)(bits + 0x7fff + odd), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low_halves(rounded));
}

// acc + w0 * x0 + w1 * x1 in every lane, w and x being pairs of bfloat16.
KVR_INLINE Floats dot_pairs(Floats acc, Ints w, Ints x) {
  acc = acc + first_of_pairs(w) * first_of_pairs(x);
  return acc + second_of_pairs(w) * second_of_pairs(x);
}

#if defined(__AVXVNNI__)
constexpr int kByteBias = 128;  // see simd_avx512.h
KVR_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
KVR_INLINE Ints dot_nibbles(Ints acc, Ints w, Ints x) { return dot_bytes(acc, w, x); }
#else
constexpr int kByteBias = 0;
KVR_INLINE Ints add_quads(Ints acc, __m256i pairs) {
  return acc + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
// maddubs saturates for unsigned bytes over 127: move the sign of w over to x instead.
KVR_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
  const __m256i s = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128));
  return add_quads(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8((__m256i)x, s)));
}
KVR_INLINE Ints dot_nibbles(Ints acc, Ints w, Ints x) {
  return add_quads(acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
#endif

}  // namespace kvr
