// Where no more threads can be had, a segment is touched in advance by the one that opens it.
#include <pthread.h>

#include <cerrno>
#include <cstdint>
#include <thread>

#include "base/abi.h"
#include "check.h"

// The sanitizers have one of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {
int refused = 0;
}

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) {
  ++refused;
  return EAGAIN;  // as with RLIMIT_NPROC or pids.max
}

int main() {
  uint64_t address = 0, nbytes = 0;
  int32_t fd = -1;
  CHECK_EQ(mc_memory_open("few-threads", 64 << 20, 0, &address, &nbytes, &fd), MC_OK);
  CHECK(refused > 0 || std::thread::hardware_concurrency() < 2);
  mc_memory_close(address, nbytes, fd);
  return 0;
}

#else

int main() { return 0; }

#endif
