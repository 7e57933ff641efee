// Linear layers over activations: y = x W^T, and what happens to y while it is still in registers.
#pragma once

#include "activations.h"
#include "pool.h"
#include "scratch.h"

namespace kvr {

// y [rows, outputs] = x W^T + bias.
void linear_store(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y);

// y [rows, outputs] += x W^T + bias: the residual connection.
void linear_add(Pool& pool, const KvrLinear& linear, const Activations& x, int rows, float* y);

// y = activation(gate) * up as the input of the next layer; y.inputs = outputs / 2.
void linear_gated(Pool& pool, const KvrLinear& gate_up, int activation, const Activations& x,
                  int rows, const Activations& y);

// Room for `rows` rows of a layer's input, and the input laid out in such room.
size_t activation_bytes(const KvrLinear& linear, int rows);
Activations activations_at(uint8_t* room, const KvrLinear& linear, int rows);

}  // namespace kvr
