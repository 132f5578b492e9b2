// Received messages that wait for mc_message_receive, bounded in bytes; and requests that wait for
// their replies.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/stream/frame.h"
#include "transport/transport.h"

namespace mc {

struct Received {
  uint64_t peer = 0;
  MessageHead head;
  Bytes bytes;
};

class MessageQueue {
 public:
  explicit MessageQueue(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  bool reserve(uint32_t nbytes, const std::shared_ptr<RoomWaiter>& waiter);
  bool is_crowded(const std::shared_ptr<RoomWaiter>& waiter);
  void unreserve(uint32_t nbytes);
  void put(Received message);  // its bytes were reserved
  // Does not wait. MC_E_TIMEOUT: there is none, and `arrival` (or null) is set when there may be;
  // unwatch() it before it goes. MC_E_CANCELLED: woken or closed.
  int32_t take(Received* out, Event* arrival);
  void unwatch(const Event& arrival);
  void wake();
  void close();
  uint64_t bytes() const;
  uint64_t count() const;

 private:
  void give_back(uint64_t nbytes);
  void call_one_locked();

  const uint64_t bytes_max_;
  mutable std::mutex mutex_;
  std::deque<Received> messages_;
  std::vector<std::weak_ptr<RoomWaiter>> waiters_;
  std::vector<Event*> takers_;  // one for each receive() that waits
  uint64_t bytes_ = 0;
  uint64_t wakes_ = 0;
  bool closed_ = false;
};

// Requests of one peer. A waiter lives on its caller's stack.
class RequestTable {
 public:
  struct Waiter {
    Event done;
    Failure failure;
    Bytes bytes;
    uint32_t nbytes = 0;
  };

  // Fails once fail_all() was called.
  int32_t add(uint64_t correlation, Waiter* waiter);
  void remove(uint64_t correlation);
  void reply(uint64_t correlation, Bytes bytes, uint32_t nbytes);
  void fail_all(const Failure& why);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, Waiter*> waiters_;
  Failure failed_;
};

}  // namespace mc
