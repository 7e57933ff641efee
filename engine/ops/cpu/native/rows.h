// What is done to one row at a time: embedding lookup, RMS norm, sums, scales and soft caps.
#pragma once

#include "abi.h"

namespace kvr {

// y = x / sqrt(mean(x^2) + eps) * weight; size is a multiple of 32. y may be x.
void rms_norm(const float* x, const float* weight, int size, float eps, float* y);

// The embedding of one token, as float32.
void embed(const KvrModel& model, int token_id, float* y);

// y += x; y *= factor: size is a multiple of 32. y = cap * tanh(y / cap): any size.
void add_row(const float* x, int size, float* y);
void scale_row(float factor, int size, float* y);
void cap_row(float cap, int size, float* y);

}  // namespace kvr
