#include "engine/messages.h"

#include <algorithm>
#include <new>

namespace mc {

bool MessageQueue::reserve(uint32_t nbytes, const std::shared_ptr<RoomWaiter>& waiter) {
  const std::lock_guard lock(mutex_);
  const uint64_t whole = message_cost(nbytes);
  if (!waiter || bytes_ == 0 || bytes_ + whole <= bytes_max_) {  // one is always let in
    bytes_ += whole;
    return true;
  }
  waiters_.push_back(waiter);
  return false;
}

bool MessageQueue::is_crowded(const std::shared_ptr<RoomWaiter>& waiter) {
  const std::lock_guard lock(mutex_);
  if (bytes_ <= bytes_max_ / 2) return false;
  waiters_.push_back(waiter);
  return true;
}

void MessageQueue::unreserve(uint32_t nbytes) { give_back(message_cost(nbytes)); }

void MessageQueue::give_back(uint64_t nbytes) {
  std::vector<std::weak_ptr<RoomWaiter>> waiters;
  {
    const std::lock_guard lock(mutex_);
    bytes_ -= nbytes;
    if (bytes_ <= bytes_max_ / 2) waiters.swap(waiters_);  // not one wake-up for every message
  }
  for (const auto& weak : waiters) {
    if (const auto waiter = weak.lock()) waiter->room();
  }
}

void MessageQueue::put(Received message) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  messages_.push_back(std::move(message));
  call_one_locked();
}

int32_t MessageQueue::take(Received* out, Event* arrival) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return fail(MC_E_CANCELLED, "the engine was closed");
    if (wakes_ > 0) {
      --wakes_;
      return MC_E_CANCELLED;
    }
    if (messages_.empty()) {
      if (arrival != nullptr) takers_.push_back(arrival);
      return MC_E_TIMEOUT;
    }
    *out = std::move(messages_.front());
    messages_.pop_front();
  }
  give_back(message_cost(out->head.nbytes));
  return MC_OK;
}

void MessageQueue::unwatch(const Event& arrival) {
  const std::lock_guard lock(mutex_);
  std::erase(takers_, &arrival);
}

void MessageQueue::call_one_locked() {
  if (takers_.empty()) return;
  // Who makes progress has the message at hand; the one who came last is the warmest of the others.
  const auto driver = std::find_if(takers_.begin(), takers_.end(),
                                   [](const Event* taker) { return taker->is_driven(); });
  const auto chosen = driver != takers_.end() ? driver : takers_.end() - 1;
  (*chosen)->set();
  takers_.erase(chosen);
}

void MessageQueue::wake() {
  const std::lock_guard lock(mutex_);
  ++wakes_;
  call_one_locked();
}

void MessageQueue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (Event* taker : takers_) taker->set();
  takers_.clear();
}

uint64_t MessageQueue::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

uint64_t MessageQueue::count() const {
  const std::lock_guard lock(mutex_);
  return messages_.size();
}

int32_t RequestTable::add(uint64_t correlation, Waiter* waiter) {
  const std::lock_guard lock(mutex_);
  if (failed_.status != MC_OK) return failed_.raise();
  waiters_.emplace(correlation, waiter);
  return MC_OK;
}

void RequestTable::remove(uint64_t correlation) {
  const std::lock_guard lock(mutex_);
  waiters_.erase(correlation);
}

void RequestTable::reply(uint64_t correlation, Bytes bytes, uint32_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto found = waiters_.find(correlation);
  if (found == waiters_.end()) return;  // its caller stopped waiting
  found->second->bytes = std::move(bytes);
  found->second->nbytes = nbytes;
  found->second->done.set();
  waiters_.erase(found);
}

void RequestTable::fail_all(const Failure& why) {
  const auto tell = [&why](Failure* out) {
    out->status = why.status;
    try {
      out->reason = why.reason;
    } catch (const std::bad_alloc&) {
      out->reason.clear();  // nobody waits for ever for want of words
    }
  };
  const std::lock_guard lock(mutex_);
  tell(&failed_);
  for (const auto& [correlation, waiter] : waiters_) {
    tell(&waiter->failure);
    waiter->done.set();
  }
  waiters_.clear();
}

}  // namespace mc
