// Matrix tiles (Intel AMX): one instruction multiplies 16 rows of 32 bfloat16 by 32 x 16.
//
// Panels and pages already lie as these instructions want their second operand: lanes of two
// neighbouring inputs, 16 columns to a row of 64 bytes. A result is summed in float32 over pairs
// of inputs in order, 32 inputs an instruction, whatever rows share the tile. Used for every
// number of rows, so a row's result does not depend on how it was batched.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define KVR_AMX 1

#include <immintrin.h>

#include "attention_tile.h"
#include "tiles.h"

namespace kvr {

constexpr int kMatrixRows = 16;    // rows of one tile
constexpr int kMatrixInputs = 32;  // inputs of one instruction
constexpr int kMatrixRowBytes = 64;

// What the eight tile registers hold, as the processor reads it.
struct alignas(64) MatrixShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int bytes) {
    rows[tile] = uint8_t(tile_rows);
    row_bytes[tile] = uint16_t(bytes);
  }
};

// The shapes this thread has loaded; 0: none.
inline thread_local int matrix_shapes = 0;

// Gives the tile registers back, so that the system need not keep them for a thread that sleeps.
struct MatrixScope {
  ~MatrixScope() {
    if (matrix_shapes != 0) {
      _tile_release();
      matrix_shapes = 0;
    }
  }
};

inline void load_shapes(int name, const MatrixShapes& shapes) {
  if (matrix_shapes == name) return;
  _tile_loadconfig(&shapes);
  matrix_shapes = name;
}

// 0, 1: results of the first 16 rows; 2, 3: of the others; 4, 5: rows; 6, 7: weights.
inline void shape_linear(int rows) {
  MatrixShapes shapes;
  const int first = rows < kMatrixRows ? rows : kMatrixRows;
  const int second = rows > kMatrixRows ? rows - kMatrixRows : 1;
  for (int tile = 0; tile < 2; tile++) {
    shapes.set(tile, first, kMatrixRowBytes);
    shapes.set(2 + tile, second, kMatrixRowBytes);
    shapes.set(6 + tile, kMatrixRows, kMatrixRowBytes);
  }
  shapes.set(4, first, kMatrixRowBytes);
  shapes.set(5, second, kMatrixRowBytes);
  load_shapes(rows, shapes);
}

// 0 - 3: results; 4: queries; 5: weights of a page's tokens; 6: keys; 7: values of a page.
inline void shape_attention(int rows) {
  MatrixShapes shapes;
  for (int tile = 0; tile < 5; tile++) shapes.set(tile, rows, kMatrixRowBytes);
  shapes.set(5, rows, kPageTokens * 2);
  shapes.set(6, kMatrixRows, kMatrixRowBytes);
  shapes.set(7, kPageTokens / 2, kMatrixRowBytes);
  load_shapes(100 + rows, shapes);
}

KVR_INLINE void prefetch_lines(const uint8_t* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) prefetch(from + i);
}

// As float_tile, for up to 32 rows. Every part of the rows fetches its share of the next panel:
// multiplying is so fast that one part alone could not hide the weights' way from memory.
template <int R>
void matrix_tile(const uint8_t* panel, const Activations& x, int row, Pace pace, float* out) {
  constexpr bool kTwo = R > kMatrixRows;
  constexpr int kPanelRow = kPanelColumns * 4, kStepBytes = kMatrixRows * kPanelRow;
  const int stride = x.inputs * 2, steps = x.inputs / kMatrixInputs;
  const uint8_t* a = x.values + size_t(row) * stride;
  const uint8_t* second = a + size_t(kMatrixRows) * stride;
  if (matrix_shapes != R) shape_linear(R);
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const int lines = (steps * kStepBytes / 64 + pace.parts - 1) / pace.parts;
  const uint8_t* next = panel + size_t(steps) * kStepBytes + size_t(pace.part) * lines * 64;
  const int lines_a_step = (lines + steps - 1) / steps;
  for (int k = 0; k < steps; k++, panel += kStepBytes, a += kMatrixRowBytes) {
    prefetch_lines(next, lines_a_step * 64);
    next += lines_a_step * 64;
    _tile_loadd(6, panel, kPanelRow);
    _tile_loadd(4, a, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kMatrixRowBytes, kPanelRow);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, second + k * kMatrixRowBytes, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kPanelRow);
  _tile_stored(1, out + kMatrixRows, kPanelRow);
  if (kTwo) {
    float* below = out + kMatrixRows * kPanelColumns;
    _tile_stored(2, below, kPanelRow);
    _tile_stored(3, below + kMatrixRows, kPanelRow);
  }
}

