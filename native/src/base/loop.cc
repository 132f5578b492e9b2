#include "base/loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <system_error>

#include "base/status.h"

namespace mc {
namespace {

constexpr uint64_t kWakeId = 1, kKickId = 2, kSharedId = 3;
constexpr int kRoleTries = 60;  // of about 40 ns: the progress thread holds the role for short
constexpr int kTickMs = 1;
constexpr int64_t kQuickNs = 100'000;  // a driver that is back by then is expected to be again
constexpr uint32_t kQuickDrives = 8;   // in a row, and none longer than a tick, before it is believed

constexpr int64_t kCrowdNs = 500'000;  // others that waited so shortly ago are expected back

thread_local const char this_thread = 0;  // its address tells threads apart

std::atomic<int32_t (*)()> ask_signal{nullptr};

int32_t add_to(int epoll, int fd, uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? MC_OK
                                                          : fail_errno(MC_E_INTERNAL, "epoll_ctl");
}

void signal(int fd) {
  const uint64_t one = 1;
  (void)!write(fd, &one, sizeof one);
}

void drain(int fd) {
  uint64_t count;
  (void)!read(fd, &count, sizeof count);
}

}  // namespace

int32_t Loop::start() {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  shared_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  kick_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !shared_ || !wake_ || !kick_) {
    return fail_errno(MC_E_OUT_OF_SPACE, "no descriptors for the event loop");
  }
  int32_t status = add_to(epoll_.get(), wake_.get(), kWakeId);
  if (status == MC_OK) status = add_to(epoll_.get(), shared_.get(), kSharedId);
  if (status == MC_OK) status = add_to(shared_.get(), kick_.get(), kKickId);
  if (status != MC_OK) return status;
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
  signal(kick_.get());
  thread_.join();
  const std::lock_guard role(role_);  // a driver leaves soon
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources;
  std::vector<Call> posted, posted_shared;
  std::map<std::pair<int64_t, uint64_t>, Call> timers;
  const std::lock_guard lock(mutex_);  // destructors of the dropped run after the lock
  stopped_ = true;
  sources.swap(sources_);
  posted.swap(posted_);
  posted_shared.swap(posted_shared_);
  timers.swap(timers_);
  timer_times_.clear();
}

// ---- sources -------------------------------------------------------------------------------

int32_t Loop::add(std::shared_ptr<Source> source, int fd, uint32_t events, Set set) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return fail(MC_E_CANCELLED, "the engine was closed");
  const uint64_t id = next_id_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  source->shared_ = set == Set::kShared;
  sources_.emplace(id, source);
  const int epoll = source->shared_ ? shared_.get() : epoll_.get();
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    sources_.erase(id);
    return fail_errno(MC_E_INTERNAL, "epoll_ctl add");
  }
  source->loop_id_ = id;
  return MC_OK;
}

void Loop::modify(const Source& source, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = source.loop_id_;
  const int epoll = source.shared_ ? shared_.get() : epoll_.get();
  if (event.data.u64 != 0) (void)epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
}

void Loop::remove(Source& source, int fd) {
  std::shared_ptr<Source> dropped;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  const uint64_t id = source.loop_id_.exchange(0);
  if (id == 0) return;
  (void)epoll_ctl(source.shared_ ? shared_.get() : epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  const auto found = sources_.find(id);
  if (found == sources_.end()) return;
  dropped = std::move(found->second);
  sources_.erase(found);
}

std::shared_ptr<Source> Loop::source_of(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = sources_.find(id);
  return found == sources_.end() ? nullptr : found->second;
}

// ---- calls ---------------------------------------------------------------------------------

void Loop::post(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    posted_.push_back(std::move(call));
  }
  if (!on_progress()) wake();
}

void Loop::post_shared(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    posted_shared_.push_back(std::move(call));
  }
  if (drives_shared()) return;
  watch();
  signal(kick_.get());  // whoever looks at the set, now or next
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

void Loop::wake() { signal(wake_.get()); }

