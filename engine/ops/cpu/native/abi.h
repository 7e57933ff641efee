// The C ABI: plain structs that bindings.py mirrors field by field, and the exported functions.
//
// All pointers are the caller's and live at least as long as the call. "rows" are tokens of the
// step. Weights, KV regions and scratch are 64-byte aligned; nothing here owns memory but the
// context.
#pragma once

#include <cstdint>

#define KVR_ABI_VERSION 4

#pragma GCC visibility push(default)
extern "C" {

// How a weight matrix is stored; also fixes the form its input rows take.
enum KvrKind : int32_t {
  KVR_FLOAT32 = 0,
  KVR_BFLOAT16 = 1,
  KVR_INT8 = 2,  // groups of 64 with a float32 scale
  KVR_Q8_0 = 3,  // GGUF's groups of 32
  KVR_Q4_0 = 4,
  KVR_Q4_1 = 5,
};

// What the gate of an MLP passes through.
enum KvrActivation : int32_t {
  KVR_SILU = 0,
  KVR_GELU = 1,  // its tanh form
};

enum KvrStatus : int32_t {
  KVR_OK = 0,
  KVR_BAD_TOKEN = 1,      // a token id outside the vocabulary
  KVR_BAD_POSITION = 2,   // a position outside the rope table
  KVR_BAD_BLOCK = 3,      // a block id outside the cache
  KVR_BAD_SEQUENCES = 4,  // sequences do not cover the rows in order
  KVR_BAD_LAYERS = 5,     // the layer range is outside the model
  KVR_NO_MEMORY = 6,
};

// y = x W^T + bias, W [outputs, inputs] packed in panels of 32 outputs (panels.h).
struct KvrLinear {
  const uint8_t* panels;
  const float* bias;  // [outputs] or null
  int32_t outputs;
  int32_t inputs;
  int32_t kind;
  int32_t reserved;
};

struct KvrLayer {
  KvrLinear qkv;      // query heads, key heads, value heads
  KvrLinear attention_out;
  KvrLinear gate_up;  // 16 gate columns and their 16 up columns in every panel
  KvrLinear down;
  const float* attention_norm;
  const float* mlp_norm;
  const float* query_norm;  // [head_dim] of every query head before it is rotated, or null
  const float* key_norm;    // likewise; both or neither
  const float* attention_post_norm;  // of what attention gives, before it is added, or null
  const float* mlp_post_norm;        // likewise
  const float* cosines;  // [max_positions, head_dim / 2]
  const float* sines;
  int32_t window;        // positions that a row sees, its own included; 0: all
  int32_t reserved;
};

struct KvrModel {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t max_positions;     // rows of the layers' rope tables
  const KvrLayer* layers;
  KvrLinear head;
  const float* final_norm;
  const uint8_t* embedding;  // [vocab_size] rows of embedding_kind
  int32_t embedding_kind;    // KVR_FLOAT32, KVR_BFLOAT16 or KVR_Q8_0 (GGUF blocks)
  float rms_norm_eps;
  float embedding_scale;     // multiplies embeddings
  float attention_scale;     // multiplies scores
  float attention_soft_cap;  // scaled scores s become cap * tanh(s / cap); 0: they stay
  float logits_soft_cap;     // likewise
  int32_t activation;
};

// One buffer a layer, [num_blocks, region_bytes]; the order inside a region is in kv_pages.h.
struct KvrCache {
  uint8_t* const* layers;
  int64_t region_bytes;
  int32_t num_blocks;
  int32_t block_size;  // a multiple of 16
  int32_t kind;        // KVR_FLOAT32 (rows), KVR_BFLOAT16 or KVR_INT8 (dot16)
  int32_t reserved;
};

struct KvrSequence {
  int32_t num_rows;
  int32_t start;                // position of its first row; everything before is in the cache
  const int32_t* block_table;   // blocks of positions 0 .. start + num_rows - 1
};

struct KvrStep {
  const int32_t* token_ids;     // [num_rows]
  const KvrSequence* sequences; // their rows follow each other in this order
  const int32_t* sample_rows;   // [num_samples] rows whose logits are wanted
  float* logits;                // [num_samples, vocab_size]
  float* hidden;                // [num_rows, hidden_size]; carries a step cut between layers
  int32_t* layers_written;      // or null: set to i + 1 when layer i's KV of all rows is written
  int32_t num_rows;
  int32_t num_sequences;
  int32_t num_samples;
  int32_t first_layer;          // 0 embeds the tokens first
  int32_t end_layer;            // num_layers computes the logits last
  int32_t reserved;
};

struct KvrContext;  // threads and scratch; used by one step at a time

int32_t kvr_abi_version();
const char* kvr_instruction_set();
KvrContext* kvr_context_new(int32_t threads);
void kvr_context_free(KvrContext* context);

int32_t kvr_forward(KvrContext* context, const KvrModel* model, const KvrCache* cache,
                    const KvrStep* step);

// Blocks until *layers_written >= layers or timeout_us passed; returns the value seen last.
int32_t kvr_wait_layers(const int32_t* layers_written, int32_t layers, int64_t timeout_us);

// The parts of a forward by themselves: for tests against their oracles, and for measuring.
int32_t kvr_linear(KvrContext* context, const KvrLinear* linear, const float* x, int32_t rows,
                   int32_t accumulate, float* y);
int32_t kvr_gated_mlp(KvrContext* context, const KvrLinear* gate_up, const KvrLinear* down,
                      int32_t activation, const float* x, int32_t rows, float* y);
void kvr_rms_norm(const float* x, const float* weight, int32_t rows, int32_t size, float eps,
                  float* y);
void kvr_embed(const KvrModel* model, const int32_t* token_ids, int32_t rows, float* y);
// qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim] before rope; y [rows, heads * head_dim].
int32_t kvr_attention(KvrContext* context, const KvrModel* model, const KvrCache* cache,
                      int32_t layer, const KvrStep* step, const float* qkv, float* y);

}  // extern "C"
#pragma GCC visibility pop
