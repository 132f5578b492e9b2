#include "transport/stream/stream_endpoint.h"

#include <algorithm>
#include <new>

#include "base/address.h"

namespace mc {
namespace {

constexpr uint64_t kStripeMin = 64 << 10;
constexpr uint64_t kMergedMax = 256 << 10;  // small slices in one part; lanes still have their share
constexpr uint64_t kNearBytes = 4 << 20;    // in flight on one host (design/tcp.md)

}  // namespace

Bytes allocate_bytes(uint64_t nbytes) {
  return Bytes(static_cast<uint8_t*>(malloc(std::max<uint64_t>(nbytes, 1))));
}

StreamEndpoint::StreamEndpoint(Host& host, Introduction peer, StreamLimits limits,
                               std::string reason)
    : host_(host), peer_(std::move(peer)), limits_(limits), reason_(std::move(reason)) {}

int32_t StreamEndpoint::add_lane(Fd fd, bool passes_fds) {
  auto lane = std::make_shared<Connection>(std::move(fd), passes_fds, *this, host_,
                                           limits_, peer_.message_window);
  if (transport() == MC_TRANSPORT_TCP) near_ = stays_here(lane->fd());
  {
    const std::lock_guard lock(lanes_mutex_);
    if (closed_) return fail(MC_E_PEER_UNREACHABLE, "the peer is gone");
    lanes_.push_back(lane);
    if (!started_) return MC_OK;
  }
  return lane->start(shared_from_this());
}

int32_t StreamEndpoint::start() {
  Lanes starting;
  {
    const std::lock_guard lock(lanes_mutex_);
    started_ = true;
    starting = lanes_;
  }
  for (const auto& lane : starting) {
    if (const int32_t status = lane->start(shared_from_this()); status != MC_OK) return status;
  }
  return MC_OK;
}

StreamEndpoint::Lanes StreamEndpoint::lanes() const {
  const std::lock_guard lock(lanes_mutex_);
  return lanes_;
}

std::shared_ptr<Connection> StreamEndpoint::lane(size_t i) const {
  const std::lock_guard lock(lanes_mutex_);
  return lanes_[i];
}

Failure StreamEndpoint::why_closed() const {
  const std::lock_guard lock(lanes_mutex_);
  return why_;
}

EndpointNumbers StreamEndpoint::numbers() const {
  EndpointNumbers sum;
  for (const auto& lane : lanes()) {
    sum.bytes_in += lane->received_bytes();
    sum.bytes_out += lane->out().sent_bytes();
    sum.queued_bytes += lane->out().queued_bytes();
  }
  sum.in_flight = in_flight_;
  return sum;
}

// Of unix sockets there is nothing to tell.
std::string StreamEndpoint::paths_json() const {
  std::string out = "[";
  for (const auto& lane : lanes()) {
    const std::string local = local_end(lane->fd()), remote = remote_end(lane->fd());
    if (local.empty() || remote.empty()) continue;
    out += (out.size() > 1 ? ", " : "") + std::string("{\"local\": \"") + local +
           "\", \"remote\": \"" + remote + "\"}";
  }
  return out + "]";
}

void StreamEndpoint::submit(const std::shared_ptr<Batch>& batch, bool /*blocking*/) {
  {
    const std::lock_guard lock(issue_mutex_);
    if (!closed_) {
      waiting_.push_back(batch);
      ++waiting_count_;
    }
  }
  if (closed_) {
    const Failure why = why_closed();
    batch->finish(why.status, why.reason.c_str());
    return;
  }
  issue();
}

bool StreamEndpoint::any_late(const Lanes& lanes) {
  return std::any_of(lanes.begin(), lanes.end(),
                     [](const auto& lane) { return lane->parts().late() > 0; });
}

bool StreamEndpoint::has_late_writes() const {
  const std::lock_guard lock(lanes_mutex_);
  return any_late(lanes_);
}

void StreamEndpoint::issue() {
  if (waiting_count_ == 0) return;
  const std::lock_guard lock(issue_mutex_);
  const Lanes& lanes = lanes_to_issue_locked();
  const bool held = any_late(lanes);
  for (size_t idle = 0; idle < waiting_.size() && has_room(lanes);) {
    const std::shared_ptr<Batch> batch = waiting_.front();
    const bool waits = held && batch->writes();
    const Issued issued = waits ? Issued::kNothing : issue_turn(batch, lanes);
    idle = issued == Issued::kNothing ? idle + 1 : 0;
    if (issued == Issued::kAll) {
      waiting_.pop_front();
      --waiting_count_;
    } else {
      std::rotate(waiting_.begin(), waiting_.begin() + 1, waiting_.end());
    }
  }
  for (size_t i = 0; i < lanes.size(); ++i) {
    const std::vector<ReadEntry>& reads = reads_[i];
    for (size_t at = 0; at < reads.size(); at += kEntriesMax) {
      const size_t n = std::min<size_t>(reads.size() - at, kEntriesMax);
      FrameHead head;
      head.type = FrameType::kRead;
      head.a = static_cast<uint32_t>(n);
      head.nbytes = static_cast<uint32_t>(n * sizeof(ReadEntry));
      (void)lanes[i]->write([&](OutQueue& out) {
        return out.send(head, reads.data() + at, OutQueue::Room::kAlways);
      });
    }
    reads_[i].clear();
    issued(*lanes[i]);
  }
}

const StreamEndpoint::Lanes& StreamEndpoint::lanes_to_issue_locked() {
  const std::lock_guard lock(lanes_mutex_);
  if (issue_lanes_.size() != lanes_.size()) {
    reads_.resize(lanes_.size());
    issue_lanes_ = lanes_;
  }
  return issue_lanes_;
}

bool StreamEndpoint::has_room(const Lanes& lanes) const {
  if (in_flight_ >= kWindow) return false;
  if (!near_) return true;
  uint64_t bytes = 0;
  for (const auto& lane : lanes) bytes += lane->parts().bytes();
  return bytes < kNearBytes;
}

StreamEndpoint::Issued StreamEndpoint::issue_turn(const std::shared_ptr<Batch>& batch,
                                                  const Lanes& lanes) {
  Issued issued = Issued::kNothing;
  for (uint64_t bytes = 0; bytes < kPartMax && has_room(lanes);) {
    Part part;
    const Batch::Next next = batch->next_part(kPartMax, write_part_max(), &part, kMergedMax);
    if (next == Batch::Next::kFence) return issued;
    if (next == Batch::Next::kEnd) return Issued::kAll;
    issued = Issued::kSome;
    bytes += part.length;
    const size_t i = part.length >= kStripeMin ? turn_++ % lanes.size() : 0;
    ++in_flight_;
    const uint64_t tag = lanes[i]->parts().add(batch, part);
    if (tag == 0) {
      --in_flight_;
      batch->part_done(part, MC_E_PEER_UNREACHABLE, 0, "the peer is gone");
      continue;
    }
    if (!passes(part)) continue;
    if (part.op == MC_OP_READ) {
      reads_[i].push_back({tag, part.region, 0, part.remote_offset, part.length});
    } else {
      issue_write(*lanes[i], batch, part, tag);
    }
  }
  return issued;
}

bool StreamEndpoint::issue_part(const std::shared_ptr<Batch>& batch, const Part& part) {
  const std::shared_ptr<Connection> by = lane(0);
  ++in_flight_;
  const uint64_t tag = by->parts().add(batch, part);
  if (tag == 0) {
    --in_flight_;
    return false;
  }
  if (part.op == MC_OP_WRITE) {
    if (!by->out().push(write_head(part, tag), batch, part.local)) by->parts().not_sent(tag);
    by->flush();
    return true;
  }
  const ReadEntry entry{tag, part.region, 0, part.remote_offset, part.length};
  FrameHead head;
  head.type = FrameType::kRead;
  head.a = 1;
  head.nbytes = sizeof entry;
  (void)by->write(
      [&](OutQueue& out) { return out.send(head, &entry, OutQueue::Room::kAlways); });
  return true;
}

FrameHead StreamEndpoint::write_head(const Part& part, uint64_t tag) {
  FrameHead head;
  head.type = FrameType::kWrite;
  head.tag = tag;
  head.a = part.region;
  head.b = part.crc ? kWriteCrc : 0;
  head.c = part.remote_offset;
  head.nbytes = static_cast<uint32_t>(part.length);
  return head;
}

void StreamEndpoint::issue_write(Connection& lane, const std::shared_ptr<Batch>& batch,
                                 const Part& part, uint64_t tag) {
  if (!lane.out().push(write_head(part, tag), batch, part.local)) lane.parts().not_sent(tag);
}

void StreamEndpoint::issued(Connection& lane) {
  if (lane.out().full()) return;
  lane.write([](OutQueue& out) { out.pump_or_defer(); });
}

void StreamEndpoint::part_over(const std::shared_ptr<Batch>& batch, const Part& part,
                               int32_t status, uint32_t crc) {
  --in_flight_;
  const char* why = status == MC_E_ACCESS ? kRefused : "the peer reported a failure";
  if (!batch->part_done(part, status, crc, why)) return;
  {
    const std::lock_guard lock(issue_mutex_);
    if (std::find(waiting_.begin(), waiting_.end(), batch) != waiting_.end()) return;
    if (!closed_) {
      waiting_.push_back(batch);
      ++waiting_count_;
      return;
    }
  }
  const Failure gone = why_closed();
  cancel(batch, gone.status, gone.reason.c_str());
}

bool StreamEndpoint::other_frame_on_progress(Connection&, const FrameHead&, const uint8_t*) {
  return false;
}

void StreamEndpoint::cancel(const std::shared_ptr<Batch>& batch, int32_t status,
                            const char* reason) {
  batch->stop();
  {
    const std::lock_guard lock(issue_mutex_);
    if (std::erase(waiting_, batch) > 0) --waiting_count_;
  }
  for (const auto& lane : lanes()) {
    const std::vector<uint64_t> tags = lane->parts().forget(*batch);
    in_flight_ -= tags.size();
    const std::vector<uint64_t> unsent =
        lane->write([&](OutQueue& out) { return out.forget_batch(*batch); });
    for (const uint64_t tag : unsent) lane->parts().not_sent(tag);
    call_off(*lane, tags);
  }
  batch->finish(status, reason);
  issue();
}

// What nobody waits for need not be sent: the owner is told.
void StreamEndpoint::call_off(Connection& lane, std::span<const uint64_t> tags) {
  while (!tags.empty()) {
    const auto some = tags.first(std::min<size_t>(tags.size(), kEntriesMax));
    FrameHead head;
    head.type = FrameType::kCancel;
    head.a = static_cast<uint32_t>(some.size());
    head.nbytes = static_cast<uint32_t>(some.size_bytes());
    (void)lane.write([&](OutQueue& out) {
      return out.send(head, some.data(), OutQueue::Room::kAlways);
    });
    tags = tags.subspan(some.size());
  }
}

void StreamEndpoint::taken(uint32_t nbytes) { lane(0)->taken(nbytes); }

int32_t StreamEndpoint::send(const MessageHead& message, const void* bytes, Deadline deadline) {
  if (message.nbytes > peer_.message_max_bytes) {
    return fail(MC_E_USAGE, "the message has %u bytes, the peer accepts %u", message.nbytes,
                peer_.message_max_bytes);
  }
  if (closed_) return why_closed().raise();
  FrameHead head;
  head.type = FrameType::kMessage;
  head.tag = message.correlation;
  head.a = message.kind;
  head.nbytes = message.nbytes;
  const std::shared_ptr<Connection> lane = this->lane(0);
  const int32_t status = lane->write(
      [&](OutQueue& out) { return out.send(head, bytes, OutQueue::Room::kRefuse); });
  if (status != MC_E_BACKPRESSURE) return status;
  host_.loop().watch();  // this thread makes no progress while it waits for room
  return lane->write([&](OutQueue& out) {
    return out.send(head, bytes, OutQueue::Room::kWait, deadline);
  });
}

int32_t StreamEndpoint::reply(uint64_t correlation, const void* bytes, uint32_t nbytes) {
  if (nbytes > peer_.message_max_bytes) {
    return fail(MC_E_USAGE, "the reply has %u bytes, the peer accepts %u", nbytes,
                peer_.message_max_bytes);
  }
  if (closed_) return why_closed().raise();
  FrameHead head;
  head.type = FrameType::kReply;
  head.tag = correlation;
  head.nbytes = nbytes;
  return lane(0)->write([&](OutQueue& out) {
    return out.send(head, bytes, OutQueue::Room::kRefuse);
  });
}

int32_t StreamEndpoint::map(uint32_t region, Deadline, uint64_t*, uint64_t*) {
  return fail(MC_E_ACCESS, "region %u cannot be mapped: the peer is reached by %s", region,
              reason_.c_str());
}

void StreamEndpoint::forget(const std::shared_ptr<Region>& region) {
  for (const auto& lane : lanes()) {
    lane->write([&](OutQueue& out) { return out.forget_region(*region); });
  }
}

void StreamEndpoint::close(const Failure& why) {
  Lanes closing;
  {
    const std::lock_guard lock(lanes_mutex_);
    if (closed_) return;
    closing = lanes_;  // what may fail for want of memory comes first; then it can be done again
    why_ = why;
    closed_ = true;
  }
  const auto self = shared_from_this();  // the engine may let go of it in lost()
  try {
    end_all(closing, why);
  } catch (const std::bad_alloc&) {
    // What was not ended ends at its deadline.
  }
  host_.lost(*this, why);
}

void StreamEndpoint::end_all(const Lanes& closing, const Failure& why) {
  for (const auto& lane : closing) {
    lane->close();
    for (const PartTable::Entry& entry : lane->parts().close()) {
      if (!entry.batch) continue;
      --in_flight_;
      entry.batch->part_done(entry.part, why.status, 0, why.reason.c_str());
    }
  }
  std::deque<std::shared_ptr<Batch>> waiting;
  {
    const std::lock_guard lock(issue_mutex_);
    waiting.swap(waiting_);
    waiting_count_ = 0;
  }
  for (const auto& batch : waiting) batch->finish(why.status, why.reason.c_str());
  closed(why);
}

void StreamEndpoint::closed(const Failure&) {}

}  // namespace mc
