#include "base/executor.h"

#include <new>

namespace mc {

void Executor::run(Job job) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    jobs_.push_back(std::move(job));
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  ready_.notify_one();
}

void Executor::stop() {
  std::deque<Job> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
  }
  ready_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Executor::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ready_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      try {
        job();
      } catch (const std::bad_alloc&) {
        // Whoever waits for it does so to a deadline.
      }
    }  // the job's captures are released without the lock
    lock.lock();
  }
}

}  // namespace mc
