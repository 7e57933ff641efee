// The register tile: R rows of activations times a panel of 32 columns, one template per family
// of weight kinds. Everything that multiplies weights goes through here.
//
// Every output is summed over the inputs in the same order whatever R is, so a row's result does
// not depend on the rows it shares a tile with.
#pragma once

#include "activations.h"

namespace kvr {

// Ahead of the loads by more than the memory latency; panels follow each other in memory.
constexpr int kPrefetchBytes = 8192;

KVR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// acc[R][C] += a[R rows] * b[C vectors], over `steps` 32-bit lanes of the inputs.
// a: rows `row_stride` lanes apart. b[c]: vectors `step_stride` lanes apart. next[c]: what to
// fetch at the same pace.
template <class Dot, int R, int C>
KVR_INLINE void multiply(Floats (&acc)[R][C], const int32_t* a, size_t row_stride,
                         const int32_t* const (&b)[C], size_t step_stride, int steps,
                         const int32_t* const (&next)[C]) {
  for (int k = 0; k < steps; k++) {
    Ints w[C];
    KVR_UNROLL for (int c = 0; c < C; c++) {
      w[c] = load_bits(b[c] + k * step_stride);
      prefetch(next[c] + k * step_stride);
    }
    KVR_UNROLL for (int r = 0; r < R; r++) {
      const Ints x = splat(a[r * row_stride + k]);
      KVR_UNROLL for (int c = 0; c < C; c++) acc[r][c] = Dot::step(acc[r][c], w[c], x);
    }
  }
}

template <int R, int C>
KVR_INLINE void clear(Floats (&acc)[R][C]) {
  KVR_UNROLL for (int r = 0; r < R; r++) {
    KVR_UNROLL for (int c = 0; c < C; c++) acc[r][c] = zeros();
  }
}

// out [R][32] = activations[row .. row + R) * panel.
template <class Dot, int R>
void float_tile(const uint8_t* panel, const Activations& x, int row, float* out) {
  constexpr int C = kTileVectors;
  const int steps = x.inputs / Dot::kPerLane;
  const int32_t* a = reinterpret_cast<const int32_t*>(x.values) + size_t(row) * steps;
  for (int column = 0; column < kPanelColumns; column += C * kLanes) {
    const int32_t* b[C];
    const int32_t* next[C];
    for (int c = 0; c < C; c++) {
      b[c] = reinterpret_cast<const int32_t*>(panel) + column + c * kLanes;
      next[c] = b[c] + kPrefetchBytes / 4;
    }
    Floats acc[R][C];
    clear(acc);
    multiply<Dot, R, C>(acc, a, steps, b, kPanelColumns, steps, next);
    KVR_UNROLL for (int r = 0; r < R; r++) {
      KVR_UNROLL for (int c = 0; c < C; c++) {
        store(out + r * kPanelColumns + column + c * kLanes, acc[r][c]);
      }
    }
  }
}

// Integer sums of one group: sums[R][C] += q[R rows] * block.
template <class Kind, int R, int C>
KVR_INLINE void multiply_group(Ints (&sums)[R][C], const uint8_t* block, int column,
                               const int8_t* q, size_t row_stride) {
  constexpr int kQuads = Kind::kGroup / 4 / (Kind::kNibbles ? 2 : 1);
  const uint8_t* quads = block + Kind::kValues + column * 4;
  const Ints low_half = splat(int32_t(0x0f0f0f0f));
  KVR_UNROLL for (int j = 0; j < kQuads; j++) {
    Ints w[C];
    KVR_UNROLL for (int c = 0; c < C; c++) {
      w[c] = load_bits(quads + j * kPanelColumns * 4 + c * kVectorBytes);
    }
    if (Kind::kNibbles) {
      Ints high[C];
      KVR_UNROLL for (int c = 0; c < C; c++) {
        high[c] = (w[c] >> 4) & low_half;
        w[c] = w[c] & low_half;
      }
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const int8_t* x = q + r * row_stride + j * 4;
        const Ints first = splat(*reinterpret_cast<const int32_t*>(x));
        const Ints second = splat(*reinterpret_cast<const int32_t*>(x + 16));
        KVR_UNROLL for (int c = 0; c < C; c++) {
          sums[r][c] = dot_nibbles(dot_nibbles(sums[r][c], w[c], first), high[c], second);
        }
      }
    } else {
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Ints x = splat(*reinterpret_cast<const int32_t*>(q + r * row_stride + j * 4));
        KVR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = dot_bytes(sums[r][c], w[c], x);
      }
    }
  }
}

// As float_tile. The float sums live in `out`, in L1: the integer ones need the registers.
template <class Kind, int R>
void byte_tile(const uint8_t* panel, const Activations& x, int row, float* out) {
  constexpr int C = kTileVectors;
  const int groups = x.inputs / Kind::kGroup;
  const size_t first_group = size_t(row) * groups;
  for (int column = 0; column < kPanelColumns; column += C * kLanes) {
    const int8_t* q = reinterpret_cast<const int8_t*>(x.values) + size_t(row) * x.inputs;
    const uint8_t* block = panel;
    for (int g = 0; g < groups; g++, block += Kind::kBlockBytes, q += Kind::kGroup) {
      KVR_UNROLL for (int i = 0; i < Kind::kBlockBytes; i += 64) {
        if (column == 0) prefetch(block + kPrefetchBytes + i);
      }
      const float* scales = x.scales + first_group + g;
      const int32_t* offsets = x.offsets + first_group + g;
      Ints sums[R][C];
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Ints start = splat(Kind::kMinima ? 0 : offsets[r * groups]);
        KVR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = start;
      }
      multiply_group<Kind, R, C>(sums, block, column, q, x.inputs);
      KVR_UNROLL for (int c = 0; c < C; c++) {
        const Floats scale = Kind::scales(block, column + c * kLanes);
        const Floats minimum = Kind::kMinima ? Kind::minimum(block, column + c * kLanes) : scale;
        KVR_UNROLL for (int r = 0; r < R; r++) {
          float* to = out + r * kPanelColumns + column + c * kLanes;
          Floats total = g == 0 ? zeros() : load(to);
          total = total + to_floats(sums[r][c]) * (scale * splat(scales[r * groups]));
          if (Kind::kMinima) total = total + minimum * as_floats(splat(offsets[r * groups]));
          store(to, total);
        }
      }
    }
  }
}

}  // namespace kvr
