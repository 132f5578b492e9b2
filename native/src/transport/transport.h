// The contract between the engine and its transports. Read this before writing a transport.
//
// An Endpoint is one connected peer on one path. Transports know bytes, regions and frames; they
// know nothing of the engine but the Host they were given, and call upward through it only.
//
// Threads. Functions of Endpoint may be called from any thread, and several at once, unless a
// sentence says otherwise. Functions named ..._on_progress run on the progress thread and never
// block. Host functions are called without any lock of the transport held.
//
// Ownership. The engine owns endpoints by shared_ptr; a transport holds itself alive while it
// works. A Batch belongs to its handle and to the endpoint that runs it.
//
// Safety. Only the owner's process writes into its memory, and only while a Pin is held (regions)
// or while the batch is not stopped (local memory of slices). After cancel(), forget() or close()
// returned, no byte of the memory in question is written.
//
// Errors. A call that fails says so by its status with the words in last_error(). What fails later
// is reported by part_done() or Host::lost(), once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/executor.h"
#include "base/loop.h"
#include "base/random.h"
#include "base/status.h"
#include "transport/batch.h"
#include "transport/region.h"

namespace mc {

class Endpoint;

// Bytes of a message, from malloc so that they can be handed over the C ABI.
struct FreeBytes {
  void operator()(uint8_t* bytes) const { free(bytes); }
};
using Bytes = std::unique_ptr<uint8_t, FreeBytes>;
Bytes allocate_bytes(uint64_t nbytes);  // null when there is no memory

struct MessageHead {
  uint64_t correlation = 0;  // 0: nobody waits for a reply
  uint32_t kind = 0;
  uint32_t nbytes = 0;
};

// Waits for room in the received-message queue.
class RoomWaiter {
 public:
  virtual ~RoomWaiter() = default;
  virtual void room() = 0;  // from any thread; must not block
};

// What the engine offers to its transports.
class Host {
 public:
  virtual ~Host() = default;
  virtual std::shared_ptr<Region> region(uint32_t id) = 0;
  // Room for a message of this size among those received and not yet taken. False: none now;
  // waiter->room() is called once there may be. reserve() comes before deliver(). Without a
  // waiter there is always room: for transports whose senders have a window.
  virtual bool reserve(uint32_t nbytes, const std::shared_ptr<RoomWaiter>& waiter) = 0;
  // True: too many messages lie there for asking for more; else waiter->room() as above.
  virtual bool is_crowded(const std::shared_ptr<RoomWaiter>& waiter) = 0;
  virtual void unreserve(uint32_t nbytes) = 0;
  virtual void deliver(Endpoint& from, const MessageHead& head, Bytes bytes) = 0;
  virtual void deliver_reply(Endpoint& from, uint64_t correlation, Bytes bytes,
                             uint32_t nbytes) = 0;
  // The endpoint is gone for good, for this reason. Once for each endpoint.
  virtual void lost(Endpoint& endpoint, const Failure& why) = 0;
  virtual void refused() = 0;  // count one request that was refused or a peer that was cut
  virtual Loop& loop() = 0;
  virtual Executor& executor() = 0;
};

// The words for MC_E_ACCESS.
inline constexpr const char* kRefused =
    "the peer refused the region, range or direction, or its memory is not mapped any more";

struct EndpointNumbers {
  uint64_t bytes_in = 0, bytes_out = 0, queued_bytes = 0, in_flight = 0;
};

inline constexpr size_t kNowSlices = 16;
inline constexpr int32_t kNotNow = 1;

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual uint32_t transport() const = 0;  // MC_TRANSPORT_*
  // Why this transport and these ways of moving data, in words.
  virtual std::string reason() const = 0;
  virtual EndpointNumbers numbers() const = 0;
  // The paths to the peer with the state of each: a JSON array.
  virtual std::string paths_json() const { return "[]"; }

  // Start the batch. `blocking`: the caller waits for it anyway, so that copies may run in the
  // calling thread (until the batch's deadline); otherwise return soon. Never fails: what cannot
  // be done is reported into the batch.
  virtual void submit(const std::shared_ptr<Batch>& batch, bool blocking) = 0;
  // Do all of it in the calling thread: no waiting, no memory, no system call where it can be helped.
  // At most kNowSlices, which Batch::check() accepted; fills in their status and crc. The first
  // failure's status, with its words; kNotNow: that cannot be, and nothing of it has begun.
  virtual int32_t run_now(std::span<mc_slice>) { return kNotNow; }
  // Stop the batch: after it returned no local byte is written for it and it is finished with
  // `status`. Waits for copies that run, never for the peer.
  virtual void cancel(const std::shared_ptr<Batch>& batch, int32_t status, const char* reason) = 0;

  // One-way or request, in order. The bytes are the caller's again when it returns. Waits for
  // room until the deadline (MC_E_TIMEOUT).
  virtual int32_t send(const MessageHead& head, const void* bytes, Deadline deadline) = 0;
  // Never waits: MC_E_BACKPRESSURE when the peer does not take its replies.
  virtual int32_t reply(uint64_t correlation, const void* bytes, uint32_t nbytes) = 0;
  // The program took a message of this size that was delivered by this endpoint. Does not wait.
  virtual void taken(uint32_t nbytes) = 0;

  // Map a region of the peer into this process, read-only and populated; the mapping is the
  // caller's to munmap. MC_E_ACCESS: cannot be mapped.
  virtual int32_t map(uint32_t region, Deadline deadline, uint64_t* out_address,
                      uint64_t* out_nbytes) = 0;

  // A region of ours was revoked: nothing of it is sent any more once this returned. Does not wait.
  virtual void forget(const std::shared_ptr<Region>& region) = 0;
  // After forget(): wait until the peer does not look at the region by itself any more. A peer that
  // still does at the deadline is cut.
  virtual void wait_forgotten(const Region& region, Deadline deadline) = 0;

  // Cut the connection; batches end with `why`, Host::lost() is called. Idempotent, not blocking
  // but for copies that run.
  virtual void close(const Failure& why) = 0;

  // Set by the engine before the endpoint is used.
  uint64_t peer_id = 0;
};

// What two engines told each other when they met.
struct Introduction {
  Token incarnation{};
  std::string address;  // where this peer accepts connections; "" when it does not listen
  uint32_t transports = 0;
  uint32_t message_max_bytes = 0;
  uint32_t message_window = 0;  // bytes of messages it lets be on their way to it
  uint32_t rdma_ports = 0;      // that it has
};

}  // namespace mc
