// Registered memory and the rule that makes deregistration strict.
//
// Whoever touches a region's bytes pins it first and unpins right after: a pin spans one copy or
// one system call that does not block, never a wait for a peer. revoke() refuses new pins, and once
// the old ones are gone nobody touches the memory through this engine. A peer's region, seen over
// shared memory, follows the same rule: its owner is told once it is quiet here.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/fd.h"

namespace mc {

// Somebody outside this process who may write into a region by itself. Thread-safe.
class OutsideWriter {
 public:
  virtual ~OutsideWriter() = default;
  virtual void withdraw() = 0;     // nothing new begins
  virtual bool quiet() const = 0;  // after withdraw(): nothing is written any more
  virtual bool withdrawn() const = 0;
};

// Whether all of this memory of ours is mapped. Cheap: the kernel walks mappings, not pages.
bool is_mapped(uint64_t address, uint64_t nbytes);

class Region {
 public:
  Region(uint32_t id, std::vector<mc_piece> pieces, uint32_t access, Fd fd);

  uint32_t id() const { return id_; }
  uint64_t nbytes() const { return nbytes_; }
  uint32_t access() const { return access_; }
  bool is_raw() const { return (access_ & MC_ACCESS_RAW) != 0; }  // see raw.h
  int fd() const { return fd_.get(); }  // memfd a peer may map, or -1
  const std::vector<mc_piece>& pieces() const { return pieces_; }

  // True: the range is inside, `access` (MC_ACCESS_REMOTE_*) was offered, and raw memory is still
  // mapped there. Overflow-safe.
  bool allows(uint32_t access, uint64_t offset, uint64_t length) const;
  // Call use(iovec) with the memory of a range that allows() accepted, in order.
  template <typename Use>
  void each_piece(uint64_t offset, uint64_t length, Use use) const {
    size_t i = static_cast<size_t>(
        std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1);
    for (; length > 0; ++i) {
      const uint64_t skip = offset - starts_[i];
      const uint64_t n = std::min(length, pieces_[i].nbytes - skip);
      use(iovec{reinterpret_cast<void*>(pieces_[i].address + skip), n});
      offset += n;
      length -= n;
    }
  }
  // The same, appended to *out.
  void slice(uint64_t offset, uint64_t length, std::vector<iovec>* out) const;
  // Continue *crc with the first `nbytes` of these pieces of ours. MC_E_ACCESS: raw, and gone.
  int32_t crc(const std::vector<iovec>& pieces, uint64_t nbytes, uint32_t* crc) const;

  bool pin();
  void unpin();
  bool alive() const { return (state_.load(std::memory_order_acquire) & kRevoked) == 0; }
  // False, and `writer` was told to withdraw: the region is revoked.
  bool add_writer(std::shared_ptr<OutsideWriter> writer);
  // Refuse new pins from now on; quiet() once the old ones, and the writers outside, are gone.
  void revoke();
  bool quiet() const;
  // False: pins are left at the deadline.
  bool wait_quiet(Deadline deadline) const;

 private:
  bool all_mapped(uint64_t offset, uint64_t length) const;

  static constexpr uint32_t kRevoked = 1U << 31;

  const uint32_t id_;
  const std::vector<mc_piece> pieces_;
  const std::vector<uint64_t> starts_;  // offset of each piece
  const uint64_t nbytes_;
  const uint32_t access_;
  const Fd fd_;
  std::atomic<uint32_t> state_{0};  // number of pins, and kRevoked
  mutable std::mutex writers_mutex_;
  std::vector<std::shared_ptr<OutsideWriter>> writers_;
};

class Pin {
 public:
  Pin() = default;
  explicit Pin(std::shared_ptr<Region> region)
      : region_(region && region->pin() ? std::move(region) : nullptr) {}
  Pin(Pin&& other) noexcept : region_(std::move(other.region_)) {}
  Pin& operator=(Pin&&) = delete;
  ~Pin() {
    if (region_) region_->unpin();
  }
  explicit operator bool() const { return region_ != nullptr; }
  Region* operator->() const { return region_.get(); }

 private:
  std::shared_ptr<Region> region_;
};

// All regions of an engine. Thread-safe.
class RegionTable {
 public:
  // Same single range with the same access again: the same id, counted. See mc_region_register.
  int32_t add(const mc_piece* pieces, uint64_t n, uint32_t access, int fd, uint32_t* out_id);
  // One registration less. The last one takes the region out of the table and returns it; null
  // while others are left. MC_E_ACCESS: no such region.
  int32_t drop(uint32_t id, std::shared_ptr<Region>* out_last);
  std::shared_ptr<Region> find(uint32_t id) const;
  std::vector<std::shared_ptr<Region>> all() const;

 private:
  struct Entry {
    std::shared_ptr<Region> region;
    uint64_t count = 1;
  };
  int32_t check_overlap(const std::vector<mc_piece>& pieces, uint32_t access) const;

  mutable std::mutex mutex_;
  uint32_t next_id_ = 1;
  std::unordered_map<uint32_t, Entry> entries_;
};

}  // namespace mc
