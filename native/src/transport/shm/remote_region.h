// A peer's region as this process can reach it: mapped when it is a memfd, else by
// process_vm_readv. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "transport/region.h"

namespace mc {

class RemoteRegion {
 public:
  RemoteRegion(uint32_t id, std::vector<mc_piece> pieces, uint32_t access, Fd fd);
  ~RemoteRegion();
  RemoteRegion(const RemoteRegion&) = delete;
  RemoteRegion& operator=(const RemoteRegion&) = delete;

  // Shape, access and pins; its pieces are addresses in the peer's process.
  const std::shared_ptr<Region>& shape() const { return shape_; }
  bool mappable() const { return mappable_; }
  // Where it is mapped here, or null. map() maps it, populated, which takes a while the first time.
  const uint8_t* mapped() const { return mapped_.load(std::memory_order_acquire); }
  const uint8_t* map();
  // One more mapping, which is the caller's.
  int32_t map_for_caller(uint64_t* out_address) const;

 private:
  const std::shared_ptr<Region> shape_;
  const Fd fd_;
  const bool mappable_;
  std::mutex mutex_;  // held while mapping
  std::atomic<const uint8_t*> mapped_{nullptr};
};

}  // namespace mc
