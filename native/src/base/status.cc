#include "base/status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace mc {
namespace {

constexpr size_t kTextMax = 512;
thread_local char text[kTextMax] = "";

size_t format_into_text(const char* format, va_list arguments) {
  char fresh[kTextMax];  // the arguments may point into `text`
  const int n = vsnprintf(fresh, sizeof fresh, format, arguments);
  const size_t length = n < 0 ? 0 : std::min(static_cast<size_t>(n), kTextMax - 1);
  memcpy(text, fresh, length);
  text[length] = '\0';
  return length;
}

}  // namespace

int32_t fail(int32_t status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  format_into_text(format, arguments);
  va_end(arguments);
  return status;
}

int32_t fail_errno(int32_t status, const char* format, ...) {
  const int error = errno;
  va_list arguments;
  va_start(arguments, format);
  const size_t length = format_into_text(format, arguments);
  va_end(arguments);
  snprintf(text + length, kTextMax - length, ": %s", errno_text(error).c_str());
  return status;
}

const char* last_error() { return text; }

std::string errno_text(int error) {
  char buffer[128];
  return strerror_r(error, buffer, sizeof buffer);  // the GNU form returns the text
}

}  // namespace mc
