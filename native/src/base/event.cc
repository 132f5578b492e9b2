#include "base/event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace mc {
namespace {

constexpr int kSpinRounds = 60;  // of about 40 ns: longer than a reply that is already on its way

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Event::set() {
  if (state_.exchange(kSet, std::memory_order_acq_rel) == kSleeping) {
    syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Event::wait(Deadline deadline) {
  for (int i = 0; i < kSpinRounds; ++i) {
    if (is_set()) return true;
    relax();
  }
  for (;;) {
    uint32_t seen = kClear;
    if (!state_.compare_exchange_strong(seen, kSleeping, std::memory_order_acq_rel) &&
        seen == kSet) {
      return true;
    }
    const timespec at = deadline.as_timespec();
    const long rc = syscall(SYS_futex, &state_, FUTEX_WAIT_BITSET_PRIVATE, kSleeping,
                            deadline.is_never() ? nullptr : &at, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (is_set()) return true;
    if (rc != 0 && errno == ETIMEDOUT) return false;
  }
}

}  // namespace mc