int Loop::next_timeout_ms() {
  const std::lock_guard lock(mutex_);
  waiting_until_ns_ = timers_.empty() ? Deadline().at_ns() : timers_.begin()->first.first;
  if (!posted_.empty()) return 0;
  if (ticks()) return kTickMs;
  const int64_t driver_ns = driver_deadline_ns_;
  if (driver_ns != 0) waiting_until_ns_ = std::min(waiting_until_ns_, driver_ns);
  if (waiting_until_ns_ == Deadline().at_ns()) return -1;
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

void Loop::run_shared_calls() {
  for (;;) {
    std::vector<Call> due;
    {
      const std::lock_guard lock(mutex_);
      if (posted_shared_.empty()) return;
      due.swap(posted_shared_);
    }
    for (Call& call : due) call();
  }
}

// ---- progress ------------------------------------------------------------------------------

// One look at a set. With `until`, a driver's: no more than it needs.
void Loop::handle(int epoll, int timeout_ms, const Event* until, bool* signalled) {
  std::array<epoll_event, 32> events;
  const int n = epoll_wait(epoll, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (n < 0 && errno == EINTR && signalled != nullptr) *signalled = true;
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWakeId) {
      drain(wake_.get());
    } else if (event.data.u64 == kKickId) {
      drain(kick_.get());
    } else if (event.data.u64 == kSharedId) {
      handle_shared_on_progress();
    } else if (const std::shared_ptr<Source> source = source_of(event.data.u64)) {
      source->ready_on_progress(event.events);
      if (until != nullptr && until->is_set()) return;  // the rest stays ready
    }
  }
}

// Says who holds the role, however its work ends.
class Loop::Driving {
 public:
  explicit Driving(Loop& loop) : loop_(loop) { loop_.driver_id_ = std::this_thread::get_id(); }
  ~Driving() { loop_.driver_id_ = std::thread::id(); }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

 private:
  Loop& loop_;
};

void Loop::handle_shared_on_progress() {
  const std::unique_lock role(role_, std::try_to_lock);
  if (!role) {  // a driver is about to take the set away, or gives it back this moment
    sched_yield();
    return;
  }
  const Driving driving(*this);
  handle(shared_.get(), 0, nullptr);
  run_shared_calls();
}

void Loop::run() {
  progress_id_ = std::this_thread::get_id();
  while (!stopping_) {
    try {
      handle(epoll_.get(), next_timeout_ms(), nullptr);
      tick_on_progress();
      run_calls_on_progress();
    } catch (const std::bad_alloc&) {
      // What was at hand is lost to its owner's deadline; the rest of the process goes on.
    }
  }
}

bool Loop::wait(Event& event, Deadline deadline) { return wait_once(event, deadline, nullptr); }

void Loop::on_signal(int32_t (*ask)()) { ask_signal = ask; }

// The handler runs here, where nothing is held: it may use the same engine.
bool Loop::wait_or_signal(Event& event, Deadline deadline, bool* signalled) {
  for (;;) {
    bool came = false;
    const bool is_set = wait_once(event, deadline, &came);
    if (is_set || !came) return is_set;
    const auto ask = ask_signal.load();
    *signalled = ask != nullptr && getpid() == gettid() && ask() != 0;
    if (*signalled) return false;
  }
}

bool Loop::wait_once(Event& event, Deadline deadline, bool* signalled) {
  if (event.is_set()) return true;
  const int tries = is_crowded() ? 0 : kRoleTries;
  for (int i = 0; i < tries; ++i) {
    if (drive(event, deadline, signalled)) {
      came_back();
      return event.is_set();
    }
    relax();
    if (event.is_set()) return true;
  }
  ++sleepers_;
  watch();  // whoever keeps the set may not come back
  const bool is_set = event.wait(deadline, signalled);
  --sleepers_;
  came_back();
  return is_set;
}

bool Loop::is_crowded() const {
  const int64_t other_ns = last_.load(std::memory_order_relaxed) == &this_thread
                               ? other_ns_.load(std::memory_order_relaxed)
                               : last_ns_.load(std::memory_order_relaxed);
  return other_ns != 0 && now_ns() - other_ns < kCrowdNs;
}

