// A peer's region as this process can reach it: mapped when it is a memfd that cannot shrink, read
// through its descriptor when it is one that can (a mapping of it could kill this process), else by
// process_vm_readv. One with a slot of the owner's gate is mapped for writing, too. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "transport/region.h"
#include "transport/shm/gate.h"

namespace mc {

class RemoteRegion {
 public:
  // `slot`: of the gate by which the region may be written directly, or null.
  RemoteRegion(uint32_t id, std::vector<mc_piece> pieces, uint32_t access, Fd fd,
               std::shared_ptr<GateSlot> slot);
  ~RemoteRegion();
  RemoteRegion(const RemoteRegion&) = delete;
  RemoteRegion& operator=(const RemoteRegion&) = delete;

  // Shape, access and pins; its pieces are addresses in the peer's process.
  const std::shared_ptr<Region>& shape() const { return shape_; }
  bool mappable() const { return mappable_; }
  bool readable() const { return readable_; }
  // Copy out of the descriptor. False: it has become shorter.
  bool read(uint64_t offset, uint64_t nbytes, uint64_t to) const;
  // Where it is mapped here, or null. map() maps it, populated, which takes a while the first time.
  const uint8_t* mapped() const { return mapped_.load(std::memory_order_acquire); }
  const uint8_t* map();
  bool writable() const { return mapped() != nullptr && slot_ != nullptr; }
  // Copy into a range of the shape, of a writable region that is mapped. MC_E_ACCESS: it was taken
  // back; MC_E_PEER_UNREACHABLE: the copy was disturbed over and over.
  int32_t write(uint64_t offset, uint64_t local, uint64_t nbytes);
  // One more mapping, which is the caller's, for reading.
  int32_t map_for_caller(uint64_t* out_address) const;

 private:
  const std::shared_ptr<Region> shape_;
  const Fd fd_;
  std::shared_ptr<GateSlot> slot_;  // reset when it cannot be mapped so; before mapped_ is set
  const bool mappable_;
  const bool readable_;
  std::mutex mutex_;  // held while mapping
  std::atomic<const uint8_t*> mapped_{nullptr};
};

}  // namespace mc
