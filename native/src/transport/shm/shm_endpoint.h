// A peer on this host: messages and control over a unix socket, bytes through shared memory.
//
// Reads are one-sided: the reader learns what a region looks like once (query, region), then copies
// from its mapping or with process_vm_readv, in the calling thread. The owner remembers whom it
// told; when it deregisters it says revoked, and the reader answers once no copy runs any more.
//
// Writes into a mapped memfd are one-sided as well, by permission that the owner can take back at any
// time (gate.h, design/remote-write.md); it is given to a process that might look into the owner's
// memory anyway. All others are executed by the owner, which pulls the bytes out of the writer's
// process. Where process_vm_readv is not permitted, bytes travel through the socket as with TCP. A
// blocking batch that is one-sided throughout runs where it was called; an asynchronous one never
// waits for an answer: what is not known yet goes through the socket, and is asked for on the side.
#pragma once

#include <map>
#include <set>
#include <span>

#include "transport/shm/proof.h"
#include "transport/shm/remote_region.h"
#include "transport/stream/stream_endpoint.h"

namespace mc {

class ShmEndpoint final : public StreamEndpoint {
 public:
  ShmEndpoint(Host& host, Introduction peer, StreamLimits limits, ShmTies ties);

  uint32_t transport() const override { return MC_TRANSPORT_SHM; }
  std::string reason() const override;
  EndpointNumbers numbers() const override;
  void submit(const std::shared_ptr<Batch>& batch, bool blocking) override;
  int32_t run_now(std::span<mc_slice> slices) override;
  int32_t map(uint32_t region, Deadline deadline, uint64_t* out_address,
              uint64_t* out_nbytes) override;
  void forget(const std::shared_ptr<Region>& region) override;
  void wait_forgotten(const Region& region, Deadline deadline) override;
  bool other_frame_on_progress(Connection& from, const FrameHead& head,
                               const uint8_t* bytes) override;

 protected:
  uint64_t write_part_max() const override { return ties_.it_reads ? kPullMax : kPartMax; }
  void issue_write(Connection& lane, const std::shared_ptr<Batch>& batch, const Part& part,
                   uint64_t tag) override;
  void issued(Connection& lane) override;
  void called_off_on_progress(std::span<const uint64_t> tags) override;
  void closed(const Failure& why) override;

 private:
  struct Query {
    Event done;
    int32_t status = MC_OK;
    std::shared_ptr<RemoteRegion> region;
  };
  struct Result {
    int32_t status = MC_E_ACCESS;
    uint32_t crc = 0;
  };
  using Regions = std::map<uint32_t, std::shared_ptr<RemoteRegion>>;

  // One-sided reads and writes.
  std::shared_ptr<RemoteRegion> known(uint32_t id);
  std::shared_ptr<Query> ask(uint32_t id);
  int32_t resolve(uint32_t id, Deadline deadline, std::shared_ptr<RemoteRegion>* out);
  bool reachable(RemoteRegion& region, uint32_t op, bool may_map);
  bool gather_regions(const Batch& batch, bool blocking, Regions* out);
  void run(const std::shared_ptr<Batch>& batch, const Regions& regions);
  bool copy_group(const std::shared_ptr<Batch>& batch, const Regions& regions,
                  const std::vector<Part>& group);
  Result copy_mapped(RemoteRegion& region, const Part& part);
  Result read_file(const RemoteRegion& region, const Part& part);
  void copy_by_process(const Regions& regions, const std::vector<Part>& group,
                       const std::vector<size_t>& which, std::vector<Result>* results);
  int32_t read_memory(std::span<const iovec> here, std::span<const iovec> there);
  bool process_lives() const;

  // The owner's side.
  void answer_query_on_progress(Connection& from, const FrameHead& head);
  Fd file_for_peer(Connection& from, const std::shared_ptr<Region>& region, uint64_t* out_flags);
  bool join_gate_on_progress(Connection& from);
  bool learn_on_progress(Connection& from, const FrameHead& head, const uint8_t* bytes);
  void let_go_on_progress(Connection& from, uint32_t id);
  bool pull_on_progress(Connection& from, const FrameHead& head, const uint8_t* bytes);
  void pull(const PullEntry& entry, FrameHead* done);
  void pull_all(Connection& lane, const std::vector<PullEntry>& entries);
  bool is_called_off(uint64_t tag);

  ShmTies ties_;
  const std::shared_ptr<PeerProcess> process_;  // null: not visible
  std::vector<PullEntry> pulls_;  // of the round of issue() that runs; under its lock

  std::mutex mutex_;  // a leaf; guards all below
  Regions regions_;
  std::map<uint64_t, std::shared_ptr<Query>> queries_;
  std::shared_ptr<GateKeeper> keeper_;  // of our regions; made when the peer may write one
  bool gate_failed_ = false;
  std::shared_ptr<Gate> gate_;          // of the peer's
  uint64_t next_query_ = 1;
  std::set<uint32_t> told_;                               // regions of ours the peer may look at
  std::map<uint32_t, std::shared_ptr<Event>> forgetting_;
  std::map<uint64_t, bool> pulling_;  // by tag, those that the executor has; true: called off
  std::atomic<uint64_t> direct_in_{0}, direct_out_{0}, pulled_in_{0};
};

}  // namespace mc
