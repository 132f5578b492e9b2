// The parts one connection has asked for and not yet been answered.
//
// Its mutex is also what makes cancelling strict: whoever writes answers into local memory holds
// it while writing (one copy or one read that does not block), so that after forget() returned
// nobody writes for that batch.
//
// A write that was forgotten after its bytes, or the request to fetch them, had left stays here as a
// late one until the peer has answered it: till then it may still change the peer's memory.
#pragma once

#include <atomic>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/batch.h"

namespace mc {

class PartTable {
 public:
  struct Entry {
    std::shared_ptr<Batch> batch;  // null: free
    Part part;
    uint32_t generation = 0;
    bool unsent = false;  // nothing left for it, and nothing will
    bool late = false;
  };

  // 0 when the batch was stopped or the table is closed.
  uint64_t add(const std::shared_ptr<Batch>& batch, const Part& part) {
    const std::lock_guard lock(mutex_);
    if (closed_ || batch->stopped()) return 0;
    if (free_.empty()) {
      // Room for all of them first, so that giving one back never needs memory.
      if (free_.capacity() <= entries_.size()) free_.reserve(2 * entries_.size() + 16);
      entries_.emplace_back();
      free_.push_back(static_cast<uint32_t>(entries_.size() - 1));
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    Entry& entry = entries_[index];
    entry.batch = batch;
    entry.part = part;
    entry.unsent = false;
    if (++entry.generation == 0) entry.generation = 1;  // after 2^32 parts: no tag is 0
    bytes_ += part.length;
    return uint64_t{entry.generation} << 32 | index;
  }

  // Run `use(entry)` with the part of this tag under the lock. False: no such part (any more).
  template <typename Use>
  bool with(uint64_t tag, Use use) {
    const std::lock_guard lock(mutex_);
    Entry* entry = find_locked(tag);
    if (entry == nullptr) return false;
    use(*entry);
    return true;
  }

  // Take it out. False: nobody waits for such a part (any more).
  bool take(uint64_t tag, std::shared_ptr<Batch>* out_batch, Part* out_part) {
    const std::lock_guard lock(mutex_);
    Entry* entry = find_locked(tag);
    if (entry == nullptr) {
      end_late_locked(tag);
      return false;
    }
    *out_batch = std::move(entry->batch);
    *out_part = entry->part;
    bytes_ -= entry->part.length;
    release_locked(static_cast<uint32_t>(tag));
    return true;
  }

  // Nothing was sent for this part, or what was is taken back.
  void not_sent(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    if (Entry* entry = find_locked(tag); entry != nullptr) entry->unsent = true;
    else end_late_locked(tag);
  }

  // Writes that may still land though nobody waits for them.
  uint64_t late() const { return late_; }
  // Of the parts that somebody waits for.
  uint64_t bytes() const { return bytes_; }

  // Take out all of the batch's parts; the tags they had.
  std::vector<uint64_t> forget(const Batch& batch) {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> tags;
    for (uint32_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].batch.get() != &batch) continue;
      tags.push_back(uint64_t{entries_[i].generation} << 32 | i);
      Entry& entry = entries_[i];
      bytes_ -= entry.part.length;
      if (entry.part.op != MC_OP_WRITE || entry.unsent) {
        release_locked(i);
      } else {
        entry.batch.reset();
        entry.late = true;
        ++late_;
      }
    }
    return tags;
  }

  // All entries; those with a batch were not answered. Needs no memory: ends must always work.
  std::vector<Entry> close() {
    std::vector<Entry> left;
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left.swap(entries_);
    free_.clear();
    late_ = bytes_ = 0;
    return left;
  }

 private:
  Entry* find_locked(uint64_t tag) {
    const uint64_t index = tag & UINT32_MAX;
    if (index >= entries_.size()) return nullptr;
    Entry& entry = entries_[index];
    return entry.batch && entry.generation == tag >> 32 ? &entry : nullptr;
  }
  void release_locked(uint32_t index) {
    entries_[index].batch.reset();
    free_.push_back(index);
  }
  void end_late_locked(uint64_t tag) {
    const uint64_t index = tag & UINT32_MAX;
    if (index >= entries_.size()) return;
    Entry& entry = entries_[index];
    if (!entry.late || entry.generation != tag >> 32) return;
    entry.late = false;
    --late_;
    release_locked(static_cast<uint32_t>(index));
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;
  std::atomic<uint64_t> late_{0}, bytes_{0};
  bool closed_ = false;
};

}  // namespace mc
