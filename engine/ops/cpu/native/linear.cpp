#include "linear.h"

#include <algorithm>
#include <utility>

#include "matrix_tiles.h"
#include "tiles.h"

namespace kvr {
namespace {

#if defined(KVR_AMX)
constexpr int kMostRows = 2 * kMatrixRows;
#else
constexpr int kMostRows = kTileRows;
#endif

using Tile = void (*)(const uint8_t* panel, const Activations& x, int row, Pace pace,
                      float* out);

// tiles[r] is the tile of r + 1 rows.
struct Tiles {
  const Tile* tiles;
  int most_rows;
};

template <class Dot, size_t... r>
Tiles float_tiles(std::index_sequence<r...>) {
  static constexpr Tile tiles[] = {float_tile<Dot, int(r) + 1>...};
  return {tiles, sizeof...(r)};
}
template <class Kind, size_t... r>
Tiles byte_tiles(std::index_sequence<r...>) {
  static constexpr Tile tiles[] = {byte_tile<Kind, int(r) + 1>...};
  return {tiles, sizeof...(r)};
}

#if defined(KVR_AMX)
template <size_t... r>
Tiles matrix_tiles(std::index_sequence<r...>) {
  static constexpr Tile tiles[] = {matrix_tile<int(r) + 1>...};
  return {tiles, sizeof...(r)};
}
#endif

Tiles tiles_of(int kind) {
  constexpr auto float_rows = std::make_index_sequence<kTileRows>();
  constexpr auto byte_rows = std::make_index_sequence<kByteTileRows>();
  constexpr auto nibble_rows = std::make_index_sequence<kNibbleTileRows>();
  switch (kind) {
    case KVR_FLOAT32: return float_tiles<Float32Dot>(float_rows);
#if defined(KVR_AMX)
    case KVR_BFLOAT16: return matrix_tiles(std::make_index_sequence<kMostRows>());
#else
    case KVR_BFLOAT16: return float_tiles<Bfloat16Dot>(float_rows);
#endif
    case KVR_INT8: return byte_tiles<Int8>(byte_rows);
    case KVR_Q8_0: return byte_tiles<Q8_0>(byte_rows);
    case KVR_Q4_0: return byte_tiles<Q4_0>(nibble_rows);
    default: return byte_tiles<Q4_1>(nibble_rows);
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
  const Tiles kind = tiles_of(linear.kind);
  const size_t bytes = panel_bytes(linear.kind, linear.inputs);
  const int panels = (linear.outputs + kPanelColumns - 1) / kPanelColumns;
  const int units = panels / panels_per_unit;
  const int parts = (rows + kind.most_rows - 1) / kind.most_rows;
  const int grain = std::max(1, units / (pool.threads() * 8));
  pool.run(units, grain, [&](int first, int last, int) {
    const MatrixScope scope;
    alignas(64) float tile[kPieceColumns / 16 * kMostRows * kPanelColumns];
    for (int unit = first; unit < last; unit++) {
      for (int part = 0, row = 0; part < parts; part++) {
        const int count = rows / parts + (part < rows % parts ? 1 : 0);
        for (int p = 0; p < panels_per_unit; p++) {
          const int panel = unit * panels_per_unit + p;
          float* out = tile + p * count * kPanelColumns;
          kind.tiles[count - 1](linear.panels + panel * bytes, x, row, {part, parts}, out);
          const int column = panel * kPanelColumns;
          add_bias(linear, column, std::min(kPanelColumns, linear.outputs - column), count, out);
        }
        epilogue(unit, row, count, tile);
        row += count;
      }
    }
  });
}

// A finished tile [count][32] to its place in y [rows][outputs], less the padding's columns.
template <bool kAdd>
void put_tile(const KvrLinear& linear, int panel, int row, int count, const float* tile, float* y) {
  const int column = panel * kPanelColumns, columns = linear.outputs - column;
  float* to = y + size_t(row) * linear.outputs + column;
  for (int r = 0; r < count; r++, to += linear.outputs, tile += kPanelColumns) {
    if (columns >= kPanelColumns) {
      for (int c = 0; c < kPanelColumns; c += kLanes) {
        store(to + c, kAdd ? load(to + c) + load(tile + c) : load(tile + c));
      }
    } else {
      for (int c = 0; c < columns; c++) to[c] = kAdd ? to[c] + tile[c] : tile[c];
    }
  }
}

// activation(gate) * up of a panel's tile [count][16 gate, 16 up] to rows kPieceColumns apart.
template <int kActivation, int kDegree>
void gate_tile(const float* tile, int count, float* to) {
  for (int r = 0; r < count; r++, tile += kPanelColumns, to += kPieceColumns) {
    for (int i = 0; i < 16; i += kLanes) {
      const Floats gate = load(tile + i);
      const Floats passed = kActivation == KVR_GELU ? gelu<kDegree>(gate) : silu<kDegree>(gate);
      store(to + i, passed * load(tile + 16 + i));
    }
  }
}

}  // namespace

void linear_store(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y) {
  multiply_all(pool, linear, x, rows, 1, [&](int panel, int row, int count, const float* tile) {
    put_tile<false>(linear, panel, row, count, tile, y);
  });
}

void linear_add(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y) {
  multiply_all(pool, linear, x, rows, 1, [&](int panel, int row, int count, const float* tile) {
    put_tile<true>(linear, panel, row, count, tile, y);
  });
}

void linear_gated(Pool& pool, const KvrLinear& gate_up, int activation, const Activations& x,
                  int rows, const Activations& y) {
  // Every panel yields 16 columns; a unit of panels fills one group of y.
  const int panels = y.piece() / 16;
  const bool exact = y.kind == KVR_FLOAT32;
  const auto gate = activation == KVR_GELU
                        ? (exact ? gate_tile<KVR_GELU, 6> : gate_tile<KVR_GELU, 4>)
                        : (exact ? gate_tile<KVR_SILU, 6> : gate_tile<KVR_SILU, 4>);
  multiply_all(pool, gate_up, x, rows, panels,
               [&](int unit, int row, int count, const float* tile) {
                 alignas(64) float pieces[kMostRows][kPieceColumns];
                 for (int p = 0; p < panels; p++) {
                   gate(tile + p * count * kPanelColumns, count, pieces[0] + p * 16);
                 }
                 for (int r = 0; r < count; r++) {
                   y.write_piece(row + r, unit * y.piece(), pieces[r]);
                 }
               });
}

size_t activation_bytes(const KvrLinear& linear, int rows) {
  const Activations end = activations_at(nullptr, linear, rows);
  const size_t groups = group_of(linear.kind) == 0 ? 0 : linear.inputs / group_of(linear.kind);
  return reinterpret_cast<uintptr_t>(end.offsets) + Scratch::padded(end.rows * groups * 4);
}

Activations activations_at(uint8_t* room, const KvrLinear& linear, int rows) {
  const int group = group_of(linear.kind);
  rows = row_distance(group, rows);
  const size_t elements = size_t(rows) * linear.inputs, groups = group == 0 ? 0 : elements / group;
  const uintptr_t values = reinterpret_cast<uintptr_t>(room);
  const uintptr_t scales =
      values + Scratch::padded(elements * Activations::element_bytes(linear.kind));
  const uintptr_t offsets = scales + Scratch::padded(groups * 4);
  return {linear.kind, linear.inputs, rows, room, reinterpret_cast<float*>(scales),
          reinterpret_cast<int32_t*>(offsets)};
}

}  // namespace kvr
