// What a step computes with: threads and scratch, kept from step to step.
#pragma once

#include "pool.h"
#include "scratch.h"

struct KvrContext {
  explicit KvrContext(int threads) : pool(threads), worker_scratch(pool.threads()) {}

  kvr::Pool pool;
  kvr::Scratch scratch;
  std::vector<kvr::Scratch> worker_scratch;
};
