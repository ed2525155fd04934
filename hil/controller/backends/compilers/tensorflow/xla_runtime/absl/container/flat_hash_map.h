// Replaces Abseil's header, because TensorFlow's wheel lacks its sources. Contains the part that XLA's runtime uses.
#pragma once

#include <unordered_map>

#include "absl/base/config.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
template <typename Key, typename Value, typename... Rest>
using flat_hash_map = std::unordered_map<Key, Value>;
ABSL_NAMESPACE_END
}  // namespace absl
