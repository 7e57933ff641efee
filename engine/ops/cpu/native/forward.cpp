// The whole model in one call: one step of a mixed batch of prompt chunks and decode rows.
//
//   1 check    every index the caller gave, so that nothing below reads out of bounds
//   2 embed    tokens -> hidden [rows, hidden_size]
//   3 layers   for each layer, for each block of rows: norm, qkv, rotate and write KV, attention,
//              out + residual, norm, gate and up, down + residual. When the last block has written
//              its KV the layer is announced: a sender may read it while the rest is computed.
//   4 logits   of the sampled rows only
//
// Rows go in blocks so that everything between two weight matrices stays in L2; a later block sees
// the KV of earlier ones, which is all that causal attention needs.
#include <algorithm>

#include "attention.h"
#include "context.h"
#include "futex.h"
#include "linear.h"
#include "rows.h"

namespace kvr {
namespace {

constexpr int kBlockRows = 192;
constexpr int kRowGrain = 16;  // rows of an elementwise pass that are worth waking a thread for

class Forward {
 public:
  Forward(KvrContext& context, const KvrModel& model, const KvrCache& cache, const KvrStep& step)
      : context_(context), pool_(context.pool), model_(model), cache_(cache), step_(step) {
    const int rows = std::min(kBlockRows, std::max(step.num_rows, step.num_samples));
    reserve(rows);
  }

  void run() {
    if (step_.first_layer == 0) embed_tokens();
    for (int layer = step_.first_layer; layer < step_.end_layer; layer++) {
      for (int first = 0; first < step_.num_rows; first += kBlockRows) {
        run_layer(layer, first, std::min(kBlockRows, step_.num_rows - first));
      }
      if (step_.num_rows == 0) announce(layer);
    }
    if (step_.end_layer == model_.num_layers) compute_logits();
  }

 private:
  int attention_width() const { return model_.num_heads * model_.head_dim; }
  int qkv_width() const {
    return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim;
  }

  // Sizes scratch for the layer that needs most of each part.
  void reserve(int rows) {
    size_t inputs = activation_bytes(model_.head, rows), outputs = 0;
    for (int i = step_.first_layer; i < step_.end_layer; i++) {
      const KvrLayer& layer = model_.layers[i];
      for (const KvrLinear* linear : {&layer.qkv, &layer.attention_out, &layer.gate_up}) {
        inputs = std::max(inputs, activation_bytes(*linear, rows));
      }
      outputs = std::max(outputs, activation_bytes(layer.down, rows));
    }
    const size_t wide = size_t(rows) * std::max(qkv_width(), model_.hidden_size);
    const size_t queries = size_t(rows) * attention_width() * 4;
    context_.scratch.reset(Scratch::padded(inputs) + Scratch::padded(outputs) +
                           Scratch::padded(wide * 4) + Scratch::padded(queries));
    inputs_ = context_.scratch.take<uint8_t>(inputs);
    middle_ = context_.scratch.take<uint8_t>(outputs);
    wide_ = context_.scratch.take<float>(wide);
    queries_ = context_.scratch.take<uint8_t>(queries);
  }

  void embed_tokens() {
    pool_.run(step_.num_rows, kRowGrain, [&](int first, int last, int) {
      for (int row = first; row < last; row++) {
        embed(model_, step_.token_ids[row], hidden(row));
        if (model_.embedding_scale != 1.0f) {
          scale_row(model_.embedding_scale, model_.hidden_size, hidden(row));
        }
      }
    });
  }

  float* hidden(int row) const { return step_.hidden + size_t(row) * model_.hidden_size; }

  // Sequences' parts among the block's rows [first, first + rows).
  std::vector<Segment> segments_of(int first, int rows) const {
    std::vector<Segment> segments;
    int sequence_row = 0;
    for (int i = 0; i < step_.num_sequences; i++) {
      const KvrSequence& sequence = step_.sequences[i];
      const int from = std::max(sequence_row, first);
      const int to = std::min(sequence_row + sequence.num_rows, first + rows);
      if (from < to) {
        segments.push_back(
            {from - first, to - from, sequence.start + from - sequence_row, sequence.block_table});
      }
      sequence_row += sequence.num_rows;
    }
    return segments;
  }

  void run_layer(int index, int first, int rows) {
    const KvrLayer& layer = model_.layers[index];
    float* x = hidden(first);
    Activations a = activations_at(inputs_, layer.qkv, rows);
    normalise(x, layer.attention_norm, rows, a);
    linear_store(pool_, layer.qkv, a, rows, wide_);

    const std::vector<Segment> segments = segments_of(first, rows);
    for (const Segment& segment : segments) {
      pool_.run(segment.num_rows, kRowGrain, [&](int from, int to, int) {
        rotate_and_write(model_, cache_, index, segment, wide_, rows, from, to, queries_);
      });
    }
    if (first + rows == step_.num_rows) announce(index);

    attend(pool_, context_.worker_scratch, model_, cache_, index, segments, queries_, rows, wide_);
    a = activations_at(inputs_, layer.attention_out, rows);
    pool_.run(rows, kRowGrain, [&](int from, int to, int) {
      for (int r = from; r < to; r++) a.write_row(r, wide_ + size_t(r) * attention_width());
    });
    add_normed(layer.attention_out, a, layer.attention_post_norm, rows, x);

    a = activations_at(inputs_, layer.gate_up, rows);
    normalise(x, layer.mlp_norm, rows, a);
    const Activations middle = activations_at(middle_, layer.down, rows);
    linear_gated(pool_, layer.gate_up, model_.activation, a, rows, middle);
    add_normed(layer.down, middle, layer.mlp_post_norm, rows, x);
  }

