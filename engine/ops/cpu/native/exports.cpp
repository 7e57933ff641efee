// The C functions other than the forward itself: contexts, waiting, and single operations.
#include <algorithm>
#include <chrono>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "context.h"
#include "futex.h"
#include "linear.h"
#include "rows.h"

using namespace kvr;

namespace {

Activations write_inputs(Pool& pool, uint8_t* room, const KvrLinear& linear, const float* x,
                         int rows) {
  const Activations a = activations_at(room, linear, rows);
  pool.run(rows, 16, [&](int first, int last, int) {
    for (int r = first; r < last; r++) a.write_row(r, x + size_t(r) * linear.inputs);
  });
  return a;
}

}  // namespace

int32_t kvr_abi_version() { return KVR_ABI_VERSION; }

const char* kvr_instruction_set() {
#if defined(KVR_AVX512)
  return "avx512";
#elif defined(KVR_AVX2)
  return "avx2";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "portable";
#endif
}

KvrContext* kvr_context_new(int32_t threads) {
#if defined(__AMX_TILE__)
  // The system keeps tile registers only for processes that ask; threads made from now on may.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return nullptr;
#endif
  try {
    return new KvrContext(threads);
  } catch (const std::exception&) {  // no memory or no more threads
    return nullptr;
  }
}

void kvr_context_free(KvrContext* context) { delete context; }

int32_t kvr_wait_layers(const int32_t* layers_written, int32_t layers, int64_t timeout_us) {
  using Clock = std::chrono::steady_clock;
  const auto& written = *reinterpret_cast<const std::atomic<int32_t>*>(layers_written);
  const auto deadline = Clock::now() + std::chrono::microseconds(timeout_us);
  for (;;) {
    const int32_t seen = written.load(std::memory_order_acquire);
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
    if (seen >= layers || left <= 0) return seen;
    wait_while(written, seen, left);
  }
}

int32_t kvr_linear(KvrContext* context, const KvrLinear* linear, const float* x, int32_t rows,
                   int32_t accumulate, float* y) {
  try {
    Scratch& scratch = context->scratch;
    const size_t bytes = activation_bytes(*linear, rows);
    scratch.reset(bytes);
    const Activations a =
        write_inputs(context->pool, scratch.take<uint8_t>(bytes), *linear, x, rows);
    (accumulate ? linear_add : linear_store)(context->pool, *linear, a, rows, y);
  } catch (const std::bad_alloc&) {
    return KVR_NO_MEMORY;
  }
  return KVR_OK;
}

int32_t kvr_gated_mlp(KvrContext* context, const KvrLinear* gate_up, const KvrLinear* down,
                      int32_t activation, const float* x, int32_t rows, float* y) {
  try {
    Scratch& scratch = context->scratch;
    const size_t in = activation_bytes(*gate_up, rows), middle = activation_bytes(*down, rows);
    scratch.reset(Scratch::padded(in) + middle);
    const Activations a =
        write_inputs(context->pool, scratch.take<uint8_t>(in), *gate_up, x, rows);
    const Activations h = activations_at(scratch.take<uint8_t>(middle), *down, rows);
    linear_gated(context->pool, *gate_up, activation, a, rows, h);
    linear_store(context->pool, *down, h, rows, y);
  } catch (const std::bad_alloc&) {
    return KVR_NO_MEMORY;
  }
  return KVR_OK;
}

void kvr_rms_norm(const float* x, const float* weight, int32_t rows, int32_t size, float eps,
                  float* y) {
  for (int r = 0; r < rows; r++) {
    rms_norm(x + size_t(r) * size, weight, size, eps, y + size_t(r) * size);
  }
}

void kvr_embed(const KvrModel* model, const int32_t* token_ids, int32_t rows, float* y) {
  for (int r = 0; r < rows; r++) embed(*model, token_ids[r], y + size_t(r) * model->hidden_size);
}

int32_t kvr_attention(KvrContext* context, const KvrModel* model, const KvrCache* cache,
                      int32_t layer, const KvrStep* step, const float* qkv, float* y) {
  try {
    const int rows = step->num_rows;
    context->scratch.reset(size_t(rows) * model->num_heads * model->head_dim * 4);
    uint8_t* queries = context->scratch.take<uint8_t>(0);
    std::vector<Segment> segments;
    for (int i = 0, row = 0; i < step->num_sequences; i++) {
      const KvrSequence& sequence = step->sequences[i];
      segments.push_back({row, sequence.num_rows, sequence.start, sequence.block_table});
      row += sequence.num_rows;
      rotate_and_write(*model, *cache, layer, segments.back(), qkv, rows, 0,
                       sequence.num_rows, queries);
    }
    attend(context->pool, context->worker_scratch, *model, *cache, layer, segments, queries, rows,
           y);
  } catch (const std::bad_alloc&) {
    return KVR_NO_MEMORY;
  }
  return KVR_OK;
}
