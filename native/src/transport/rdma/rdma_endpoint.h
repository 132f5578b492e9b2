// A peer reached over RDMA: messages and control over a TCP connection, bytes by one-sided READ and
// WRITE between the two devices, over one rail or several.
//
// Parts take one of two ways. By rail, when the peer's device may reach its end of the bytes (the
// owner told us so, once a region: query, region) and ours may reach our end: memory in a region of
// ours is used in place, other memory passes through Staging. By the control connection, as with
// tcp: memory that no device can reach, raw memory, and everything once no rail is left, if the
// peers allow tcp at all.
//
// Revocation. The owner says revoked; the reader stops, waits for what is posted and answers. Then,
// or when the answer takes too long, the owner takes the memory back from its devices, which refuse
// everybody from then on. cancel() and close() destroy the queue pairs that still work for what is
// cancelled: a destroyed queue pair moves nothing.
//
// Order of writes. What a destroyed queue pair had sent may still be in the cable. Until the peer has
// said that its half is gone as well (rail_closed), nothing is written by any other way, so that what
// is written later lands later; a write that is cancelled on the control connection holds up those by
// rail likewise. Reads do not wait.
//
// Messages stay on the control connection, so that one sent after a batch had completed is behind
// its data (design/rdma.md).
//
// Lock order: an adapter's poll_mutex_, work_mutex_, leaves (adapter's rails, batch, out queue).
#pragma once

#include <map>
#include <set>
#include <span>

#include "transport/rdma/fabric.h"
#include "transport/rdma/rail.h"
#include "transport/stream/stream_endpoint.h"

namespace mc {

class RdmaEndpoint final : public StreamEndpoint, public rdma::RailOwner {
 public:
  RdmaEndpoint(Host& host, Introduction peer, StreamLimits limits, rdma::Fabric& fabric,
               bool tcp_allowed);
  ~RdmaEndpoint() override;

  uint32_t transport() const override { return MC_TRANSPORT_RDMA; }
  std::string reason() const override;
  std::string paths_json() const override;
  EndpointNumbers numbers() const override;
  void submit(const std::shared_ptr<Batch>& batch, bool blocking) override;
  void cancel(const std::shared_ptr<Batch>& batch, int32_t status, const char* reason) override;
  void forget(const std::shared_ptr<Region>& region) override;
  void wait_forgotten(const Region& region, Deadline deadline) override;
  void issue() override;
  bool other_frame_on_progress(Connection& from, const FrameHead& head,
                               const uint8_t* bytes) override;

  // RailOwner
  void completed(uint32_t rail, const verbs::Wc& completion) override;
  void settle_completed() override;
  void port_changed();  // on the progress thread

  // For the fabric: destroy all rails if nothing is posted. False: they are busy.
  bool evict();

 protected:
  void closed(const Failure& why) override;

 private:
  using Job = rdma::Job;
  using Rail = rdma::Rail;
  using Work = rdma::Work;
  using Jobs = std::vector<std::shared_ptr<Job>>;
  struct Asked {  // a region of the peer: known, or asked for
    std::shared_ptr<rdma::RemoteRegion> region;
    Jobs waiting;
  };
  struct Passive {  // a queue pair that the peer posts to
    uint32_t rail = 0;
    size_t adapter = 0;
    verbs::Qp* qp = nullptr;
  };

  std::shared_ptr<RdmaEndpoint> self() {
    return std::static_pointer_cast<RdmaEndpoint>(shared_from_this());
  }
  std::weak_ptr<rdma::RailOwner> weak_owner() {
    return std::static_pointer_cast<rdma::RailOwner>(self());
  }
  void send_frame(const FrameHead& head, const void* body);

  void look(const std::shared_ptr<Batch>& batch, bool spins);
  static int64_t spin(rdma::Adapter& adapter, const Batch& batch);
  void drop_waiting_locked(const Batch& batch);

