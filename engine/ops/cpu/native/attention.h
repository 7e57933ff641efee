// Paged causal attention over mixed batches, and the rotation and KV write before it.
#pragma once

#include <vector>

#include "kv_pages.h"
#include "pool.h"
#include "scratch.h"

namespace kvr {

// Some consecutive rows of one sequence, as a block of rows of the step sees them.
struct Segment {
  int first_row;  // in the block of rows
  int num_rows;
  int start;      // position of first_row
  const int32_t* block_table;
};

// Norms and rotates queries and keys of `segment` (HF convention: pairs are d and d + head_dim / 2)
// as the layer says, writes keys and values into the cache, and leaves scaled queries in `queries`,
// whose order is [kv_heads][rows][heads per kv head][head_dim] in the type that is multiplied.
// qkv: [rows][(num_heads + 2 * num_kv_heads) * head_dim].
void rotate_and_write(const KvrModel& model, const KvrCache& cache, int layer,
                      const Segment& segment, const float* qkv, int rows, int first, int last,
                      uint8_t* queries);

// out [rows][num_heads * head_dim]: softmax(q k^T) v, scores capped where the model caps them, over
// all positions up to each row's own that the layer's window holds. The result of a row does not
// depend on the other rows of the batch.
void attend(Pool& pool, std::vector<Scratch>& worker_scratch, const KvrModel& model,
            const KvrCache& cache, int layer, const std::vector<Segment>& segments,
            const uint8_t* queries, int rows, float* out);

}  // namespace kvr
