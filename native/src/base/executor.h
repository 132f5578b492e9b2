// One thread for copies that are too long for the progress thread. Started on first use; jobs run
// one after the other and must each end by themselves.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace mc {

class Executor {
 public:
  using Job = std::function<void()>;

  ~Executor() { stop(); }
  void run(Job job);  // dropped once stop() was called
  void stop();        // ends the running job's thread after the job; drops the rest

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace mc
