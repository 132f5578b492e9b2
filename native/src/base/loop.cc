#include "base/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "base/status.h"

namespace mc {
namespace {

constexpr uint64_t kWakeId = 0;

}  // namespace

int32_t Loop::start() {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) return fail_errno(MC_E_OUT_OF_SPACE, "no descriptors for the event loop");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeId;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return fail_errno(MC_E_INTERNAL, "epoll_ctl");
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return fail(MC_E_OUT_OF_SPACE, "cannot start the progress thread: %s", error.what());
  }
  return MC_OK;
}

void Loop::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  wake();
  thread_.join();
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources;
  std::vector<Call> posted;
  std::map<std::pair<int64_t, uint64_t>, Call> timers;
  const std::lock_guard lock(mutex_);  // destructors of the dropped run after the lock
  stopped_ = true;
  sources.swap(sources_);
  posted.swap(posted_);
  timers.swap(timers_);
  timer_times_.clear();
}

int32_t Loop::add(std::shared_ptr<Source> source, int fd, uint32_t events) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return fail(MC_E_CANCELLED, "the engine was closed");
  const uint64_t id = next_id_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return fail_errno(MC_E_INTERNAL, "epoll_ctl add");
  }
  source->loop_id_ = id;
  sources_.emplace(id, std::move(source));
  return MC_OK;
}

void Loop::modify(const Source& source, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = source.loop_id_;
  if (event.data.u64 != 0) (void)epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::remove(Source& source, int fd) {
  std::shared_ptr<Source> dropped;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  const uint64_t id = source.loop_id_.exchange(0);
  if (id == 0) return;
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  const auto found = sources_.find(id);
  if (found == sources_.end()) return;
  dropped = std::move(found->second);
  sources_.erase(found);
}

void Loop::post(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    posted_.push_back(std::move(call));
  }
  if (!on_progress()) wake();
}

uint64_t Loop::call_at(Deadline at, Call call) {
  bool earlier = false;
  uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return 0;
    id = next_id_++;
    timers_.emplace(std::pair(at.at_ns(), id), std::move(call));
    timer_times_.emplace(id, at.at_ns());
    earlier = at.at_ns() < waiting_until_ns_;
  }
  if (earlier && !on_progress()) wake();
  return id;
}

void Loop::cancel_call(uint64_t id) {
  Call dropped;
  const std::lock_guard lock(mutex_);
  const auto found = timer_times_.find(id);
  if (found == timer_times_.end()) return;
  const auto timer = timers_.find({found->second, id});
  dropped = std::move(timer->second);
  timers_.erase(timer);
  timer_times_.erase(found);
}

void Loop::wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

int Loop::next_timeout_ms() {
  const std::lock_guard lock(mutex_);
  waiting_until_ns_ = timers_.empty() ? Deadline().at_ns() : timers_.begin()->first.first;
  if (!posted_.empty()) return 0;
  if (timers_.empty()) return -1;
  const int64_t left_ns = waiting_until_ns_ - now_ns();
  return left_ns <= 0 ? 0 : static_cast<int>(std::min<int64_t>(left_ns / 1'000'000 + 1, 60'000));
}

void Loop::run_calls_on_progress() {
  std::vector<Call> due;
  {
    const std::lock_guard lock(mutex_);
    due.swap(posted_);
    const int64_t now = now_ns();
    while (!timers_.empty() && timers_.begin()->first.first <= now) {
      timer_times_.erase(timers_.begin()->first.second);
      due.push_back(std::move(timers_.begin()->second));
      timers_.erase(timers_.begin());
    }
  }
  for (Call& call : due) call();
}

void Loop::run() {
  progress_id_ = std::this_thread::get_id();
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                             next_timeout_ms());
    for (int i = 0; i < n; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kWakeId) {
        uint64_t count;
        (void)!read(wake_.get(), &count, sizeof count);
        continue;
      }
      std::shared_ptr<Source> source;
      {
        const std::lock_guard lock(mutex_);
        const auto found = sources_.find(id);
        if (found != sources_.end()) source = found->second;
      }
      if (source) source->ready_on_progress(events[static_cast<size_t>(i)].events);
    }
    run_calls_on_progress();
  }
}

}  // namespace mc
