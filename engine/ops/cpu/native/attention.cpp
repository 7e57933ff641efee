#include "attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "attention_tile.h"
#include "matrix_tiles.h"

namespace kvr {
namespace {

// Rows of one task: a head's chunk of keys and values stays in L2 while these pass it.
constexpr int kTaskRows = 96;

// Some rows of one sequence against some of its KV heads; tasks are independent.
struct Task {
  Segment rows;
  int first_head, end_head;
};

// Decode rows take all heads at once, since a page's heads are neighbours in memory; prompts are
// cut by head and by rows.
std::vector<Task> cut_into_tasks(const KvrModel& model, const std::vector<Segment>& segments,
                                 int threads) {
  std::vector<Task> tasks;
  const int group = model.num_heads / model.num_kv_heads;
  const int tokens = std::max(1, kTaskRows / group);
  const bool by_head = int(segments.size()) < 2 * threads && threads > 1;
  for (const Segment& segment : segments) {
    if (segment.num_rows == 1 && !by_head) {
      tasks.push_back({segment, 0, model.num_kv_heads});
      continue;
    }
    for (int head = 0; head < model.num_kv_heads; head++) {
      for (int from = 0; from < segment.num_rows; from += tokens) {
        Segment part = segment;
        part.first_row += from;
        part.start += from;
        part.num_rows = std::min(tokens, segment.num_rows - from);
        tasks.push_back({part, head, head + 1});
      }
    }
  }
  return tasks;
}

using AttendTile = void (*)(const Chunk&, const int32_t*, const int*, const RowStates&, float*);

#if defined(KVR_AMX)
constexpr int kMostRows = kMatrixRows;
#else
constexpr int kMostRows = kTileRows;
#endif

// tiles[r] is the tile of r + 1 rows.
struct AttendTiles {
  const AttendTile* tiles;
  int most_rows;
};

template <class Dot, size_t... r>
AttendTiles attend_tiles(std::index_sequence<r...>) {
  static constexpr AttendTile tiles[] = {attend_tile<Dot, int(r) + 1>...};
  return {tiles, sizeof...(r)};
}

#if defined(KVR_AMX)
template <class Dot, size_t... r>
AttendTiles attend_matrix_tiles(std::index_sequence<r...>) {
  static constexpr AttendTile tiles[] = {attend_matrix_tile<Dot, int(r) + 1>...};
  return {tiles, sizeof...(r)};
}
#endif

template <class Dot>
AttendTiles attend_tiles_of(int head_dim) {
#if defined(KVR_AMX)
  if constexpr (Dot::kPerLane == 2) {
    if (head_dim % kMatrixInputs == 0) {
      return attend_matrix_tiles<Dot>(std::make_index_sequence<kMatrixRows>());
    }
  }
#endif
  (void)head_dim;
  return attend_tiles<Dot>(std::make_index_sequence<kTileRows>());
}

// Scales of a chunk's tokens, where KV is int8.
struct ChunkScales {
  alignas(64) float keys[kChunkTokens];
  alignas(64) float values[kChunkTokens];
};

// Where attention reads the pages of one head: in place for bfloat16, else from `room`.
class PageReader {
 public:
  // Lanes of a page's keys, and as many of its values.
  template <class Dot>
  static size_t page_lanes(int head_dim) {
    return size_t(kPageTokens) * head_dim / Dot::kPerLane;
  }

  PageReader(const KvView& kv, const int32_t* block_table, int end, int32_t* room,
             ChunkScales* scales)
      : kv_(kv), block_table_(block_table), end_(end), room_(room), scales_(scales) {}