  // x += what the linear layer gives, normed first where there is a norm.
  void add_normed(const KvrLinear& linear, const Activations& a, const float* norm, int rows,
                  float* x) {
    if (norm == nullptr) return linear_add(pool_, linear, a, rows, x);
    linear_store(pool_, linear, a, rows, wide_);
    const int size = model_.hidden_size;
    pool_.run(rows, kRowGrain, [&](int from, int last, int) {
      for (int r = from; r < last; r++) {
        float* given = wide_ + size_t(r) * size;
        rms_norm(given, norm, size, model_.rms_norm_eps, given);
        add_row(given, size, x + size_t(r) * size);
      }
    });
  }

  void normalise(const float* x, const float* weight, int rows, const Activations& to) {
    const int size = model_.hidden_size;
    pool_.run(rows, kRowGrain, [&](int from, int last, int) {
      std::vector<float> normed(size);
      for (int r = from; r < last; r++) {
        rms_norm(x + size_t(r) * size, weight, size, model_.rms_norm_eps, normed.data());
        to.write_row(r, normed.data());
      }
    });
  }

  void announce(int layer) const {
    if (step_.layers_written == nullptr) return;
    auto* written = reinterpret_cast<std::atomic<int32_t>*>(step_.layers_written);
    written->store(layer + 1, std::memory_order_release);
    wake_all(*written);
  }

  void compute_logits() {
    const int size = model_.hidden_size;
    for (int first = 0; first < step_.num_samples; first += kBlockRows) {
      const int rows = std::min(kBlockRows, step_.num_samples - first);
      const Activations a = activations_at(inputs_, model_.head, rows);
      std::vector<float> normed(size);
      for (int r = 0; r < rows; r++) {
        rms_norm(hidden(step_.sample_rows[first + r]), model_.final_norm, size,
                 model_.rms_norm_eps, normed.data());
        a.write_row(r, normed.data());
      }
      float* logits = step_.logits + size_t(first) * model_.vocab_size;
      linear_store(pool_, model_.head, a, rows, logits);
      if (model_.logits_soft_cap > 0) {
        pool_.run(rows, 1, [&](int from, int last, int) {
          for (int r = from; r < last; r++) {
            cap_row(model_.logits_soft_cap, model_.vocab_size,
                    logits + size_t(r) * model_.vocab_size);
          }
        });
      }
    }
  }

  KvrContext& context_;
  Pool& pool_;
  const KvrModel& model_;
  const KvrCache& cache_;
  const KvrStep& step_;
  uint8_t* inputs_ = nullptr;   // of qkv, attention out, gate and up, head
  uint8_t* middle_ = nullptr;   // of down
  float* wide_ = nullptr;       // qkv, then attention's output, then what a post norm norms
  uint8_t* queries_ = nullptr;
};

int32_t check_sequences(const KvrModel& model, const KvrCache& cache, const KvrStep& step) {
  int rows = 0;
  for (int i = 0; i < step.num_sequences; i++) {
    const KvrSequence& sequence = step.sequences[i];
    if (sequence.num_rows < 1) return KVR_BAD_SEQUENCES;
    rows += sequence.num_rows;
    const int end = sequence.start + sequence.num_rows;
    if (sequence.start < 0 || end > model.max_positions) return KVR_BAD_POSITION;
    for (int block = 0; block * cache.block_size < end; block++) {
      const int id = sequence.block_table[block];
      if (id < 0 || id >= cache.num_blocks) return KVR_BAD_BLOCK;
    }
  }
  return rows == step.num_rows ? KVR_OK : KVR_BAD_SEQUENCES;
}

int32_t check(const KvrModel& model, const KvrCache& cache, const KvrStep& step) {
  if (step.first_layer < 0 || step.first_layer > step.end_layer ||
      step.end_layer > model.num_layers) {
    return KVR_BAD_LAYERS;
  }
  for (int row = 0; row < step.num_rows; row++) {
    if (step.token_ids[row] < 0 || step.token_ids[row] >= model.vocab_size) return KVR_BAD_TOKEN;
  }
  for (int i = 0; i < step.num_samples; i++) {
    if (step.sample_rows[i] < 0 || step.sample_rows[i] >= step.num_rows) return KVR_BAD_SEQUENCES;
  }
  return check_sequences(model, cache, step);
}

}  // namespace
}  // namespace kvr

int32_t kvr_forward(KvrContext* context, const KvrModel* model, const KvrCache* cache,
                    const KvrStep* step) {
  const int32_t status = kvr::check(*model, *cache, *step);
  if (status != KVR_OK) return status;
  try {
    kvr::Forward(*context, *model, *cache, *step).run();
  } catch (const std::bad_alloc&) {
    return KVR_NO_MEMORY;
  }
  return KVR_OK;
}
