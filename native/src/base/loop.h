// The progress thread: one epoll set, timers, and calls posted from elsewhere.
//
// Functions named ..._on_progress run on this thread only and assert it. They never block. Every
// other function may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace mc {

class Loop;

// Something with a descriptor. Kept alive by the loop from add() to remove(), and while its
// ready_on_progress() runs.
class Source {
 public:
  virtual ~Source() = default;
  virtual void ready_on_progress(uint32_t events) = 0;

 private:
  friend class Loop;
  std::atomic<uint64_t> loop_id_{0};
};

class Loop {
 public:
  using Call = std::function<void()>;

  ~Loop() { stop(); }
  int32_t start();
  // Joins; sources and calls that are left, or come later, are dropped. Not from the progress thread.
  void stop();

  int32_t add(std::shared_ptr<Source> source, int fd, uint32_t events);
  void modify(const Source& source, int fd, uint32_t events);
  void remove(Source& source, int fd);  // idempotent

  void post(Call call);
  uint64_t call_at(Deadline at, Call call);
  void cancel_call(uint64_t id);  // the call may be running already

  bool on_progress() const { return std::this_thread::get_id() == progress_id_.load(); }

 private:
  void run();
  void wake();
  int next_timeout_ms();
  void run_calls_on_progress();

  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  std::atomic<std::thread::id> progress_id_{};
  std::atomic<bool> stopping_{false};

  std::mutex mutex_;  // guards all below
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources_;
  std::vector<Call> posted_;
  std::map<std::pair<int64_t, uint64_t>, Call> timers_;  // by (time, id)
  std::unordered_map<uint64_t, int64_t> timer_times_;
  bool stopped_ = false;
  uint64_t next_id_ = 1;
  int64_t waiting_until_ns_ = 0;  // what the progress thread sleeps for at most
};

}  // namespace mc
