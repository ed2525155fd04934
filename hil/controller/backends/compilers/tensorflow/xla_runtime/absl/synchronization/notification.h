// Replaces Abseil's header, because TensorFlow's wheel lacks its sources. Contains the part that XLA's runtime uses.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/base/config.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
class Notification {
 public:
  bool HasBeenNotified() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return notified_;
  }
  void WaitForNotification() const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return notified_; });
  }
  void Notify() {
    std::lock_guard<std::mutex> lock(mutex_);
    notified_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool notified_ = false;
};
ABSL_NAMESPACE_END
}  // namespace absl
