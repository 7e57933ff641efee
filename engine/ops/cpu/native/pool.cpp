#include "pool.h"

#include <chrono>

#include "futex.h"

namespace kvr {
namespace {

// Loops of a decode step follow each other within some 10 us; sleeping between them would cost
// more than they take. Past this a thread leaves the core to others.
constexpr auto kSpin = std::chrono::microseconds(30);

// Spins while ready() is false, for at most kSpin.
template <class Ready>
bool spin_until(const Ready& ready) {
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  return ready();
}

}  // namespace

Pool::Pool(int threads) {
  for (int worker = 1; worker < threads; worker++) {
    workers_.emplace_back([this, worker] { work(worker); });
  }
}

Pool::~Pool() {
  stop_.store(true);
  generation_.fetch_add(1);
  wake_all(generation_);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::share(int count, int grain, const void* context, Call call) {
  context_ = context;
  call_ = call;
  count_ = count;
  grain_ = grain;
  next_.store(0);
  int32_t generation = generation_.load() + 1;
  if (generation == 0) generation = 1;  // 0 means closed
  open_.store(generation);
  generation_.store(generation);
  if (sleepers_.load() > 0) wake_all(generation_);
  claim_until_empty(0);
  // Closing first and counting second, against workers that enter first and look second: one of
  // the two always sees the other.
  open_.store(0);
  const auto empty = [this] { return inside_.load() == 0; };
  while (!spin_until(empty)) {
    caller_sleeps_.store(true);
    const int32_t inside = inside_.load();
    if (inside != 0) wait_while(inside_, inside, 1000);
    caller_sleeps_.store(false);
  }
}

void Pool::claim_until_empty(int worker) {
  for (;;) {
    const int first = next_.fetch_add(grain_);
    if (first >= count_) return;
    call_(context_, first, first + grain_ < count_ ? first + grain_ : count_, worker);
  }
}

void Pool::work(int worker) {
  int32_t seen = 0;
  while (!stop_.load()) {
    const auto changed = [&] { return generation_.load() != seen; };
    if (!spin_until(changed)) {
      sleepers_.fetch_add(1);
      wait_while(generation_, seen, -1);
      sleepers_.fetch_sub(1);
      continue;
    }
    seen = generation_.load();
    inside_.fetch_add(1);
    if (open_.load() == seen) claim_until_empty(worker);
    if (inside_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake_all(inside_);
  }
}

}  // namespace kvr
