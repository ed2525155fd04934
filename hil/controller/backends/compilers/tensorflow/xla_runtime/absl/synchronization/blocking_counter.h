// Replaces Abseil's header, because TensorFlow's wheel lacks its sources. Contains the part that XLA's runtime uses.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/base/config.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
class BlockingCounter {
 public:
  explicit BlockingCounter(int count) : count_(count) {}
  bool DecrementCount() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ > 0) return false;
    changed_.notify_all();
    return true;
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_;
};
ABSL_NAMESPACE_END
}  // namespace absl