  // keys[i] and values[i]: the page of `position`, ready to multiply. Values of tokens from the
  // end on are zeroed in a copy: they are masked, but what lies there may be NaN.
  void read(Bfloat16Dot, int position, int head, int, const int32_t** keys,
            const int32_t** values) const {
    peek(Bfloat16Dot(), position, head, keys, values);
    const int valid = end_ - position, dim = kv_.head_dim;
    if (valid >= kPageTokens) return;
    int32_t* copy = room_;
    std::memcpy(copy, *values, size_t((valid + 1) / 2) * dim * 4);
    if (valid % 2 == 1) {
      for (int d = 0; d < dim; d++) copy[valid / 2 * dim + d] &= 0xffff;
    }
    std::memset(copy + (valid + 1) / 2 * dim, 0, size_t(kPageTokens / 2 - (valid + 1) / 2) * dim * 4);
    *values = copy;
  }
  void read(Int8Dot, int position, int head, int slot, const int32_t** keys,
            const int32_t** values) const {
    const int valid = std::min(kPageTokens, end_ - position), dim = kv_.head_dim;
    const int8_t* page = kv_.keys_int8(block_table_, position, head);
    const bool is_last = position + kPageTokens >= end_;
    const int8_t* next = is_last ? page : kv_.keys_int8(block_table_, position + kPageTokens, head);
    uint16_t* to = reinterpret_cast<uint16_t*>(room_) + size_t(slot) * 2 * kPageTokens * dim;
    for (int i = 0; i < 2 * kPageTokens * dim; i += 32) {
      __builtin_prefetch(next + i);
      widen_bytes(page + i, to + i);
    }
    const uint16_t* scales = kv_.scales(block_table_, position, head);
    float* key_scales = scales_->keys + slot * kPageTokens;
    float* value_scales = scales_->values + slot * kPageTokens;
    for (int t = 0; t < kPageTokens; t += kLanes) {
      // What lies after the last token may be anything: it is masked, and must weigh 0, not NaN.
      store(key_scales + t, first_lanes(valid - t, load_f16(scales + t), zeros()));
      store(value_scales + t,
            first_lanes(valid - t, load_f16(scales + kPageTokens + t), zeros()));
    }
    *keys = reinterpret_cast<const int32_t*>(to);
    *values = reinterpret_cast<const int32_t*>(to + size_t(kPageTokens) * dim);
  }
  void read(Float32Dot, int position, int head, int slot, const int32_t** keys,
            const int32_t** values) const {
    const int valid = std::min(kPageTokens, end_ - position), dim = kv_.head_dim;
    float* to = reinterpret_cast<float*>(room_) + size_t(slot) * 2 * kPageTokens * dim;
    float* value_to = to + size_t(kPageTokens) * dim;
    std::memset(to, 0, size_t(2) * kPageTokens * dim * 4);
    for (int t = 0; t < valid; t++) {
      const float* row = kv_.key_row(block_table_, position + t, head);
      for (int d = 0; d < dim; d++) to[d * kPageTokens + t] = row[d];
      std::memcpy(value_to + t * dim, row + kv_.value_distance(), dim * sizeof(float));
    }
    *keys = reinterpret_cast<const int32_t*>(to);
    *values = reinterpret_cast<const int32_t*>(value_to);
  }

  // As read, but only where the bytes are: for prefetching.
  void peek(Bfloat16Dot, int position, int head, const int32_t** keys,
            const int32_t** values) const {
    const uint16_t* page = kv_.keys_dot16(block_table_, position, head);
    *keys = reinterpret_cast<const int32_t*>(page);
    *values = reinterpret_cast<const int32_t*>(page + kv_.page_elements());
  }

