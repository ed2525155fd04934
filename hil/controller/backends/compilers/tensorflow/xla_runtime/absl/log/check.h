// Replaces Abseil's header, because TensorFlow's wheel lacks its sources. Contains the part that XLA's runtime uses.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace hil_xla {
// Prints the reason and aborts the process. The board reports this as a worker crash.
class Fatal {
 public:
  Fatal(const char* file, int line, const char* what) { text_ << file << ":" << line << ": " << what << " "; }
  [[noreturn]] ~Fatal() {
    std::fprintf(stderr, "%s\n", text_.str().c_str());
    std::abort();
  }
  std::ostream& stream() { return text_; }

 private:
  std::ostringstream text_;
};
struct Ignore {
  template <typename T>
  Ignore& operator<<(const T&) { return *this; }
};
// Binds less tightly than <<, so that the complete message is written first.
struct Voidify {
  void operator&(std::ostream&) const {}
  void operator&(const Ignore&) const {}
};
}  // namespace hil_xla

#define HIL_CHECK(condition, what) \
  (condition) ? (void)0 : hil_xla::Voidify() & hil_xla::Fatal(__FILE__, __LINE__, "check failed: " what).stream()
#define HIL_NO_CHECK(condition) true || (condition) ? (void)0 : hil_xla::Voidify() & hil_xla::Ignore()
#ifndef CHECK
#define CHECK(condition) HIL_CHECK(condition, #condition)
#define CHECK_EQ(a, b) HIL_CHECK((a) == (b), #a " == " #b)
#define CHECK_NE(a, b) HIL_CHECK((a) != (b), #a " != " #b)
#define CHECK_LE(a, b) HIL_CHECK((a) <= (b), #a " <= " #b)
#define CHECK_LT(a, b) HIL_CHECK((a) < (b), #a " < " #b)
#define CHECK_GE(a, b) HIL_CHECK((a) >= (b), #a " >= " #b)
#define CHECK_GT(a, b) HIL_CHECK((a) > (b), #a " > " #b)
#define CHECK_OK(status) HIL_CHECK((status).ok(), #status)
#define DCHECK(condition) HIL_NO_CHECK(condition)
#define DCHECK_EQ(a, b) HIL_NO_CHECK((a) == (b))
#define DCHECK_NE(a, b) HIL_NO_CHECK((a) != (b))
#define DCHECK_LE(a, b) HIL_NO_CHECK((a) <= (b))
#define DCHECK_LT(a, b) HIL_NO_CHECK((a) < (b))
#define DCHECK_GE(a, b) HIL_NO_CHECK((a) >= (b))
#define DCHECK_GT(a, b) HIL_NO_CHECK((a) > (b))
#define DCHECK_OK(status) HIL_NO_CHECK((status).ok())
#endif
