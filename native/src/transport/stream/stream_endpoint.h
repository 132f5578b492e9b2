// A peer reached over framed connections: messages, reads and writes on one or more lanes.
//
// A write that was cancelled may have bytes on their way. Batches that write wait until the peer has
// answered those (PartTable::late), so that what is written later lands later, whichever lane it takes.
//
// Lane 0 carries messages and small parts, in order; parts of kStripeMin and more take turns over
// all lanes. Any broken lane is the end of the endpoint: the peer is opened anew.
//
// Batches take turns, a large part each. Between two ends on one host few bytes are in flight
// (kNearBytes): what waits in socket buffers should still be in the caches when it is taken.
//
// Lock order: issue_mutex_ before a part table's or an out queue's; never two of the latter.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/stream/connection.h"

namespace mc {

class StreamEndpoint : public Endpoint, public std::enable_shared_from_this<StreamEndpoint> {
 public:
  StreamEndpoint(Host& host, Introduction peer, StreamLimits limits, std::string reason);

  // Before start() (lane 0) or later (more lanes).
  int32_t add_lane(Fd fd, bool passes_fds = false);
  int32_t start();

  uint32_t transport() const override { return MC_TRANSPORT_TCP; }
  std::string reason() const override { return reason_; }
  EndpointNumbers numbers() const override;
  std::string paths_json() const override;
  void submit(const std::shared_ptr<Batch>& batch, bool blocking) override;
  void cancel(const std::shared_ptr<Batch>& batch, int32_t status, const char* reason) override;
  int32_t send(const MessageHead& head, const void* bytes, Deadline deadline) override;
  int32_t reply(uint64_t correlation, const void* bytes, uint32_t nbytes) override;
  int32_t map(uint32_t region, Deadline deadline, uint64_t* out_address,
              uint64_t* out_nbytes) override;
  void forget(const std::shared_ptr<Region>& region) override;
  void wait_forgotten(const Region&, Deadline) override {}
  void taken(uint32_t nbytes) override;
  void close(const Failure& why) override;

  uint32_t message_bytes_max() const { return limits_.message_bytes_max; }
  const Introduction& peer() const { return peer_; }
  bool is_near() const { return near_; }  // by TCP, and both ends have one address
  virtual bool carries_bytes() const { return true; }  // false: whoever sends any is cut

  // For its connections.
  virtual void issue();
  virtual void part_over(const std::shared_ptr<Batch>& batch, const Part& part, int32_t status,
                         uint32_t crc);
  // The peer waits no more for the parts with these tags, which it asked us to fetch.
  virtual void called_off_on_progress(std::span<const uint64_t>) {}
  // A frame that only some stream transports know. False: against the protocol.
  virtual bool other_frame_on_progress(Connection& from, const FrameHead& head,
                                       const uint8_t* bytes);

 protected:
  // False: the part is not sent, as if it had been lost on the way. Called in issue().
  virtual bool passes(const Part&) { return true; }
  // Send one part by lane 0, which was handed out by somebody else. False: the peer is gone.
  bool issue_part(const std::shared_ptr<Batch>& batch, const Part& part);
  static FrameHead write_head(const Part& part, uint64_t tag);
  // How a write travels; default: its bytes are pushed. Called in issue().
  virtual uint64_t write_part_max() const { return kPartMax; }
  virtual void issue_write(Connection& lane, const std::shared_ptr<Batch>& batch, const Part& part,
                           uint64_t tag);
  virtual void issued(Connection& lane);  // everything of this round was handed to issue_write
  virtual void closed(const Failure& why);

  // Whether cancelled writes may still land.
  bool has_late_writes() const;

  std::shared_ptr<Connection> lane(size_t i) const;
  bool is_closed() const { return closed_; }
  Failure why_closed() const;
  Host& host() { return host_; }

 private:
  using Lanes = std::vector<std::shared_ptr<Connection>>;
  Lanes lanes() const;
  void end_all(const Lanes& closing, const Failure& why);
  static bool any_late(const Lanes& lanes);
  bool has_room(const Lanes& lanes) const;
  enum class Issued { kAll, kSome, kNothing };  // kNothing: it waits for its own parts
  Issued issue_turn(const std::shared_ptr<Batch>& batch, const Lanes& lanes);
  const Lanes& lanes_to_issue_locked();
  static void call_off(Connection& lane, std::span<const uint64_t> tags);

  Host& host_;
  const Introduction peer_;
  const StreamLimits limits_;
  const std::string reason_;

  mutable std::mutex lanes_mutex_;
  Lanes lanes_;
  bool started_ = false;
  Failure why_;

  std::mutex issue_mutex_;
  std::deque<std::shared_ptr<Batch>> waiting_;  // batches with parts not handed out
  Lanes issue_lanes_;  // as lanes_, which only grows; kept, as the next is, to need no memory each time
  std::vector<std::vector<ReadEntry>> reads_;  // of this round, for each lane
  uint64_t turn_ = 0;
  std::atomic<uint64_t> waiting_count_{0};
  std::atomic<uint64_t> in_flight_{0};  // parts
  std::atomic<bool> closed_{false}, near_{false};
};

}  // namespace mc