void Loop::came_back() {
  if (last_.load(std::memory_order_relaxed) != &this_thread) {
    other_ns_.store(last_ns_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    last_.store(&this_thread, std::memory_order_relaxed);
  }
  last_ns_.store(now_ns(), std::memory_order_relaxed);
}

void Loop::kick() {
  if (!drives_shared()) signal(kick_.get());  // the driver itself looks before it sleeps
}

void Loop::lend(bool lent) {
  epoll_event event{};
  event.events = lent ? 0U : static_cast<uint32_t>(EPOLLIN);
  event.data.u64 = kSharedId;
  (void)epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, shared_.get(), &event);
}

void Loop::watch() {
  if (lent_ == Lent::kNot) return;
  wanted_ = true;
  if (drives_shared()) return;
  const std::unique_lock role(role_, std::try_to_lock);
  if (!role || lent_ != Lent::kKept) return;  // a driver, which gives it back when it leaves
  lend(false);
  lent_ = Lent::kNot;
}

// While the set is lent for more than one drive.
void Loop::tick_on_progress() {
  const int64_t driver_ns = driver_deadline_ns_;
  if (driver_ns != 0 && now_ns() >= driver_ns) signal(kick_.get());
  if (!ticks()) return;
  const bool idle = ticked_drives_ == drives_;
  ticked_drives_ = drives_;
  Lent driven = Lent::kDriven;
  if (idle && lent_.compare_exchange_strong(driven, Lent::kLeaving)) return;  // a long wait
  const std::unique_lock role(role_, std::try_to_lock);
  if (!role || lent_ != Lent::kKept) return;
  {
    const Driving driving(*this);
    handle(shared_.get(), 0, nullptr);
    run_shared_calls();
  }
  if (!idle && !wanted_) return;
  lend(false);
  lent_ = Lent::kNot;
}

void Loop::begin_driving(Deadline deadline) {
  began_ns_ = now_ns();
  quick_drives_ = began_ns_ - left_ns_ < kQuickNs ? quick_drives_ + 1 : 0;
  if (lent_ == Lent::kKept) {
    driver_deadline_ns_ = deadline.at_ns();
    lent_ = Lent::kDriven;
  } else {
    lend(true);
    lent_ = Lent::kLeaving;
  }
  ++drives_;
}

void Loop::end_driving() {
  left_ns_ = now_ns();
  driver_deadline_ns_ = 0;
  if (left_ns_ - began_ns_ > int64_t{kTickMs} * 1'000'000) quick_drives_ = 0;
  const bool wanted = wanted_.exchange(false);
  if (quick_drives_ >= kQuickDrives && !wanted && sleepers_ == 0 && !stopping_) {
    Lent driven = Lent::kDriven;
    if (lent_.compare_exchange_strong(driven, Lent::kKept)) return;
    lent_ = Lent::kKept;
    wake();  // it ticks from now on
    return;
  }
  lend(false);
  lent_ = Lent::kNot;
}

// False: somebody else makes progress. True: the event is set, the deadline has passed, or a signal
// came that is to be looked at.
bool Loop::drive(Event& event, Deadline deadline, bool* signalled) {
  if (on_progress() || drives_shared()) return false;
  const std::unique_lock role(role_, std::try_to_lock);
  if (!role || stopping_) return false;
  const Driving driving(*this);
  begin_driving(deadline);
  if (event.begin_driving(this)) {
    while (!event.is_set() && !deadline.passed() && !stopping_) {
      const bool timed = driver_deadline_ns_ == 0;  // else the progress thread looks at the time
      try {
        handle(shared_.get(), timed ? deadline.left_ms() : -1, &event, signalled);
        run_shared_calls();
        if (signalled != nullptr && *signalled) break;
      } catch (const std::bad_alloc&) {
        continue;  // as in run()
      }
    }
  }
  event.end_driving();
  end_driving();
  return !stopping_ || event.is_set();
}

}  // namespace mc
