// One path to a peer: (our port, its port), the queue pair on it, and what is posted there.
//
//   idle ──offer──► connecting ──answer──► ready ──error──► paused ──pause over──► connecting
//    ▲                  └──refused, no answer──► paused        │
//    └──────── evicted, closed by us                           └─ too often in a row: down
//
// Queue pairs are one-way: who wants to read or write makes a pair of them, and only his side posts.
// The other one's only lets its device answer. So both sides never connect against each other, and
// an error concerns nobody but its maker. A queue pair that failed is destroyed, which is also what
// guarantees that nothing of it is still on its way, and a new one is made.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "transport/batch.h"
#include "transport/rdma/memory_book.h"

namespace mc::rdma {

// A region of the peer as it was described to us.
struct RemoteRegion {
  uint32_t id = 0, access = 0;
  uint64_t nbytes = 0;
  std::vector<Span> spans;  // ascending, disjoint
  uint64_t users = 0;       // parts on their way
  bool revoked = false;     // the owner waits until there are none

  bool allows(uint32_t wanted, uint64_t offset, uint64_t length) const {
    return (access & wanted) == wanted && offset <= nbytes && length <= nbytes - offset;
  }
  // The span that holds this offset, or null.
  const Span* at(uint64_t offset) const;
};

// A part of a batch on its way: one work request, or several where it crosses registrations.
struct Job {
  std::shared_ptr<Batch> batch;
  Part part;
  std::shared_ptr<RemoteRegion> region;
  uint64_t open = 0;    // work requests not completed
  uint64_t staged = 0;  // address in Staging; 0: in place
  uint32_t tries = 0;
  int32_t status = MC_OK;
  std::string why;

  uint64_t local() const { return staged != 0 ? staged : part.local; }
  bool writes() const { return part.op == MC_OP_WRITE; }
};

struct Work {
  std::shared_ptr<Job> job;
  std::shared_ptr<Registration> memory;  // that holds the local bytes
  uint64_t local = 0, remote = 0, length = 0;
  const Span* span = nullptr;  // of the job's region
};

struct Posted {
  uint32_t sequence = 0;
  Work work;
};

struct Rail {
  enum class State { kIdle, kConnecting, kReady, kPaused, kDown };

  size_t ours = 0, theirs = 0;  // indices of adapters
  State state = State::kIdle;
  verbs::Qp* qp = nullptr;
  uint32_t number = 0;  // with the adapter
  uint64_t attempt = 0;
  uint32_t inline_bytes = 0, next_sequence = 0, psn = 0;
  std::vector<GidEntry> gids;  // that were offered
  int64_t retry_at_ns = 0;
  Backoff backoff;
  std::deque<Posted> posted;
  uint64_t outstanding_bytes = 0, unsignaled_bytes = 0;
  std::string path;  // addresses and numbers, in words
  std::string why;   // of the last failure
  uint64_t read_bytes = 0, written_bytes = 0, errors = 0, resent = 0, connects = 0;
};

const char* state_name(Rail::State state);

// ---- frames ------------------------------------------------------------------------------------

struct RailOffer {
  uint32_t qp_number = 0, psn = 0, rail = 0, adapter = 0;  // the peer's adapter that is wanted
  uint16_t lid = 0;
  uint8_t link_layer = 0, mtu = 0, rd_atomic = 0, gid_count = 0;
  uint8_t reserved[2]{};
  GidEntry gids[kGidsMax];
};
static_assert(sizeof(RailOffer) == 24 + 24 * kGidsMax);

struct RailAnswer {
  uint32_t qp_number = 0, psn = 0;
  uint16_t lid = 0;
  uint8_t mtu = 0, rd_atomic = 0, gid_index = 0;  // which of the offered
  uint8_t reserved[3]{};
  GidEntry gid;  // the answering side's
  char why[120] = "";
};
static_assert(sizeof(RailAnswer) == 160);

struct RegionHead {  // followed by the spans
  uint64_t nbytes;
  uint32_t access, span_count;
};
static_assert(sizeof(RegionHead) == 16);

inline constexpr uint32_t kRailsMax = 16;  // that a peer may have to us

}  // namespace mc::rdma
