// Absolute times on CLOCK_MONOTONIC. Durations enter as milliseconds at the ABI and nowhere else.
#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>
#include <limits>

namespace mc {

inline int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class Deadline {
 public:
  Deadline() : at_ns_(std::numeric_limits<int64_t>::max()) {}  // never
  static Deadline in_ms(uint64_t ms) { return in_us(ms * 1000); }
  static Deadline in_us(uint64_t us) {
    Deadline deadline;
    deadline.at_ns_ = now_ns() + static_cast<int64_t>(us) * 1000;
    return deadline;
  }

  static Deadline at(int64_t ns) {
    Deadline deadline;
    deadline.at_ns_ = ns;
    return deadline;
  }

  int64_t at_ns() const { return at_ns_; }
  bool is_never() const { return at_ns_ == std::numeric_limits<int64_t>::max(); }
  bool passed() const { return !is_never() && now_ns() >= at_ns_; }
  // For poll() and epoll_wait(): rounded up, -1 for never.
  int left_ms() const {
    if (is_never()) return -1;
    const int64_t left = at_ns_ - now_ns();
    if (left <= 0) return 0;
    return static_cast<int>(std::min<int64_t>((left + 999'999) / 1'000'000, 1'000'000'000));
  }
  timespec as_timespec() const {
    return {static_cast<time_t>(at_ns_ / 1'000'000'000), at_ns_ % 1'000'000'000};
  }
  // std::chrono::steady_clock is CLOCK_MONOTONIC here; never is a year away (no overflow).
  std::chrono::steady_clock::time_point as_time_point() const {
    const int64_t year_ns = int64_t{365} * 86'400 * 1'000'000'000;
    return std::chrono::steady_clock::time_point(
        std::chrono::nanoseconds(is_never() ? now_ns() + year_ns : at_ns_));
  }
  bool operator<(const Deadline& other) const { return at_ns_ < other.at_ns_; }

 private:
  int64_t at_ns_;
};

}  // namespace mc
