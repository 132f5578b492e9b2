#include "base/event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace mc {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex is the lower half of the word");

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Event::set() {
  const uint64_t old = state_.exchange(kSet, std::memory_order_acq_rel);
  // The event may be gone from here on; an address without a sleeper wakes nobody.
  if ((old & kSleeping) != 0) {
    syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  if ((old & ~kFlags) != 0) reinterpret_cast<Kickable*>(old & ~kFlags)->kick();
}

bool Event::wait(Deadline deadline, bool* signalled) {
  for (;;) {
    const uint64_t old = state_.fetch_or(kSleeping, std::memory_order_acq_rel);
    if ((old & kSet) != 0) return true;
    const timespec at = deadline.as_timespec();
    const long rc = syscall(SYS_futex, &state_, FUTEX_WAIT_BITSET_PRIVATE,
                            static_cast<uint32_t>(old | kSleeping),
                            deadline.is_never() ? nullptr : &at, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (is_set()) return true;
    if (rc != 0 && errno == ETIMEDOUT) return false;
    if (rc != 0 && errno == EINTR && signalled != nullptr) {
      *signalled = true;
      return false;
    }
  }
}

bool Event::begin_driving(Kickable* driver) {
  const auto pointer = reinterpret_cast<uint64_t>(driver);
  return (state_.fetch_or(pointer, std::memory_order_acq_rel) & kSet) == 0;
}

void Event::end_driving() { state_.fetch_and(kFlags, std::memory_order_acq_rel); }

}  // namespace mc
