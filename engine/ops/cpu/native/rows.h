// What is done to one row at a time: embedding lookup and RMS norm.
#pragma once

#include "abi.h"

namespace kvr {

// y = x / sqrt(mean(x^2) + eps) * weight; size is a multiple of 32. y may be x.
void rms_norm(const float* x, const float* weight, int size, float eps, float* y);

// The embedding of one token, as float32.
void embed(const KvrModel& model, int token_id, float* y);

}  // namespace kvr
