#include "transport/batch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/crc.h"

namespace mc {

Batch::Batch(mc_slice* slices, uint64_t n, uint64_t timeout_ms)
    : slices_(slices),
      n_(n),
      timeout_ms_(timeout_ms),
      writes_(std::any_of(slices, slices + n,
                          [](const mc_slice& one) { return one.op == MC_OP_WRITE; })),
      progress_(n),
      open_(n) {
  if (n == 0) done_.set();
}

Deadline Batch::deadline() const {
  int64_t at = deadline_ns_;
  if (at == 0) {
    const int64_t asked = Deadline::in_ms(timeout_ms_).at_ns();
    if (deadline_ns_.compare_exchange_strong(at, asked)) at = asked;  // else another was first
  }
  return Deadline::at(at);
}

int32_t Batch::check(const mc_slice* slices, uint64_t n) {
  if (n > 0 && slices == nullptr) return fail(MC_E_USAGE, "slices is null");
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t end = 0;
    if (slices[i].op != MC_OP_READ && slices[i].op != MC_OP_WRITE) {
      return fail(MC_E_USAGE, "slice %lu: op %u is neither read nor write", i, slices[i].op);
    }
    if ((slices[i].flags & ~(MC_SLICE_CRC | MC_SLICE_FENCE)) != 0) {
      return fail(MC_E_USAGE, "slice %lu: unknown flags %#x", i, slices[i].flags);
    }
    if (__builtin_add_overflow(slices[i].local, slices[i].length, &end) ||
        (slices[i].local == 0 && slices[i].length > 0)) {
      return fail(MC_E_USAGE, "slice %lu: local [%#lx, +%lu) is no range of memory", i,
                  slices[i].local, slices[i].length);
    }
  }
  return MC_OK;
}

Batch::Next Batch::next_part(uint64_t read_bytes_max, uint64_t write_bytes_max, Part* out,
                             uint64_t merged_bytes_max) {
  const std::lock_guard lock(mutex_);
  if (stopped()) return Next::kEnd;
  if (next_again_locked(out)) return Next::kPart;
  // A slice that failed already: what is left of it need not travel.
  while (cursor_ < n_ && progress_[cursor_].complete) {
    ++cursor_;
    cursor_offset_ = cursor_part_ = 0;
  }
  if (cursor_ == n_) return Next::kEnd;
  const mc_slice& slice = slices_[cursor_];
  if ((slice.flags & MC_SLICE_FENCE) != 0 && cursor_offset_ == 0 && open_ > n_ - cursor_) {
    return Next::kFence;
  }
  const uint64_t part_max = slice.op == MC_OP_READ ? read_bytes_max : write_bytes_max;
  const uint64_t length = std::min(slice.length - cursor_offset_, part_max);
  uint64_t remote = 0;
  if (__builtin_add_overflow(slice.remote_offset, cursor_offset_, &remote)) remote = UINT64_MAX;
  *out = {cursor_, cursor_part_, slice.op, slice.region, (slice.flags & MC_SLICE_CRC) != 0,
          remote, slice.local + cursor_offset_, length};
  cursor_offset_ += length;
  ++cursor_part_;
  if (cursor_offset_ < slice.length) {
    ++progress_[out->slice].open_parts;
    return Next::kPart;
  }
  if (cursor_part_ == 1) out->slices = merged_locked(out, std::min(part_max, merged_bytes_max));
  for (uint64_t i = 0; i < out->slices; ++i) {
    ++progress_[cursor_].open_parts;
    progress_[cursor_++].handed_out = true;
  }
  cursor_offset_ = cursor_part_ = 0;
  return Next::kPart;
}

// Take as many slices behind the part's as lie behind it at both ends; how many it has then.
uint64_t Batch::merged_locked(Part* part, uint64_t bytes_max) const {
  uint64_t count = 1;
  for (uint64_t i = part->slice + 1; i < n_ && !part->crc && part->length > 0; ++i, ++count) {
    const mc_slice& next = slices_[i];
    uint64_t sum = 0;
    if (next.flags != 0 || next.op != part->op || next.region != part->region ||
        next.length == 0 || progress_[i].complete ||
        next.local != part->local + part->length ||
        __builtin_add_overflow(part->remote_offset, part->length, &sum) ||
        next.remote_offset != sum || __builtin_add_overflow(part->length, next.length, &sum) ||
        sum > bytes_max) {
      break;
    }
    part->length = sum;
  }
  return count;
}

bool Batch::next_again_locked(Part* out) {
  while (!again_.empty()) {
    const uint64_t i = again_.back();
    again_.pop_back();
    if (progress_[i].complete) continue;
    const mc_slice& slice = slices_[i];
    *out = {i, 0, slice.op, slice.region, false, slice.remote_offset, slice.local, slice.length};
    ++progress_[i].open_parts;
    return true;
  }
  return false;
}

