// A few threads that share a loop's iterations, without spinning for long.
//
// Iterations are claimed one by one and the caller claims too, so a thread that the system does
// not run costs nothing but its help: the loop ends when all claimed iterations are done, not when
// all threads arrived. Which thread ran what never changes a result.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvr {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // body(first, last, worker) over [0, count) in runs of `grain`; returns when all are done.
  // worker is below threads(): an index of scratch that nobody else uses meanwhile.
  template <class Body>
  void run(int count, int grain, const Body& body) {
    if (workers_.empty() || count <= grain) {
      if (count > 0) body(0, count, 0);
      return;
    }
    share(count, grain, &body, [](const void* context, int first, int last, int worker) {
      (*static_cast<const Body*>(context))(first, last, worker);
    });
  }

 private:
  using Call = void (*)(const void* context, int first, int last, int worker);

  void share(int count, int grain, const void* context, Call call);
  void work(int worker);
  void claim_until_empty(int worker);

  std::vector<std::thread> workers_;
  // The loop being shared; written only while it is closed and nobody is inside.
  const void* context_ = nullptr;
  Call call_ = nullptr;
  int count_ = 0, grain_ = 1;
  std::atomic<int> next_{0};
  std::atomic<int32_t> inside_{0};      // workers that may be reading the loop
  std::atomic<int32_t> open_{0};        // its generation while open, else 0
  std::atomic<int32_t> generation_{0};  // rises with every loop; workers sleep on it
  std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace kvr
