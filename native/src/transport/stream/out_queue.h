// The sending half of a connection. Thread-safe; nothing here waits but send().
//
// Frames wait in three queues, urgent (requests, replies, answers without data) before messages
// before data; what has been put on its way is in sending_, whose first frame may be half sent.
// Messages go while the peer's credit lasts (see frame.h), so that a peer whose program takes no
// messages still gets its data and its replies. Whoever adds a frame
// tries to write at once, so that an idle connection costs no hand-over between threads; the
// progress thread goes on when the socket has room again.
//
// Data frames refer to memory that stays where it is until it is sent. When that memory is taken
// away (forget_region, forget_batch) a frame not begun is answered or dropped, and the rest of a
// begun one is copied: at most the bounded sending_ queue.
//
// Bounds: copied bytes of messages, and of replies, by `copied_max` each (senders wait); answers by the peer's window
// (kWindow; with more than kBacklogMax waiting the connection is not read until it has drained).
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/batch.h"
#include "transport/region.h"
#include "transport/stream/frame.h"

namespace mc {

class OutQueue {
 public:
  enum class Pumped { kIdle, kMore, kBroken };  // kMore: call again when the socket has room

  OutQueue(int fd, uint64_t copied_max, uint64_t credit)
      : fd_(fd), copied_max_(copied_max), credit_(static_cast<int64_t>(credit)) {}

  // An urgent frame. Bytes are the caller's again on return. kWait: for room until the deadline
  // (MC_E_TIMEOUT); kRefuse: MC_E_BACKPRESSURE without room; kAlways: for answers and requests,
  // whose number is bounded by windows. `passed`: a descriptor to send along.
  enum class Room { kWait, kRefuse, kAlways };
  int32_t send(const FrameHead& head, const void* bytes, Room room, Deadline deadline = Deadline(),
               Fd passed = Fd());
  // An answer without a body, left for the next pump(): many of them go out together.
  void queue(const FrameHead& head);
  // A data frame whose body is `region`'s range (an answer) ...
  void answer(const FrameHead& head, const std::shared_ptr<Region>& region, uint64_t offset);
  // ... or local memory of a batch.
  // False: it is not sent, as the batch was stopped or the connection closed.
  bool push(const FrameHead& head, const std::shared_ptr<Batch>& batch, uint64_t local);
  Pumped pump();
  // While true, the little that others add is left for the next pump(): whoever said so pumps soon,
  // and many frames go out together. After defer(false) comes a pump().
  void defer(bool deferred) { deferred_ = deferred; }
  bool deferred() const { return deferred_; }
  bool left_something() const { return left_; }  // they did
  void pump_or_defer();  // what was pushed
  // The peer took messages of this size: as much may be on its way again.
  Pumped grant(uint64_t nbytes);

  // Answers that nobody waits for any more; those not begun are dropped.
  void drop_answers(std::span<const uint64_t> tags);
  void forget_region(const Region& region);
  std::vector<uint64_t> forget_batch(const Batch& batch);  // tags of what will not be sent
  void close();  // wakes senders; nothing is sent any more

  bool full() const { return full_; }      // the socket took no more: pump() when it does
  bool broken() const { return broken_; }  // it takes nothing any more
  uint64_t answers() const { return answers_; }  // waiting or on their way
  uint64_t queued_bytes() const;
  uint64_t sent_bytes() const;

 private:
  struct Frame {
    FrameHead head;
    size_t head_sent = 0;
    std::vector<iovec> body;     // what is left of it
    size_t next = 0;             // first piece of body that is not sent
    std::shared_ptr<Region> region;
    std::shared_ptr<Batch> batch;
    std::unique_ptr<uint8_t[]> copy;
    uint64_t copied_nbytes = 0;  // counted in copied_bytes_
    bool borrowed = false;       // body is memory of a running send()
    Fd passed;
    uint64_t left() const;
    bool begun() const { return head_sent > 0; }
    bool is_message() const { return head.type == FrameType::kMessage; }
  };
  using Frames = std::deque<Frame>;

  Pumped pump_locked();
  bool is_little_locked() const;
  void fill_locked();
  Frames* next_locked();
  ssize_t write_some_locked();
  void sent_locked(uint64_t nbytes);
  bool own_rest_locked(Frame& frame);  // false: no memory for it, or it is gone
  void give_up_locked();
  static void refuse(Frame& frame);

  const int fd_;
  const uint64_t copied_max_;

  mutable std::mutex mutex_;
  std::condition_variable room_;
  Frames sending_, urgent_, messages_, data_;
  int64_t credit_;                // below 1: the peer takes no message now
  uint64_t copied_bytes_[2] = {};  // of other frames, of messages
  uint64_t sending_bytes_ = 0, sent_bytes_ = 0;
  std::atomic<uint64_t> answers_{0};
  std::atomic<bool> full_{false}, broken_{false}, deferred_{false}, left_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace mc