bool Batch::part_done(const Part& part, int32_t status, uint32_t crc, const char* reason) {
  bool again = false;
  {
    const std::lock_guard lock(mutex_);
    const bool was_open = open_ > 0;
    again = part_done_locked(part, status, crc, reason);
    if (!was_open || open_ > 0) return again;
    announce_to_ = event_fd_.get();
  }
  announce();
  return again;
}

bool Batch::part_done_locked(const Part& part, int32_t status, uint32_t crc, const char* reason) {
  if (part.slices > 1 && status == MC_E_ACCESS && !stopped()) {
    try {
      again_.reserve(again_.size() + part.slices);
    } catch (const std::bad_alloc&) {
      status = MC_E_OUT_OF_SPACE;
      reason = "no memory to find out which of several slices was refused";
    }
    if (status == MC_E_ACCESS) {
      for (uint64_t i = part.slice; i < part.slice + part.slices; ++i) {
        --progress_[i].open_parts;
        if (!progress_[i].complete) again_.push_back(i);
      }
      return !again_.empty();
    }
  }
  for (uint64_t i = part.slice; i < part.slice + part.slices; ++i) {
    slice_part_done_locked(i, part, status, crc, reason);
  }
  return false;
}

void Batch::slice_part_done_locked(uint64_t i, const Part& part, int32_t status, uint32_t crc,
                                   const char* reason) {
  Progress& progress = progress_[i];
  --progress.open_parts;
  if (progress.complete) return;
  if (status != MC_OK) {
    if (progress.status == MC_OK && (failure_.status == MC_OK || i < failed_slice_)) {
      failed_slice_ = i;
      failure_.status = status;
      try {
        failure_.reason = "slice " + std::to_string(i) + ": " + reason;
      } catch (const std::bad_alloc&) {
        failure_.reason.clear();  // the batch ends all the same
      }
    }
    if (progress.status == MC_OK) progress.status = status;
  } else if (part.crc) {
    const bool whole = part.length == slices_[i].length;  // else join_crcs_locked sets it
    if (whole) slices_[i].crc = crc;
    else progress.crcs.push_back({part.number, part.length, crc});
  }
  if (progress.open_parts > 0) return;
  // A failed slice completes early: no part of it is in flight, and none will be handed out.
  if (progress.handed_out || progress.status != MC_OK) {
    if (progress.status == MC_OK && !progress.crcs.empty()) join_crcs_locked(i);
    complete_locked(i, progress.status);
  }
}

void Batch::join_crcs_locked(uint64_t i) {
  auto& crcs = progress_[i].crcs;
  std::sort(crcs.begin(), crcs.end(),
            [](const PartCrc& a, const PartCrc& b) { return a.number < b.number; });
  uint32_t crc = 0;
  for (const PartCrc& part : crcs) crc = crc32c_concat(crc, part.crc, part.nbytes);
  slices_[i].crc = crc;
}

void Batch::complete_locked(uint64_t i, int32_t status) {
  progress_[i].complete = true;
  slices_[i].status = status;
  --open_;
}

// After the lock: who is woken takes it. Once, by whoever completed the last slice.
void Batch::announce() {
  done_.set();  // before the descriptor says so
  if (announce_to_ < 0) return;
  const uint64_t one = 1;
  (void)!write(announce_to_, &one, sizeof one);
}

void Batch::finish(int32_t status, const char* reason) {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    if (open_ == 0) return done_.set();  // as in event_fd(): whoever calls may rely on it
    finish_locked(status, reason);
    announce_to_ = event_fd_.get();
  }
  announce();
}

void Batch::finish_locked(int32_t status, const char* reason) {
  for (uint64_t i = 0; i < n_ && open_ > 0; ++i) {
    if (progress_[i].complete) continue;
    if (failure_.status == MC_OK || i < failed_slice_) {
      failed_slice_ = i;
      failure_.status = status;
      try {
        failure_.reason = reason;
      } catch (const std::bad_alloc&) {
        failure_.reason.clear();
      }
    }
    complete_locked(i, status);
  }
}

bool Batch::copying() {
  const std::lock_guard lock(mutex_);
  if (stopped()) return false;
  ++copies_;
  return true;
}

void Batch::copied() {
  const std::lock_guard lock(mutex_);
  if (--copies_ == 0) idle_.notify_all();
}

void Batch::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  idle_.wait(lock, [this] { return copies_ == 0; });  // a copy is bounded and waits for nobody
}

Failure Batch::outcome() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

int32_t Batch::event_fd(int* out) {
  const std::lock_guard lock(mutex_);
  if (!event_fd_) {
    if (open_ == 0) done_.set();  // whoever completed it is about to, and does not know of this one
    event_fd_.reset(eventfd(open_ == 0 ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_fd_) return fail_errno(MC_E_OUT_OF_SPACE, "eventfd of the batch");
  }
  *out = event_fd_.get();
  return MC_OK;
}

}  // namespace mc
