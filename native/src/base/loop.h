// Making progress: descriptors, timers, and calls posted from elsewhere.
//
// The progress thread does all of it. Connections of peers are in a set of their own, the shared
// one, and that set can be lent: a caller that waits for something a peer will send takes it with
// wait(), reads the sockets by itself and gives it back when its event is set. So a request and its
// reply cost no hand-over between threads. The set belongs to one at a time, by a role:
//
//   free     the progress thread sees the set become ready and takes the role while it handles that
//   driven   a caller holds the role and waits on the set; the progress thread does not look at it
//
// Taking the set from the progress thread's sight and giving it back costs two system calls and a
// timer a third, together as much as the rest of a request. So a caller that comes back again and
// again at once keeps the set while it is away, and leaves its deadline to the progress thread,
// which then looks every kTickMs: it handles what became ready in a gap, wakes a driver whose time
// is over, and takes the set back when no driver came for a whole tick. See Lent.
//
// Several threads that wait at once are a crowd: each would take the role from the last, and every
// change costs as much as a transfer. So who finds that another came back from wait() a moment ago
// (kCrowdNs) sleeps, and the progress thread reads for all of them; alone again, a caller drives again.
//
// Functions named ..._on_progress never block. Those of sources in the shared set, and calls posted
// with post_shared(), run on whoever holds the role, one after the other; all others on the progress
// thread only. Every other function may be called from any thread.
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
#include "base/event.h"
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
  std::atomic<bool> shared_{false};
};

class Loop final : private Kickable {
 public:
  using Call = std::function<void()>;
  enum class Set { kOwn, kShared };

  ~Loop() override { stop(); }
  int32_t start();
  // Joins; sources and calls that are left, or come later, are dropped. Not from the progress thread.
  void stop();

  int32_t add(std::shared_ptr<Source> source, int fd, uint32_t events, Set set = Set::kOwn);
  void modify(const Source& source, int fd, uint32_t events);
  void remove(Source& source, int fd);  // idempotent

  void post(Call call);         // to the progress thread
  void post_shared(Call call);  // to whoever holds the role of the shared set
  uint64_t call_at(Deadline at, Call call);
  void cancel_call(uint64_t id);  // the call may be running already

  // From now on the progress thread sees the shared set by itself: for what nobody waits for with
  // wait(). Cheap when that is so already.
  void watch();
  // Wait for an event that a peer, or a thread of this engine, will set; makes progress meanwhile
  // when nobody else does. False: the deadline passed first.
  bool wait(Event& event, Deadline deadline);
  // Likewise, and ends with `signalled` when a signal came whose handler wants that (on_signal).
  bool wait_or_signal(Event& event, Deadline deadline, bool* signalled);
  // Asked on the main thread when a signal has interrupted it there; not 0 ends the wait.
  static void on_signal(int32_t (*ask)());

  bool on_progress() const { return std::this_thread::get_id() == progress_id_.load(); }
  // The caller holds the role of the shared set. To be asserted by what it protects.
  bool drives_shared() const { return std::this_thread::get_id() == driver_id_.load(); }

 private:
  class Driving;
  // Who looks at the shared set. Changed under the role, but for kDriven -> kLeaving.
  enum class Lent : uint8_t {
    kNot,      // the progress thread
    kLeaving,  // a driver, which gives it back when it leaves
    kDriven,   // a driver, which keeps it when it leaves; the progress thread ticks
    kKept,     // nobody but the ticks; the last driver is expected back
  };

  void run();
  void wake();
  void kick() override;
  bool is_crowded() const;
  void came_back();  // this thread, from wait()
  bool wait_once(Event& event, Deadline deadline, bool* signalled);
  bool drive(Event& event, Deadline deadline, bool* signalled);
  void lend(bool lent);
  void begin_driving(Deadline deadline);
  void end_driving();
  void tick_on_progress();
  bool ticks() const { return lent_ == Lent::kDriven || lent_ == Lent::kKept; }
  void handle(int epoll, int timeout_ms, const Event* until, bool* signalled = nullptr);
  void handle_shared_on_progress();
  std::shared_ptr<Source> source_of(uint64_t id);
  int next_timeout_ms();
  void run_calls_on_progress();
  void run_shared_calls();

  Fd epoll_;   // of the progress thread; holds shared_ as well while that is not lent
  Fd shared_;
  Fd wake_, kick_;
  std::thread thread_;
  std::atomic<std::thread::id> progress_id_{}, driver_id_{};
  std::atomic<bool> stopping_{false};

  std::mutex role_;  // of the shared set; before mutex_
  std::atomic<Lent> lent_{Lent::kNot};
  std::atomic<uint64_t> drives_{0};                // begun
  std::atomic<int64_t> driver_deadline_ns_{0};     // of the one that drives; 0: it looks itself
  std::atomic<uint32_t> sleepers_{0};              // callers in wait() that do not drive
  std::atomic<bool> wanted_{false};                // by watch(), and not yet done
  // Who came back from wait() last, when, and when somebody else did. Hints.
  std::atomic<const void*> last_{nullptr};
  std::atomic<int64_t> last_ns_{0}, other_ns_{0};
  int64_t began_ns_ = 0, left_ns_ = 0;             // the last drive; under the role
  uint32_t quick_drives_ = 0;                      // in a row; under the role
  uint64_t ticked_drives_ = 0;                     // drives_ at the last tick; progress thread

  std::mutex mutex_;  // guards all below
  std::unordered_map<uint64_t, std::shared_ptr<Source>> sources_;
  std::vector<Call> posted_, posted_shared_;
  std::map<std::pair<int64_t, uint64_t>, Call> timers_;  // by (time, id)
  std::unordered_map<uint64_t, int64_t> timer_times_;
  bool stopped_ = false;
  uint64_t next_id_ = 16;  // below: descriptors of the loop itself
  int64_t waiting_until_ns_ = 0;  // what the progress thread sleeps for at most
};

}  // namespace mc
