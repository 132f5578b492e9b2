// Permission for a peer on this host to write into a region by itself, and the way to take it back.
//
// A gate is a page that the owner of regions shares with one peer. Each region that the peer may
// write has a slot there: `open` holds the region's id while it may, `writers` counts the copies that
// run. A writer counts itself in, copies while `open` is the id (guarded_copy.h), counts itself out.
//
// The owner closes the slot and is safe once nobody is counted in, or the writer's process has
// ended, or all of its threads have been seen standing still since: a copy that was interrupted looks
// at `open` before it goes on. Ids are never used again, so a slot may be.
#pragma once

#include <atomic>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/fd.h"
#include "transport/region.h"

namespace mc {

struct GateSlot {
  std::atomic<uint32_t> open{0};
  std::atomic<uint32_t> writers{0};
  std::array<uint8_t, 56> reserved{};
};
static_assert(sizeof(GateSlot) == 64 && std::atomic<uint32_t>::is_always_lock_free);

inline constexpr uint32_t kGateSlots = 64;

// The page, mapped for reading and writing on both sides. Thread-safe.
class Gate {
 public:
  ~Gate();
  // The owner's; empty when there is no memory.
  static std::shared_ptr<Gate> make(Fd* out_fd);
  // The writer's; empty when `fd` is no such page.
  static std::shared_ptr<Gate> join(const Fd& fd);

  GateSlot& slot(uint32_t i) { return slots_[i]; }

 private:
  explicit Gate(GateSlot* slots) : slots_(slots) {}
  GateSlot* const slots_;
};

// The process of a peer, held so that its number is not taken for another's. Thread-safe.
class PeerProcess {
 public:
  PeerProcess(pid_t pid, Fd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}
  pid_t pid() const { return pid_; }
  bool lives() const;
  // True: each of its threads was seen stopped by a signal or a debugger, or is gone.
  bool stands_still() const;

 private:
  const pid_t pid_;
  const Fd pidfd_;
};

// The owner's side of a gate: which regions one peer may write.
class GateKeeper {
 public:
  GateKeeper(std::shared_ptr<Gate> gate, std::shared_ptr<PeerProcess> peer)
      : gate_(std::move(gate)), peer_(std::move(peer)) {}
  // Let the peer write there. The slot, or -1: none is free, or the region is being revoked.
  int32_t admit(const std::shared_ptr<Region>& region);
  // The peer was lost: nothing new begins.
  void close();

 private:
  class Admission;

  const std::shared_ptr<Gate> gate_;
  const std::shared_ptr<PeerProcess> peer_;
  std::mutex mutex_;
  bool closed_ = false;
};

}  // namespace mc
