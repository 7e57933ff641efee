// One tile of attention: R query rows of one KV head against a chunk of pages.
//
// Online softmax (Milakov and Gimelshein 2018; FlashAttention): a row keeps its largest score, the
// sum of its exponentials and its weighted values, and rescales them when a chunk raises the
// maximum. Chunks lie at fixed positions, so a row meets the same sums in the same order however
// it was batched.
#pragma once

#include <type_traits>

#include "kv_pages.h"
#include "tiles.h"

namespace kvr {

constexpr int kChunkPages = 16;
constexpr int kChunkTokens = kChunkPages * kPageTokens;
// Softmax passes over this many scores at a time, in independent sums.
constexpr int kPassVectors = 4, kPassTokens = kPassVectors * kLanes;
// Scores may be written up to one page past a chunk's end; also keeps rows off one cache set.
constexpr int kScoreStride = kChunkTokens + 2 * kPageTokens;
constexpr float kMasked = -1e30f;

// What a tile multiplies with: pages of one head, and what to fetch meanwhile.
struct Chunk {
  const int32_t* keys[kChunkPages];
  const int32_t* values[kChunkPages];
  const int32_t* next_keys[kChunkPages];  // of the chunk that will be read after this one
  const int32_t* next_values[kChunkPages];
  int first_position;
  int window;      // positions that a row sees, its own included; 0: all
  float soft_cap;  // of scores in units of log2; 0: none
  int pages;
  int head_dim;
  // Of int8 KV: [kChunkTokens], and zeros from the last token on.
  const float* key_scales;
  const float* value_scales;
};

// Running state of query rows; pointers to the tile's first row.
struct RowStates {
  float* peaks;    // largest score so far
  float* sums;     // of 2^(score - peak)
  float* outputs;  // [rows][head_dim], not yet divided by the sum
};

// scores[R][pages * 16] = queries * keys.
template <class Dot, int R>
KVR_INLINE void score_pages(const Chunk& chunk, int pages, const int32_t* queries, float* scores) {
  constexpr int C = kTileVectors, kPerPage = kPageTokens / kLanes;
  const int steps = chunk.head_dim / Dot::kPerLane, vectors = pages * kPerPage;
  for (int v = 0; v < vectors; v += C) {
    const int32_t* b[C];
    const int32_t* next[C];
    for (int c = 0; c < C; c++) {
      // Past the last page its scores are computed again and not read.
      const int at = v + c < vectors ? v + c : vectors - 1;
      b[c] = chunk.keys[at / kPerPage] + at % kPerPage * kLanes;
      next[c] = chunk.next_keys[at / kPerPage] + at % kPerPage * kLanes;
    }
    Floats acc[R][C];
    clear(acc);
    multiply<Dot, R, C>(acc, queries, steps, b, kPageTokens, steps, next);
    KVR_UNROLL for (int r = 0; r < R; r++) {
      KVR_UNROLL for (int c = 0; c < C; c++) {
        store(scores + r * kScoreStride + (v + c) * kLanes, acc[r][c]);
      }
    }
  }
}

KVR_INLINE void store_weights(Bfloat16Dot, float* row, int at, Floats weights) {
  store_bf16(reinterpret_cast<uint16_t*>(row) + at, weights);  // in place: at or before the score
}
KVR_INLINE void store_weights(Float32Dot, float* row, int at, Floats weights) {
  store(row + at, weights);
}

// Masks the scores from `visible` on, up to the end of the last of the passes below.
KVR_INLINE void mask_scores(float* scores, int tokens, int visible) {
  const int end = (tokens + kPassTokens - 1) / kPassTokens * kPassTokens;
  for (int i = visible < 0 ? 0 : visible / kLanes * kLanes; i < end; i += kLanes) {
    store(scores + i, first_lanes(visible - i, load(scores + i), splat(kMasked)));
  }
}

// Masks the scores before `from`: those that a window has left behind.
KVR_INLINE void mask_before(float* scores, int tokens, int from) {
  for (int i = 0; i < from && i < tokens; i += kLanes) {
    store(scores + i, first_lanes(from - i, splat(kMasked), load(scores + i)));
  }
}

KVR_INLINE void cap_scores(float* scores, int tokens, float cap) {
  const Floats inverse = splat(1.0f / cap);
  for (int i = 0; i < tokens; i += kLanes) {
    store(scores + i, splat(cap) * tanh(load(scores + i) * inverse));
  }
}

// Turns a row's scores into weights 2^(score - peak), in place; of int8 KV into weights of the
// values' bytes. Positions from `visible` on weigh nothing, nor do those before the window; where
// none is left, what comes out shrinks to nothing at the row's next chunk, which holds its peak.
// Returns the factor that the row's earlier sums and outputs shrink by.
template <class Dot>
KVR_INLINE float weigh_scores(const Chunk& chunk, float* scores, int tokens, int visible,
                              float* peak, float* sum_) {
  constexpr int kDegree = Dot::kPerLane == 2 ? 4 : 6;
  constexpr bool kScaled = std::is_same<Dot, Int8Dot>::value;
  if (kScaled) {
    for (int i = 0; i < tokens; i += kLanes) {
      store(scores + i, load(scores + i) * load(chunk.key_scales + i));
    }
  }
  if (chunk.soft_cap > 0) cap_scores(scores, tokens, chunk.soft_cap);
  mask_scores(scores, tokens, visible < tokens ? visible : tokens);
  if (chunk.window > 0) mask_before(scores, tokens, visible - chunk.window);
  Floats most[kPassVectors];
  KVR_UNROLL for (int j = 0; j < kPassVectors; j++) most[j] = splat(kMasked);
  for (int i = 0; i < tokens; i += kPassTokens) {
    KVR_UNROLL for (int j = 0; j < kPassVectors; j++) {
      most[j] = maximum(most[j], load(scores + i + j * kLanes));
    }
  }
  const float chunk_peak = largest(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
  const float before = *peak, now = chunk_peak > before ? chunk_peak : before;
  const Floats now_lanes = splat(now);
  Floats total[kPassVectors];
  KVR_UNROLL for (int j = 0; j < kPassVectors; j++) total[j] = zeros();
  for (int i = 0; i < tokens; i += kPassTokens) {
    KVR_UNROLL for (int j = 0; j < kPassVectors; j++) {
      const int at = i + j * kLanes;
      const Floats weights = exp2<kDegree>(load(scores + at) - now_lanes);
      total[j] = total[j] + weights;
      store_weights(Dot(), scores, at,
                    kScaled ? weights * load(chunk.value_scales + at) : weights);
    }
  }
  const float shrink = now == before ? 1.0f : __builtin_exp2f(before - now);
  *peak = now;
  *sum_ = *sum_ * shrink + sum((total[0] + total[1]) + (total[2] + total[3]));
  return shrink;
}

// outputs[R][head_dim] = outputs * shrink + weights * values.
template <class Dot, int R>
KVR_INLINE void add_values(const Chunk& chunk, int pages, const float* weights,
                           const float* shrink, float* outputs) {
  constexpr int C = kTileVectors, kSteps = kPageTokens / Dot::kPerLane;
  const int32_t* a = reinterpret_cast<const int32_t*>(weights);
  const int vectors = chunk.head_dim / kLanes;
  for (int v = 0; v < vectors; v += C) {
    size_t at[C];
    for (int c = 0; c < C; c++) at[c] = (v + c < vectors ? v + c : v) * kLanes;
    Floats acc[R][C];
    KVR_UNROLL for (int r = 0; r < R; r++) {
      KVR_UNROLL for (int c = 0; c < C; c++) {
        acc[r][c] = load(outputs + r * chunk.head_dim + at[c]) * splat(shrink[r]);
      }
    }
    for (int page = 0; page < pages; page++) {
      const int32_t* b[C];
      const int32_t* next[C];
      for (int c = 0; c < C; c++) {
        b[c] = chunk.values[page] + at[c];
        next[c] = chunk.next_values[page] + at[c];
      }
      multiply<Dot, R, C>(acc, a + page * kSteps, kScoreStride, b, chunk.head_dim, kSteps, next);
    }
    KVR_UNROLL for (int r = 0; r < R; r++) {
      KVR_UNROLL for (int c = 0; c < C; c++) {
        if (v + c < vectors) store(outputs + r * chunk.head_dim + at[c], acc[r][c]);
      }
    }
  }
}

// Row r sees positions below visible_until[r]; at least one row sees the chunk.
template <class Dot, int R>
void attend_tile(const Chunk& chunk, const int32_t* queries, const int* visible_until,
                 const RowStates& states, float* scores) {
  const int seen = visible_until[R - 1] - chunk.first_position;  // later rows see more
  const int needed = (seen + kPageTokens - 1) / kPageTokens;
  const int pages = needed < chunk.pages ? needed : chunk.pages;
  score_pages<Dot, R>(chunk, pages, queries, scores);
  float shrink[R];
  for (int r = 0; r < R; r++) {
    shrink[r] = weigh_scores<Dot>(chunk, scores + r * kScoreStride, pages * kPageTokens,
                                  visible_until[r] - chunk.first_position, states.peaks + r,
                                  states.sums + r);
  }
  add_values<Dot, R>(chunk, pages, scores, shrink, states.outputs);
}

}  // namespace kvr
