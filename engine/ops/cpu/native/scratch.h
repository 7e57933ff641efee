// Memory for the length of one call: handed out by moving a pointer, given back all at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvr {

class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Forgets everything handed out and makes room for `bytes`. Throws std::bad_alloc.
  void reset(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(base_);
    size_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    base_ = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, size_));
    if (base_ == nullptr) {
      size_ = 0;
      throw std::bad_alloc();
    }
#if defined(__linux__)
    madvise(base_, size_, MADV_HUGEPAGE);
#endif
  }

  // `count` elements, 64-byte aligned, uninitialised. The sum of takes stays below reset's bytes.
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(base_ + used_);
    used_ += padded(count * sizeof(T));
    return taken;
  }
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  static constexpr size_t kHugePage = size_t(1) << 21;
  uint8_t* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace kvr
