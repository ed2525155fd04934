// The few Abseil functions that XLA's runtime calls. TensorFlow's wheel declares them but does not contain their sources.
#include <sched.h>

#include "absl/status/internal/status_internal.h"
#include "absl/synchronization/mutex.h"

namespace absl {
ABSL_NAMESPACE_BEGIN

// A program runs on one thread, so waits are always short.
void Mutex::lock() {
  intptr_t free = 0;
  while (!mu_.compare_exchange_weak(free, 1, std::memory_order_acquire)) {
    free = 0;
    sched_yield();
  }
}

void Mutex::unlock() { mu_.store(0, std::memory_order_release); }

namespace status_internal {
// Only errors have a StatusRep, and the process ends after an error.
void StatusRep::Unref() const {}
}  // namespace status_internal

ABSL_NAMESPACE_END
}  // namespace absl