// scores[R][pages * 16] = queries * keys; four pages at a time, as their sums are independent.
KVR_INLINE void score_pages_matrix(const Chunk& chunk, int pages, const int32_t* queries,
                                   float* scores) {
  const int stride = chunk.head_dim * 2, steps = chunk.head_dim / kMatrixInputs;
  constexpr int kStep = kMatrixRows * kMatrixRowBytes, kOut = kScoreStride * 4;
  const uint8_t* a = reinterpret_cast<const uint8_t*>(queries);
  for (int page = 0; page < pages; page += 4) {
    const uint8_t* b[4];
    for (int i = 0; i < 4; i++) {
      // Past the last page its scores are computed again and not stored.
      const int at = page + i < pages ? page + i : pages - 1;
      b[i] = reinterpret_cast<const uint8_t*>(chunk.keys[at]);
      prefetch_lines(reinterpret_cast<const uint8_t*>(chunk.next_keys[at]), steps * kStep);
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < steps; k++) {
      _tile_loadd(4, a + k * kMatrixRowBytes, stride);
      _tile_loadd(6, b[0] + k * kStep, kMatrixRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(6, b[1] + k * kStep, kMatrixRowBytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(6, b[2] + k * kStep, kMatrixRowBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(6, b[3] + k * kStep, kMatrixRowBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
    float* out = scores + page * kPageTokens;
    _tile_stored(0, out, kOut);
    if (page + 1 < pages) _tile_stored(1, out + kPageTokens, kOut);
    if (page + 2 < pages) _tile_stored(2, out + 2 * kPageTokens, kOut);
    if (page + 3 < pages) _tile_stored(3, out + 3 * kPageTokens, kOut);
  }
}

// outputs[R][head_dim] += weights * values, N times 16 columns from `column` on.
template <int N>
KVR_INLINE void add_columns(const Chunk& chunk, int pages, const float* weights, int column,
                            float* outputs) {
  const int values_row = chunk.head_dim * 4, out_row = chunk.head_dim * 4;
  float* out = outputs + column;
  _tile_loadd(0, out, out_row);
  if (N > 1) _tile_loadd(1, out + 16, out_row);
  if (N > 2) _tile_loadd(2, out + 32, out_row);
  if (N > 3) _tile_loadd(3, out + 48, out_row);
  for (int page = 0; page < pages; page++) {
    const int32_t* b = chunk.values[page] + column;
    const auto* next = reinterpret_cast<const uint8_t*>(chunk.next_values[page] + column);
    for (int r = 0; r < kPageTokens / 2; r++) prefetch_lines(next + r * values_row, N * 64);
    // Weights are bfloat16 in place of the scores.
    _tile_loadd(5, reinterpret_cast<const uint16_t*>(weights) + page * kPageTokens,
                kScoreStride * 4);
    _tile_loadd(7, b, values_row);
    _tile_dpbf16ps(0, 5, 7);
    if (N > 1) {
      _tile_loadd(7, b + 16, values_row);
      _tile_dpbf16ps(1, 5, 7);
    }
    if (N > 2) {
      _tile_loadd(7, b + 32, values_row);
      _tile_dpbf16ps(2, 5, 7);
    }
    if (N > 3) {
      _tile_loadd(7, b + 48, values_row);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_row);
  if (N > 1) _tile_stored(1, out + 16, out_row);
  if (N > 2) _tile_stored(2, out + 32, out_row);
  if (N > 3) _tile_stored(3, out + 48, out_row);
}

KVR_INLINE void add_values_matrix(const Chunk& chunk, int pages, const float* weights,
                                  float* outputs) {
  int column = 0;
  for (; column + 64 <= chunk.head_dim; column += 64) {
    add_columns<4>(chunk, pages, weights, column, outputs);
  }
  // head_dim is a multiple of 32 where this is used.
  if (column < chunk.head_dim) add_columns<2>(chunk, pages, weights, column, outputs);
}

// As attend_tile, for up to 16 rows; head_dim a multiple of 32.
template <class Dot, int R>
void attend_matrix_tile(const Chunk& chunk, const int32_t* queries, const int* visible_until,
                        const RowStates& states, float* scores) {
  const int seen = visible_until[R - 1] - chunk.first_position;
  const int needed = (seen + kPageTokens - 1) / kPageTokens;
  const int pages = needed < chunk.pages ? needed : chunk.pages;
  if (matrix_shapes != 100 + R) shape_attention(R);
  score_pages_matrix(chunk, pages, queries, scores);
  for (int r = 0; r < R; r++) {
    const float shrink = weigh_scores<Dot>(
        chunk, scores + r * kScoreStride, pages * kPageTokens, visible_until[r] - chunk.first_position,
        states.peaks + r, states.sums + r);
    if (shrink == 1.0f) continue;
    float* out = states.outputs + r * chunk.head_dim;
    for (int d = 0; d < chunk.head_dim; d += kLanes) store(out + d, load(out + d) * splat(shrink));
  }
  add_values_matrix(chunk, pages, scores, states.outputs);
}

}  // namespace kvr
#else
namespace kvr {
struct MatrixScope {
  ~MatrixScope() {}
};
}  // namespace kvr
#endif