 private:
  const KvView& kv_;
  const int32_t* block_table_;
  int end_;
  int32_t* room_;
  ChunkScales* scales_;
};

template <class Dot>
void read_chunk(const PageReader& reader, int first, int end, int head, Chunk* chunk) {
  chunk->first_position = first;
  chunk->pages = std::min(kChunkPages, (end - first + kPageTokens - 1) / kPageTokens);
  for (int i = 0; i < chunk->pages; i++) {
    reader.read(Dot(), first + i * kPageTokens, head, i, &chunk->keys[i], &chunk->values[i]);
  }
}

// Points the chunk's prefetches at the pages that are read after it: the next head's, or the first
// head's of the next chunk. Without one, at its own.
void look_ahead(Bfloat16Dot, const PageReader& reader, int end, int next_first, int next_head,
                Chunk* chunk) {
  for (int i = 0; i < chunk->pages; i++) {
    const int position = next_first + i * kPageTokens;
    if (position < end) {
      reader.peek(Bfloat16Dot(), position, next_head, &chunk->next_keys[i],
                  &chunk->next_values[i]);
    } else {
      chunk->next_keys[i] = chunk->keys[i];
      chunk->next_values[i] = chunk->values[i];
    }
  }
}
// Pages that are copied anyway: they are fetched when they are read.
void look_ahead(Int8Dot, const PageReader&, int, int, int, Chunk* chunk) {
  std::copy(chunk->keys, chunk->keys + chunk->pages, chunk->next_keys);
  std::copy(chunk->values, chunk->values + chunk->pages, chunk->next_values);
}
void look_ahead(Float32Dot, const PageReader&, int, int, int, Chunk* chunk) {
  std::copy(chunk->keys, chunk->keys + chunk->pages, chunk->next_keys);
  std::copy(chunk->values, chunk->values + chunk->pages, chunk->next_values);
}

template <class Dot>
class Attention {
 public:
  Attention(const KvrModel& model, int window, const KvView& kv, const uint8_t* queries, int rows,
            float* out)
      : model_(model),
        window_(window),
        kv_(kv),
        queries_(reinterpret_cast<const int32_t*>(queries)),
        rows_(rows),
        group_(model.num_heads / model.num_kv_heads),
        tiles_(attend_tiles_of<Dot>(model.head_dim)),
        out_(out) {}

  static size_t scratch_bytes(const KvrModel& model) {
    const size_t rows = std::max(state_rows(model), size_t(kMostRows));
    return Scratch::padded(rows * model.head_dim * 4) + 3 * Scratch::padded(rows * 4) +
           Scratch::padded(kMostRows * kScoreStride * 4) +
           Scratch::padded(kChunkPages * 2 * PageReader::page_lanes<Dot>(model.head_dim) * 4);
  }

  void run(const Task& task, Scratch& scratch) const {
    scratch.reset(scratch_bytes(model_));
    const size_t capacity = std::max(state_rows(model_), size_t(kMostRows));
    RowStates states{scratch.take<float>(capacity), scratch.take<float>(capacity),
                     scratch.take<float>(capacity * model_.head_dim)};
    int* visible_until = scratch.take<int>(capacity);
    float* scores = scratch.take<float>(kMostRows * kScoreStride);
    int32_t* room = scratch.take<int32_t>(kChunkPages * 2 *
                                          PageReader::page_lanes<Dot>(model_.head_dim));
    const int rows = task.rows.num_rows * group_, heads = task.end_head - task.first_head;
    const int end = task.rows.start + task.rows.num_rows;
    std::fill_n(states.peaks, rows * heads, kMasked);
    std::fill_n(states.sums, rows * heads, 0.0f);
    std::fill_n(states.outputs, size_t(rows) * heads * model_.head_dim, 0.0f);
    for (int r = 0; r < rows; r++) visible_until[r] = task.rows.start + r / group_ + 1;

    ChunkScales scales;
    const PageReader reader(kv_, task.rows.block_table, end, room, &scales);
    // Chunks that no row of the task sees through its window are not read.
    const int seen_from = window_ > 0 ? std::max(0, visible_until[0] - window_) : 0;
    for (int first = seen_from / kChunkTokens * kChunkTokens; first < end; first += kChunkTokens) {
      for (int head = task.first_head; head < task.end_head; head++) {
        Chunk chunk;
        chunk.head_dim = model_.head_dim;
        chunk.window = window_;
        chunk.soft_cap = 1.44269504f * model_.attention_soft_cap;
        chunk.key_scales = scales.keys;
        chunk.value_scales = scales.values;
        if (std::is_same<Dot, Int8Dot>::value) std::memset(&scales, 0, sizeof scales);
        read_chunk<Dot>(reader, first, end, head, &chunk);
        const bool last_head = head + 1 == task.end_head;
        look_ahead(Dot(), reader, end, last_head ? first + kChunkTokens : first,
                   last_head ? task.first_head : head + 1, &chunk);
        const int at = (head - task.first_head) * rows;
        attend_chunk(task, chunk, head, rows, visible_until,
                     {states.peaks + at, states.sums + at,
                      states.outputs + size_t(at) * model_.head_dim},
                     scores);
      }
    }
    write_out(task, rows, states);
  }

