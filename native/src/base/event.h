// A sticky event on a futex: set once, any number of waiters. One atomic exchange and no system
// call when nobody sleeps, so that completions that are never waited for cost nothing.
//
// One of the waiters may be a driver: it does not sleep here but makes progress for everybody (see
// loop.h), and is kicked out of that when the event is set.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace mc {

// Whom to tell that a driver's event is set. The object outlives every event it drives for.
class alignas(8) Kickable {
 public:
  virtual ~Kickable() = default;
  virtual void kick() = 0;
};

class Event {
 public:
  void set();
  bool is_set() const { return (state_.load(std::memory_order_acquire) & kSet) != 0; }
  // False: the deadline passed first. Sleeps; use Loop::wait where the loop's peers set the event.
  // With `signalled`, also when a signal comes, and then that is true.
  bool wait(Deadline deadline, bool* signalled = nullptr);

  // From now on set() kicks `driver`, until end_driving(). False: it is set already.
  bool begin_driving(Kickable* driver);
  void end_driving();
  bool is_driven() const { return (state_.load(std::memory_order_relaxed) & ~kFlags) != 0; }

 private:
  static constexpr uint64_t kSet = 1, kSleeping = 2, kFlags = 7;  // above the flags: a Kickable *
  std::atomic<uint64_t> state_{0};
};

void relax();  // in a loop that spins

}  // namespace mc
