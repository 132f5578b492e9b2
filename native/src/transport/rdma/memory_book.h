// What is registered with the devices, and for whom.
//
// A registration covers a range with one memory region on every adapter: all of them or none. It
// belongs to a Region of the engine and lives as long as that: it is never kept for memory that
// nobody holds for us, because such memory can be unmapped, mapped anew, and the device would go on
// with the old pages. Within that rule registrations are shared: local memory of slices, and values
// gathered for a put, use what covers them already.
//
// Users hold a Registration while the device may use it. drop() waits for them, then takes the
// memory back from the devices: from then on neither we nor a peer reaches it, whatever key it has.
//
// Threads: any. mutex_ is a leaf and never held while registering, which takes long.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "transport/rdma/adapter.h"
#include "transport/region.h"

namespace mc::rdma {

inline constexpr size_t kAdaptersMax = 8;
inline constexpr uint64_t kGatherMin = 64 << 10;  // smaller values are not worth a registration

using Adapters = std::vector<std::shared_ptr<Adapter>>;

class Registration {
 public:
  // `raw`: nobody keeps it mapped, so that it has to be looked at before each use.
  Registration(const Adapters& adapters, Range range, bool raw = false)
      : adapters_(adapters), range_(range), raw_(raw) {}
  ~Registration() { end(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // With every adapter; nothing is left behind on failure. `access`: MC_ACCESS_*.
  int32_t begin(uint32_t access);
  // Take it back from every adapter; idempotent. Not concurrently with itself. Whoever still holds it
  // may go on asking for its keys, which are void.
  void end();
  bool ended() const { return ended_; }
  bool raw() const { return raw_; }

  uint64_t address() const { return range_.address; }
  uint64_t nbytes() const { return range_.nbytes; }
  bool writable() const { return writable_; }  // by our own device
  bool readable_by_peers() const { return readable_by_peers_; }
  int numa_node() const { return numa_node_; }
  uint32_t lkey(size_t adapter) const { return keys_[adapter].local; }
  uint32_t rkey(size_t adapter) const { return keys_[adapter].remote; }

 private:
  const Adapters& adapters_;
  const Range range_;
  const bool raw_;
  struct Keys {
    uint32_t local = 0, remote = 0;
  };
  std::vector<verbs::Mr*> mrs_;
  Keys keys_[kAdaptersMax];  // stay when mrs_ have gone
  std::atomic<bool> ended_{false};
  bool writable_ = true, readable_by_peers_ = false;
  int numa_node_ = -1;
};

// A piece of a region as a peer sees it. Also its form in a frame.
struct Span {
  uint64_t offset = 0, address = 0, nbytes = 0;
  uint32_t rkeys[kAdaptersMax] = {};
};
static_assert(sizeof(Span) == 56);

struct MemoryNumbers {
  uint64_t registrations = 0, registered_bytes = 0, total = 0, total_ns = 0, refused = 0;
  std::string refusal;  // the last one's words
};

class MemoryBook {
 public:
  MemoryBook(const Adapters& adapters, uint64_t limit_bytes)
      : adapters_(adapters), limit_bytes_(limit_bytes) {}

  // Register a new region, unless it is gathered: those wait until a peer asks. On failure nothing
  // is registered and the words name what was missing.
  int32_t add(const Region& region);
  // The region was revoked: nothing of it can be reached once this returned.
  void drop(uint32_t region, Deadline deadline);
  // The engine closes: nothing is reached any more.
  void drop_all();
  // What a peer may use, ascending by offset; registers what is worth it. May take long.
  std::vector<Span> spans(const Region& region);

  // A registration that holds `address` and is good for that; null: there is none.
  enum class Use { kSource, kTarget, kReadByPeers };
  std::shared_ptr<Registration> find(uint64_t address, Use use);
  MemoryNumbers numbers() const;

 private:
  using Registrations = std::vector<std::shared_ptr<Registration>>;
  int32_t register_range(Range range, const Region& region, Registrations* out);
  std::shared_ptr<Registration> covering_locked(uint64_t address) const;
  Span span_of(const Registration& one, uint64_t offset, Range range) const;
  std::vector<Span> gathered_spans(const Region& region);
  static void end_all(Registrations registrations, Deadline deadline);

  const Adapters& adapters_;
  const uint64_t limit_bytes_;

  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Registration>> by_address_;  // disjoint
  std::unordered_map<uint32_t, Registrations> by_region_;
  std::unordered_map<uint32_t, std::vector<Span>> gathered_;  // what peers were told, by region
  MemoryNumbers numbers_;
};

// Memory of our own through which bytes pass whose place is not registered. First fit, in pages.
class Staging {
 public:
  static constexpr uint64_t kBytes = 8 << 20, kPage = 4096;

  explicit Staging(const Adapters& adapters) : adapters_(adapters) {}
  ~Staging();

  // MC_E_BACKPRESSURE: none is free now. MC_E_OUT_OF_SPACE: there can be none.
  int32_t allocate(uint64_t nbytes, uint64_t* out_address);
  void free(uint64_t address, uint64_t nbytes);
  const std::shared_ptr<Registration>& registration() const { return registration_; }

 private:
  int32_t open_locked();

  const Adapters& adapters_;
  std::mutex mutex_;
  bool failed_ = false;
  uint64_t base_ = 0;
  std::shared_ptr<Registration> registration_;
  std::map<uint64_t, uint64_t> free_;  // address to bytes
};

}  // namespace mc::rdma
