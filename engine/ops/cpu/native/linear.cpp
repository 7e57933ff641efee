#include "linear.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tiles.h"

namespace kvr {
namespace {

using Tile = void (*)(const uint8_t* panel, const Activations& x, int row, float* out);
// [r] is the tile of r + 1 rows.
using Tiles = std::array<Tile, kTileRows>;

template <class Dot, size_t... r>
constexpr Tiles float_tiles(std::index_sequence<r...>) {
  return {{float_tile<Dot, int(r) + 1>...}};
}
template <class Kind, size_t... r>
constexpr Tiles byte_tiles(std::index_sequence<r...>) {
  return {{byte_tile<Kind, int(r) + 1>...}};
}

const Tiles& tiles_of(int kind) {
  constexpr auto all = std::make_index_sequence<kTileRows>();
  static constexpr Tiles float32 = float_tiles<Float32Dot>(all);
  static constexpr Tiles bfloat16 = float_tiles<Bfloat16Dot>(all);
  static constexpr Tiles int8 = byte_tiles<Int8>(all);
  static constexpr Tiles q8_0 = byte_tiles<Q8_0>(all);
  static constexpr Tiles q4_0 = byte_tiles<Q4_0>(all);
  static constexpr Tiles q4_1 = byte_tiles<Q4_1>(all);
  switch (kind) {
    case KVR_FLOAT32: return float32;
    case KVR_BFLOAT16: return bfloat16;
    case KVR_INT8: return int8;
    case KVR_Q8_0: return q8_0;
    case KVR_Q4_0: return q4_0;
    default: return q4_1;
  }
}

// Adds the bias of a panel's columns to a finished tile [rows][32].
void add_bias(const KvrLinear& linear, int first_column, int columns, int rows, float* tile) {
  if (linear.bias == nullptr) return;
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) tile[r * kPanelColumns + c] += linear.bias[first_column + c];
  }
}

// Multiplies rows by panels, `panels_per_unit` neighbours at a time, and hands every finished
// [panels_per_unit][tile rows][32] to epilogue(unit, row, tile rows, tile).
// A panel stays in L1 while all rows pass it; rows are split evenly, as a tile of one row costs
// nearly as much as a tile of four.
template <class Epilogue>
void multiply_all(Pool& pool, const KvrLinear& linear, const Activations& x, int rows,
                  int panels_per_unit, const Epilogue& epilogue) {
  if (rows == 0) return;
  const Tiles& tiles = tiles_of(linear.kind);
  const size_t bytes = panel_bytes(linear.kind, linear.inputs);
  const int panels = (linear.outputs + kPanelColumns - 1) / kPanelColumns;
  const int units = panels / panels_per_unit;
  const int parts = (rows + kTileRows - 1) / kTileRows;
  const int grain = std::max(1, units / (pool.threads() * 8));
  pool.run(units, grain, [&](int first, int last, int) {
    alignas(64) float tile[kPieceColumns / 16 * kTileRows * kPanelColumns];
    for (int unit = first; unit < last; unit++) {
      for (int part = 0, row = 0; part < parts; part++) {
        const int count = rows / parts + (part < rows % parts ? 1 : 0);
        for (int p = 0; p < panels_per_unit; p++) {
          const int panel = unit * panels_per_unit + p;
          float* out = tile + p * count * kPanelColumns;
          tiles[count - 1](linear.panels + panel * bytes, x, row, out);
          const int column = panel * kPanelColumns;
          add_bias(linear, column, std::min(kPanelColumns, linear.outputs - column), count, out);
        }
        epilogue(unit, row, count, tile);
        row += count;
      }
    }
  });
}

}  // namespace

void linear_store(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y) {
  multiply_all(pool, linear, x, rows, 1, [&](int panel, int row, int count, const float* tile) {
    const int column = panel * kPanelColumns;
    const size_t columns = std::min(kPanelColumns, linear.outputs - column);
    for (int r = 0; r < count; r++) {
      std::memcpy(y + size_t(row + r) * linear.outputs + column, tile + r * kPanelColumns,
                  columns * sizeof(float));
    }
  });
}

void linear_add(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y) {
  multiply_all(pool, linear, x, rows, 1, [&](int panel, int row, int count, const float* tile) {
    const int column = panel * kPanelColumns;
    const int columns = std::min(kPanelColumns, linear.outputs - column);
    for (int r = 0; r < count; r++) {
      float* to = y + size_t(row + r) * linear.outputs + column;
      for (int c = 0; c < columns; c++) to[c] += tile[r * kPanelColumns + c];
    }
  });
}

void linear_swiglu(Pool& pool, const KvrLinear& gate_up, const Activations& x, int rows,
                   const Activations& y) {
  // Every panel yields 16 columns; a unit of panels fills one group of y.
  const int panels = y.piece() / 16;
  multiply_all(pool, gate_up, x, rows, panels, [&](int unit, int row, int count,
                                                   const float* tile) {
    alignas(64) float piece[kPieceColumns];
    for (int r = 0; r < count; r++) {
      for (int p = 0; p < panels; p++) {
        const float* gate = tile + (p * count + r) * kPanelColumns;
        for (int i = 0; i < 16; i += kLanes) {
          store(piece + p * 16 + i, silu(load(gate + i)) * load(gate + 16 + i));
        }
      }
      y.write_piece(row + r, unit * y.piece(), piece);
    }
  });
}

size_t activation_bytes(const KvrLinear& linear, int rows) {
  const Activations end = activations_at(nullptr, linear, rows);
  const size_t groups = group_of(linear.kind) == 0 ? 0 : linear.inputs / group_of(linear.kind);
  return reinterpret_cast<uintptr_t>(end.offsets) + Scratch::padded(rows * groups * 4);
}

Activations activations_at(uint8_t* room, const KvrLinear& linear, int rows) {
  const int group = group_of(linear.kind);
  const size_t elements = size_t(rows) * linear.inputs, groups = group == 0 ? 0 : elements / group;
  const uintptr_t values = reinterpret_cast<uintptr_t>(room);
  const uintptr_t scales =
      values + Scratch::padded(elements * Activations::element_bytes(linear.kind));
  const uintptr_t offsets = scales + Scratch::padded(groups * 4);
  return {linear.kind, linear.inputs, room, reinterpret_cast<float*>(scales),
          reinterpret_cast<int32_t*>(offsets)};
}

}  // namespace kvr
