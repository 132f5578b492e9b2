// A sticky event on a futex: set once, any number of waiters. One atomic exchange and no system
// call when nobody sleeps, so that completions that are never waited for cost nothing.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace mc {

class Event {
 public:
  void set();
  bool is_set() const { return state_.load(std::memory_order_acquire) == kSet; }
  // False: the deadline passed first. Spins for a few microseconds before it sleeps.
  bool wait(Deadline deadline);

 private:
  static constexpr uint32_t kClear = 0, kSleeping = 1, kSet = 2;
  std::atomic<uint32_t> state_{kClear};
};

}  // namespace mc
