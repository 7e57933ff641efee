// AVX-512 (F, BW, DQ, VL), with VNNI and BF16 where the build has them. Included by simd.h only.
#pragma once

#include <immintrin.h>

namespace kvr {

constexpr int kTileVectors = 2;  // a register tile is two vectors = one panel of 32 columns wide
constexpr int kTileRows = 12;    // 24 of the 32 registers accumulate
constexpr int kByteTileRows = 8;  // 16 accumulate integers, 16 floats
constexpr int kNibbleTileRows = 6;  // two registers more hold the other nibbles

KVR_INLINE Floats splat(float x) { return (Floats)_mm512_set1_ps(x); }
KVR_INLINE Ints splat(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
KVR_INLINE Floats maximum(Floats a, Floats b) {
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
}
KVR_INLINE float sum(Floats v) { return _mm512_reduce_add_ps((__m512)v); }
KVR_INLINE int32_t sum(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
KVR_INLINE float largest(Floats v) { return _mm512_reduce_max_ps((__m512)v); }
KVR_INLINE Ints round_to_ints(Floats v) { return (Ints)_mm512_cvtps_epi32((__m512)v); }
KVR_INLINE Floats round_nearest(Floats v) { return (Floats)_mm512_roundscale_ps((__m512)v, 0); }
KVR_INLINE Floats times_power_of_two(Floats p, Floats exponent) {
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)exponent);
}
// One Newton step after the 14-bit estimate: good to 1e-7 and half the price of a division.
KVR_INLINE Floats reciprocal(Floats v) {
  const Floats estimate = (Floats)_mm512_rcp14_ps((__m512)v);
  return estimate * (splat(2.0f) - v * estimate);
}
// Lanes below `count` from `v`, the others from `other`.
KVR_INLINE Floats first_lanes(int count, Floats v, Floats other) {
  const __mmask16 mask = count <= 0 ? 0 : count >= 16 ? 0xffff : __mmask16((1 << count) - 1);
  return (Floats)_mm512_mask_blend_ps(mask, (__m512)other, (__m512)v);
}

KVR_INLINE Floats load_f16(const uint16_t* p) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
KVR_INLINE void store_bytes(int8_t* p, Ints v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}

KVR_INLINE __m512 floats_of_bytes(const int8_t* q) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
}

#if defined(__AVX512BF16__)
// 32 integers as bfloat16, which holds every int8.
KVR_INLINE void widen_bytes(const int8_t* q, uint16_t* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(floats_of_bytes(q + 16), floats_of_bytes(q)));
}
KVR_INLINE void store_bf16(uint16_t* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
// acc + w0 * x0 + w1 * x1 in every lane, w and x being pairs of bfloat16.
KVR_INLINE Floats dot_pairs(Floats acc, Ints w, Ints x) {
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x);
}
#else
KVR_INLINE void widen_bytes(const int8_t* q, uint16_t* to) {
  for (int i = 0; i < 32; i += 16) {
    const __m512i bits = _mm512_castps_si512(floats_of_bytes(q + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
}
KVR_INLINE void store_bf16(uint16_t* p, Floats v) {
  const Ints bits = as_ints(v), odd = (bits >> 16) & 1;
  const __m512i rounded = _mm512_srli_epi32((__m512i)(bits + 0x7fff + odd), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
KVR_INLINE Floats dot_pairs(Floats acc, Ints w, Ints x) {
  acc = acc + first_of_pairs(w) * first_of_pairs(x);
  return acc + second_of_pairs(w) * second_of_pairs(x);
}
#endif

#if defined(__AVX512VNNI__)
// Stored bytes are w + 128. VNNI multiplies them unsigned as they are, so sums come out too
// large by kByteBias * sum(x); kernels start their accumulators at minus that.
constexpr int kByteBias = 128;
KVR_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
  // gcc 12 spills accumulators around the intrinsic: 45 instead of 90 % of peak.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
KVR_INLINE Ints dot_nibbles(Ints acc, Ints w, Ints x) { return dot_bytes(acc, w, x); }
#else
constexpr int kByteBias = 0;
KVR_INLINE Ints add_quads(Ints acc, __m512i pairs) {
  return acc + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
// maddubs saturates for unsigned bytes over 127: move the sign of w over to x instead.
KVR_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
  const __m512i s = _mm512_xor_si512((__m512i)w, _mm512_set1_epi8(-128));
  const __m512i signed_x =
      _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(s), _mm512_setzero_si512(), (__m512i)x);
  return add_quads(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(s), signed_x));
}
KVR_INLINE Ints dot_nibbles(Ints acc, Ints w, Ints x) {
  return add_quads(acc, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
#endif

}  // namespace kvr
