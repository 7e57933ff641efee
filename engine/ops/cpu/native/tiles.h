// The register tile: R rows of activations times a panel of 32 columns, one template per family
// of weight kinds. Everything that multiplies weights goes through here.
//
// Every output is summed over the inputs in the same order whatever R is, so a row's result does
// not depend on the rows it shares a tile with.
#pragma once

#include "activations.h"

namespace kvr {

KVR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Ahead of the loads by more than the memory latency. Panels follow each other in memory, so the
// last rows that pass a panel fetch the beginning of the next one.
constexpr int kPrefetchBytes = 8192;

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

// Which of how many parts of the rows passes a panel: some of them fetch what comes next.
struct Pace {
  int part, parts;

  // With few rows the weights' way from memory is what counts, and every tile fetches some; with
  // many the first tile's fetching is enough.
  bool fetches() const { return part == 0 || parts <= 4; }
};

// out [R][32] = activations[row .. row + R) * panel. `pace`: whether to prefetch weights.
template <class Dot, int R>
void float_tile(const uint8_t* panel, const Activations& x, int row, Pace pace, float* out) {
  const bool fetch = pace.fetches();
  constexpr int C = kTileVectors;
  const int steps = x.inputs / Dot::kPerLane;
  const int32_t* a = reinterpret_cast<const int32_t*>(x.values) + size_t(row) * steps;
  for (int column = 0; column < kPanelColumns; column += C * kLanes) {
    const int32_t* b[C];
    const int32_t* next[C];
    for (int c = 0; c < C; c++) {
      b[c] = reinterpret_cast<const int32_t*>(panel) + column + c * kLanes;
      next[c] = b[c] + (fetch ? kPrefetchBytes / 4 : 0);
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

// Integer sums of one group: sums[R][C] += q[R rows][group] * block.
template <class Kind, int R, int C>
KVR_INLINE void multiply_group(Ints (&sums)[R][C], const uint8_t* block, int column,
                               const int8_t* q) {
  constexpr int kQuads = Kind::kGroup / 4 / (Kind::kNibbles ? 2 : 1);
  const uint8_t* quads = block + Kind::kValues + column * 4;
  const int32_t* x = reinterpret_cast<const int32_t*>(q);
  constexpr int kRow = Kind::kGroup / 4;
  KVR_UNROLL for (int j = 0; j < kQuads; j++) {
    Ints w[C];
    KVR_UNROLL for (int c = 0; c < C; c++) {
      w[c] = load_bits(quads + j * kPanelColumns * 4 + c * kVectorBytes);
    }
    if (Kind::kNibbles) {
      const Ints low_half = splat(int32_t(0x0f0f0f0f));
      Ints high[C];
      KVR_UNROLL for (int c = 0; c < C; c++) {
        high[c] = (w[c] >> 4) & low_half;
        w[c] = w[c] & low_half;
      }
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Ints first = splat(x[r * kRow + j]), second = splat(x[r * kRow + j + kQuads]);
        KVR_UNROLL for (int c = 0; c < C; c++) {
          sums[r][c] = dot_nibbles(dot_nibbles(sums[r][c], w[c], first), high[c], second);
        }
      }
    } else {
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Ints four = splat(x[r * kRow + j]);
        KVR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = dot_bytes(sums[r][c], w[c], four);
      }
    }
  }
}

// As float_tile.
template <class Kind, int R>
void byte_tile(const uint8_t* panel, const Activations& x, int row, Pace pace, float* out) {
  const bool fetch = pace.fetches();
  constexpr int C = kTileVectors;
  const int groups = x.inputs / Kind::kGroup, rows = x.rows;
  const int8_t* values = reinterpret_cast<const int8_t*>(x.values);
  const float* row_scales = x.scales;
  const int32_t* offsets = x.offsets;
  for (int column = 0; column < kPanelColumns; column += C * kLanes) {
    const uint8_t* block = panel;
    size_t at = row;
    Floats acc[R][C];
    clear(acc);
    for (int g = 0; g < groups; g++, block += Kind::kBlockBytes, at += rows) {
      if (fetch && column == 0) {
        KVR_UNROLL for (int i = 0; i < Kind::kBlockBytes; i += 64) {
          prefetch(block + kPrefetchBytes + i);
        }
      }
      Ints sums[R][C];
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Ints start = splat(Kind::kMinima ? kIntegerFloat : offsets[at + r]);
        KVR_UNROLL for (int c = 0; c < C; c++) sums[r][c] = start;
      }
      multiply_group<Kind, R, C>(sums, block, column,
                                 values + at * Kind::kGroup);
      Floats scales[C], minima[C];
      KVR_UNROLL for (int c = 0; c < C; c++) {
        scales[c] = Kind::scales(block, column + c * kLanes);
        minima[c] = Kind::kMinima ? Kind::minimum(block, column + c * kLanes) : scales[c];
      }
      KVR_UNROLL for (int r = 0; r < R; r++) {
        const Floats row_scale = splat(row_scales[at + r]);
        const Floats weighted = as_floats(splat(offsets[at + r]));  // Q4_1: scale * sum(q)
        KVR_UNROLL for (int c = 0; c < C; c++) {
          const Floats integer = as_floats(sums[r][c]) - as_floats(splat(kIntegerFloat));
          acc[r][c] = acc[r][c] + integer * (scales[c] * row_scale);
          if (Kind::kMinima) acc[r][c] = acc[r][c] + minima[c] * weighted;
        }
      }
    }
    KVR_UNROLL for (int r = 0; r < R; r++) {
      KVR_UNROLL for (int c = 0; c < C; c++) {
        store(out + r * kPanelColumns + column + c * kLanes, acc[r][c]);
      }
    }
  }
}

}  // namespace kvr
