// A batch of slices on its way: who may write what, and when it is done.
//
// A transport cuts slices into parts and reports each part once with part_done(). The caller's
// mc_slice array is written under the batch's mutex and only until the batch has finished; after
// finish() returned it is never touched again.
//
// Cursor: next_part() hands out the parts in order, so that a transport keeps as many in flight as
// it likes; a fenced slice is handed out only when all slices before it have completed.
//
// Merging: small slices that lie side by side at both ends may travel as one part, up to the bound
// that the transport gives, which is what either side accepts. When the peer refuses such a part,
// its slices are handed out again one by one, so that each has its own outcome.
//
// Writing into local memory: a transport that copies by itself holds a Copying for each piece of
// work. stop() makes later ones fail and waits for those that are held. Transports with other ways
// of writing (a socket's reader) detach in Endpoint::cancel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/event.h"
#include "base/fd.h"
#include "base/loop.h"
#include "base/status.h"

namespace mc {

struct Part {
  uint64_t slice = 0;   // index in the batch
  uint64_t number = 0;  // of this part in its slice
  uint32_t op = 0, region = 0;
  bool crc = false;
  uint64_t remote_offset = 0, local = 0, length = 0;
  uint64_t slices = 1;  // above 1: as many whole ones, from `slice` on
};

// All of one slice.
inline Part whole_part(const mc_slice& slice, uint64_t i) {
  return {i, 0, slice.op, slice.region, (slice.flags & MC_SLICE_CRC) != 0, slice.remote_offset,
          slice.local, slice.length};
}

class Batch {
 public:
  // Its time counts from the first look at deadline(): a clock may be a system call, which the
  // shortest transfers need none of.
  Batch(mc_slice* slices, uint64_t n, uint64_t timeout_ms);

  // MC_E_USAGE: an operation or a range that no peer could accept.
  static int32_t check(const mc_slice* slices, uint64_t n);

  uint64_t count() const { return n_; }
  const mc_slice& slice(uint64_t i) const { return slices_[i]; }  // not after finish()
  Deadline deadline() const;
  bool writes() const { return writes_; }  // into the peer's memory, among other things

  enum class Next { kPart, kFence, kEnd };
  // kFence: nothing may be handed out until a part_done() came. One caller at a time.
  // Slices are merged up to `merged_bytes_max`; 0: not at all.
  Next next_part(uint64_t read_bytes_max, uint64_t write_bytes_max, Part* out,
                 uint64_t merged_bytes_max = 0);

  // `crc` counts when the slice asked for it. A failure's first report decides the slice. True:
  // next_part() has parts again, of a merged one that was refused.
  bool part_done(const Part& part, int32_t status, uint32_t crc, const char* reason = "");
  // Complete everything that has not with this status; it is done then. The caller has made sure
  // before that nobody writes into local memory for this batch any more.
  void finish(int32_t status, const char* reason);

  bool copying();  // true: call copied() after the copy; prefer a Copying
  void copied();
  void stop();
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  bool done() const { return done_.is_set(); }
  // Makes progress meanwhile. False: the deadline passed first.
  bool wait(Loop& loop, Deadline deadline, bool* signalled = nullptr) {
    return signalled == nullptr ? loop.wait(done_, deadline)
                                : loop.wait_or_signal(done_, deadline, signalled);
  }
  Failure outcome() const;  // of a batch that is done
  int32_t event_fd(int* out);

 private:
  struct PartCrc {
    uint64_t number, nbytes;
    uint32_t crc;
  };
  struct Progress {
    uint64_t open_parts = 0;  // handed out, not reported
    bool handed_out = false;  // all of its parts
    bool complete = false;
    int32_t status = MC_OK;
    std::vector<PartCrc> crcs;  // of a slice in several parts
  };
  uint64_t merged_locked(Part* part, uint64_t bytes_max) const;
  bool next_again_locked(Part* out);
  bool part_done_locked(const Part& part, int32_t status, uint32_t crc, const char* reason);
  void finish_locked(int32_t status, const char* reason);
  void announce();
  void slice_part_done_locked(uint64_t i, const Part& part, int32_t status, uint32_t crc,
                              const char* reason);
  void complete_locked(uint64_t i, int32_t status);
  void join_crcs_locked(uint64_t i);

  mc_slice* const slices_;
  const uint64_t n_;
  const uint64_t timeout_ms_;
  const bool writes_;
  mutable std::atomic<int64_t> deadline_ns_{0};  // 0: nobody has asked
  std::atomic<bool> stopped_{false};
  Event done_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;  // copies_ became 0
  std::vector<Progress> progress_;
  uint64_t cursor_ = 0, cursor_offset_ = 0, cursor_part_ = 0;
  std::vector<uint64_t> again_;  // slices of refused merged parts, to be handed out alone
  uint64_t open_ = 0;            // slices not complete
  uint64_t copies_ = 0;
  uint64_t failed_slice_ = 0;
  Failure failure_;  // of the lowest failed slice
  Fd event_fd_;
  int announce_to_ = -1;  // event_fd_ when it was over; then of whoever completed it
};

// A copy into or from local memory of the batch that runs. False: the batch was stopped, and whoever
// stopped it finishes it.
class Copying {
 public:
  explicit Copying(Batch& batch) : batch_(batch.copying() ? &batch : nullptr) {}
  ~Copying() { end(); }
  Copying(const Copying&) = delete;
  Copying& operator=(const Copying&) = delete;
  explicit operator bool() const { return batch_ != nullptr; }
  void end() {
    if (batch_ != nullptr) batch_->copied();
    batch_ = nullptr;
  }

 private:
  Batch* batch_;
};

}  // namespace mc
