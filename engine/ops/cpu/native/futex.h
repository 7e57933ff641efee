// Sleeping until a 32-bit word changes; by polling where the system has no futex.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <chrono>
#include <thread>
#endif

namespace kvr {

// Returns when *word != seen, after timeout_us (negative: never), or spuriously.
inline void wait_while(const std::atomic<int32_t>& word, int32_t seen, int64_t timeout_us) {
#if defined(__linux__)
  timespec limit{time_t(timeout_us / 1000000), long(timeout_us % 1000000) * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, timeout_us < 0 ? nullptr : &limit, nullptr, 0);
#else
  if (word.load() == seen) {
    const int64_t nap_us = timeout_us < 0 || timeout_us > 50 ? 50 : timeout_us;
    std::this_thread::sleep_for(std::chrono::microseconds(nap_us));
  }
#endif
}

inline void wake_all(const std::atomic<int32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace kvr
