// Replaces Abseil's header, because TensorFlow's wheel lacks its sources. Contains the part that XLA's runtime uses.
#pragma once

#include "absl/log/check.h"

#ifndef LOG
#define LOG(severity) HIL_LOG_##severity
#define HIL_LOG_FATAL hil_xla::Fatal(__FILE__, __LINE__, "fatal:").stream()
#define HIL_LOG_QFATAL HIL_LOG_FATAL
#define HIL_LOG_ERROR hil_xla::Ignore()
#define HIL_LOG_WARNING hil_xla::Ignore()
#define HIL_LOG_INFO hil_xla::Ignore()
#define VLOG(level) hil_xla::Ignore()
#define DVLOG(level) hil_xla::Ignore()
#endif