  // Work (rdma_work.cc).
  enum class Notice { kByEvent, kLooked };  // how what is posted will be noticed
  void pump(Notice notice = Notice::kByEvent);
  bool next_jobs_locked();
  void begin_job_locked(const std::shared_ptr<Job>& job);
  bool place_locked(const std::shared_ptr<Job>& job);
  enum class Reach { kAll, kNotTheirs, kNotOurs, kGone };
  Reach works_locked(const std::shared_ptr<Job>& job, std::vector<Work>* out);
  void post_locked(Notice notice);
  void post_chain_locked(Rail& rail, std::vector<Work>* works);
  void by_stream_locked(const std::shared_ptr<Job>& job);
  void fail_locked(const std::shared_ptr<Job>& job, int32_t status, std::string why);
  void finish(Job& job);
  void release_locked(Job& job);
  void rails_gone_locked();
  const std::string& why_no_rail_locked() const;
  bool route_locked(const std::shared_ptr<Job>& job);
  bool may_write_locked() const {
    return landing_.empty() && (streamed_parts_ == 0 || !has_late_writes());
  }
  static bool must_end(const Job& job, const Batch& batch);
  void wait_a_little(const Batch& batch);
  void wait_landed();

  // Rails (rdma_rails.cc).
  void look_again_in(uint64_t ms);
  void look_again_soon_locked();
  void time_passed();
  void want_rails_locked();
  void connect_locked(size_t index);
  int32_t make_ready(const Rail& rail, const rdma::RailAnswer& answer);
  bool offer_on_progress(const FrameHead& head, const uint8_t* bytes);
  bool answer_on_progress(const FrameHead& head, const uint8_t* bytes);
  int32_t accept_locked(const rdma::RailOffer& offer, uint64_t attempt, rdma::RailAnswer* answer);
  void close_passive_locked(uint64_t attempt);
  void close_on_progress(const FrameHead& head);
  void closed_on_progress(uint64_t attempt);
  void take_posted_locked(Rail& rail, std::deque<Work>* out);
  enum class Tell { kNobody, kPeer, kPeerAndWait };
  void destroy_locked(Rail& rail, Tell tell);
  void break_locked(Rail& rail, const std::string& why, bool counts);
  void succeeded_locked(Rail& rail, uint32_t sequence, bool inclusive);
  bool any_hope_locked() const;

  // Regions (rdma_regions.cc).
  void ask_locked(uint32_t id);
  void answer_query_on_progress(const FrameHead& head);
  void answer_query(uint32_t id);
  bool learn_on_progress(const FrameHead& head, const uint8_t* bytes);
  void revoked_on_progress(uint32_t id);
  void acknowledge(uint32_t id);

  rdma::Fabric& fabric_;
  const bool tcp_allowed_;
  const size_t peer_ports_;

  mutable std::mutex work_mutex_;  // guards all below
  bool ended_ = false;
  std::vector<Rail> rails_;
  uint64_t next_attempt_ = 1;
  std::map<uint64_t, Passive> passive_;
  std::set<uint64_t> landing_;  // attempts whose writes may still land
  std::shared_ptr<Event> landed_;  // that there are none; null: nobody waits
  std::deque<std::shared_ptr<Batch>> batches_;  // with parts not handed out
  std::map<uint32_t, Asked> regions_;
  std::deque<std::shared_ptr<Job>> unplaced_;  // wait for room in Staging, or for writes to land
  std::deque<Work> ready_;                     // to be posted
  Jobs finished_;
  uint64_t flights_ = 0;  // jobs
  bool looks_soon_ = false;
  uint64_t staged_parts_ = 0, streamed_parts_ = 0;
  std::string trouble_;  // why the control connection carries data, if it does

  std::mutex told_mutex_;                                  // a leaf
  std::set<uint32_t> told_;                                // regions of ours the peer may reach
  struct Forgetting {
    std::shared_ptr<Event> answered;
    Deadline grace;
  };
  std::map<uint32_t, Forgetting> forgetting_;
};

}  // namespace mc