 private:
  static size_t state_rows(const KvrModel& model) {
    return size_t(std::max(model.num_heads, std::max(kTaskRows, model.num_heads /
                                                                    model.num_kv_heads)));
  }

  void attend_chunk(const Task& task, const Chunk& chunk, int head, int rows,
                    const int* visible_until, const RowStates& states, float* scores) const {
    const int lanes = model_.head_dim / Dot::kPerLane;
    const int32_t* queries =
        queries_ + (size_t(head) * rows_ + task.rows.first_row) * group_ * lanes;
    const int parts = (rows + tiles_.most_rows - 1) / tiles_.most_rows;
    for (int part = 0, row = 0; part < parts; part++) {
      const int count = rows / parts + (part < rows % parts ? 1 : 0);
      // Later rows see further, and their windows begin later.
      const bool is_reached = visible_until[row + count - 1] > chunk.first_position;
      const bool is_left = window_ > 0 && visible_until[row] - window_ >=
                                              chunk.first_position + chunk.pages * kPageTokens;
      if (is_reached && !is_left) {
        tiles_.tiles[count - 1](chunk, queries + size_t(row) * lanes, visible_until + row,
                         {states.peaks + row, states.sums + row,
                          states.outputs + size_t(row) * model_.head_dim},
                         scores);
      }
      row += count;
    }
  }

  void write_out(const Task& task, int rows, const RowStates& states) const {
    const int dim = model_.head_dim;
    for (int head = task.first_head; head < task.end_head; head++) {
      for (int r = 0; r < rows; r++) {
        const size_t at = size_t(head - task.first_head) * rows + r;
        const size_t row = size_t(task.rows.first_row) + r / group_;
        float* to = out_ + (row * model_.num_heads + head * group_ + r % group_) * dim;
        const Floats inverse = splat(1.0f / states.sums[at]);
        for (int d = 0; d < dim; d += kLanes) {
          store(to + d, load(states.outputs + at * dim + d) * inverse);
        }
      }
    }
  }

  const KvrModel& model_;
  int window_;
  const KvView& kv_;
  const int32_t* queries_;
  int rows_, group_;
  AttendTiles tiles_;
  float* out_;
};

template <class Dot>
void attend_with(Pool& pool, std::vector<Scratch>& worker_scratch, const KvrModel& model,
                 int window, const KvView& kv, const std::vector<Task>& tasks,
                 const uint8_t* queries, int rows, float* out) {
  const Attention<Dot> attention(model, window, kv, queries, rows, out);
  pool.run(int(tasks.size()), 1, [&](int first, int last, int worker) {
    const MatrixScope scope;
    for (int i = first; i < last; i++) attention.run(tasks[i], worker_scratch[worker]);
  });
}

}  // namespace

void attend(Pool& pool, std::vector<Scratch>& worker_scratch, const KvrModel& model,
            const KvrCache& cache, int layer, const std::vector<Segment>& segments,
            const uint8_t* queries, int rows, float* out) {
  const KvView kv(model, cache, layer);
  const int window = model.layers[layer].window;
  const std::vector<Task> tasks = cut_into_tasks(model, segments, pool.threads());
  const auto attend_kind = cache.kind == KVR_FLOAT32 ? attend_with<Float32Dot>
                           : cache.kind == KVR_INT8  ? attend_with<Int8Dot>
                                                     : attend_with<Bfloat16Dot>;
  attend_kind(pool, worker_scratch, model, window, kv, tasks, queries, rows, out);
}

}  // namespace kvr
