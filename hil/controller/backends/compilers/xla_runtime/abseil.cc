// The few functions of Abseil that XLA's runtime calls and that TensorFlow's wheel declares, but brings no sources of.
#include <sched.h>

#include "absl/status/internal/status_internal.h"
#include "absl/synchronization/mutex.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

// A program runs on one thread, so that nobody ever waits long.
void Mutex::lock() {
  intptr_t free = 0;
  while (!mu_.compare_exchange_weak(free, 1, std::memory_order_acquire)) {
    free = 0;
    sched_yield();
  }
}

void Mutex::unlock() { mu_.store(0, std::memory_order_release); }

namespace status_internal {
// Only errors have one, and the process does not outlive them.
void StatusRep::Unref() const {}
}  // namespace status_internal

ABSL_NAMESPACE_END
}  // namespace absl
