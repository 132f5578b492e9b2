// Statuses and their words. A function that fails returns fail(status, ...): the words belong to
// the calling thread and stay until its next failure. Failures that another thread must hear of
// (a lost peer, a batch) travel as Failure values.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

extern "C" {
#include "abi/constants.h"
}

namespace mc {

[[gnu::format(printf, 2, 3)]] int32_t fail(int32_t status, const char* format, ...);
[[gnu::format(printf, 2, 3)]] int32_t fail_errno(int32_t status, const char* format, ...);
const char* last_error();
std::string errno_text(int error);

struct Failure {
  int32_t status = MC_OK;
  std::string reason;

  // Make it the calling thread's last error; returns the status.
  int32_t raise() const { return status == MC_OK ? MC_OK : fail(status, "%s", reason.c_str()); }
  static Failure last(int32_t status) { return {status, last_error()}; }
};

}  // namespace mc
