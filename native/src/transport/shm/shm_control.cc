// What the two sides tell each other: which regions there are, that they are gone, what to pull.
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "transport/shm/guarded_copy.h"
#include "transport/shm/shm_endpoint.h"

namespace mc {
namespace {

constexpr uint64_t kPieceMax = 1 << 20;     // pulled while one pin is held
constexpr uint32_t kRemoteAccess = MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE;
constexpr uint64_t kInlineMax = 256 << 10;  // of a pull frame, done on the progress thread

}  // namespace

bool ShmEndpoint::pull_on_progress(Connection& from, const FrameHead& head, const uint8_t* bytes) {
  if (head.a == 0) return true;
  std::vector<PullEntry> entries(head.a);
  memcpy(entries.data(), bytes, head.nbytes);
  uint64_t total = 0;
  for (const PullEntry& entry : entries) {
    if (entry.length > kPullMax) return false;
    total += entry.length;
  }
  from.add_work(entries.size());
  if (total <= kInlineMax) {
    pull_all(from, entries);
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    for (const PullEntry& entry : entries) pulling_[entry.tag] = false;
  }
  const auto self = std::static_pointer_cast<ShmEndpoint>(shared_from_this());
  host().executor().run([self, lane = from.shared_from_this(), entries = std::move(entries)] {
    try {
      self->pull_all(*lane, entries);
    } catch (const std::bad_alloc&) {  // what is not answered would be waited for
      self->close({MC_E_PEER_UNREACHABLE, "out of memory"});
    }
    const std::lock_guard lock(self->mutex_);
    for (const PullEntry& entry : entries) self->pulling_.erase(entry.tag);
  });
  return true;
}

void ShmEndpoint::pull_all(Connection& lane, const std::vector<PullEntry>& entries) {
  for (const PullEntry& entry : entries) {
    FrameHead done;
    pull(entry, &done);
    lane.out().queue(done);
    if (entry.length >= kPieceMax) lane.flush();
  }
  lane.flush();
  lane.finish_work(entries.size());
}

// What nobody waits for is not fetched. It is answered all the same: then it lands no more.
void ShmEndpoint::called_off_on_progress(std::span<const uint64_t> tags) {
  const std::lock_guard lock(mutex_);
  for (const uint64_t tag : tags) {
    if (const auto found = pulling_.find(tag); found != pulling_.end()) found->second = true;
  }
}

bool ShmEndpoint::is_called_off(uint64_t tag) {
  const std::lock_guard lock(mutex_);
  const auto found = pulling_.find(tag);
  return found != pulling_.end() && found->second;
}

void ShmEndpoint::pull(const PullEntry& entry, FrameHead* done) {
  done->type = FrameType::kDone;
  done->tag = entry.tag;
  int32_t status = ties_.we_read && !is_closed() ? MC_OK : MC_E_ACCESS;
  uint32_t crc = 0;
  const std::shared_ptr<Region> region = host().region(entry.region);
  if (!region || !region->allows(MC_ACCESS_REMOTE_WRITE, entry.offset, entry.length)) {
    host().refused();
    status = MC_E_ACCESS;
  }
  for (uint64_t at = 0; status == MC_OK && at < entry.length; at += kPieceMax) {
    const uint64_t n = std::min(entry.length - at, kPieceMax);
    if (is_called_off(entry.tag)) {
      status = MC_E_CANCELLED;
      break;
    }
    const Pin pin(region);
    if (!pin || !process_lives()) {
      status = MC_E_ACCESS;
      break;
    }
    std::vector<iovec> here, there;
    region->slice(entry.offset + at, n, &here);
    uint64_t source = entry.source + at;
    for (const iovec& piece : here) {
      there.push_back({reinterpret_cast<void*>(source), piece.iov_len});
      source += piece.iov_len;
    }
    status = read_memory(here, there);
    if (status == MC_OK && (entry.flags & kWriteCrc) != 0) status = region->crc(here, n, &crc);
    if (status == MC_OK) pulled_in_ += n;
  }
  done->a = static_cast<uint32_t>(status);
  done->b = crc;
}

// ---- control frames ------------------------------------------------------------------------------

bool ShmEndpoint::other_frame_on_progress(Connection& from, const FrameHead& head,
                                          const uint8_t* bytes) {
  switch (head.type) {
    case FrameType::kPull:
      return pull_on_progress(from, head, bytes);
    case FrameType::kQuery:
      answer_query_on_progress(from, head);
      return true;
    case FrameType::kRegion:
      return learn_on_progress(from, head, bytes);
    case FrameType::kGate:
      return join_gate_on_progress(from);
    case FrameType::kRevoked:
      let_go_on_progress(from, head.a);
      return true;
    case FrameType::kRevokedAck: {
      std::shared_ptr<Event> event;
      {
        const std::lock_guard lock(mutex_);
        const auto found = forgetting_.find(head.a);
        if (found == forgetting_.end()) return true;
        event = found->second;
        forgetting_.erase(found);
      }
      event->set();
      return true;
    }
    default:
      return false;
  }
}

void ShmEndpoint::answer_query_on_progress(Connection& from, const FrameHead& head) {
  {
    // Before the look at the region: either we see it revoked, or forget() sees that we told.
    const std::lock_guard lock(mutex_);
    told_.insert(head.a);
  }
  FrameHead answer;
  answer.type = FrameType::kRegion;
  answer.tag = head.tag;
  answer.a = head.a;
  const std::shared_ptr<Region> region = host().region(head.a);
  if (!region || !region->alive()) {
    const std::lock_guard lock(mutex_);
    told_.erase(head.a);
    answer.b = static_cast<uint32_t>(MC_E_ACCESS);
    (void)from.out().send(answer, nullptr, OutQueue::Room::kAlways);
    return;
  }
  const std::vector<mc_piece>& pieces = region->pieces();
  const bool fits = sizeof(RegionInfo) + pieces.size() * sizeof(mc_piece) <= kRegionBodyMax;
  const RegionInfo info{region->nbytes(), region->access(),
                        fits ? static_cast<uint32_t>(pieces.size()) : 0};
  std::vector<uint8_t> body(sizeof info + info.piece_count * sizeof(mc_piece));
  memcpy(body.data(), &info, sizeof info);
  if (fits) memcpy(body.data() + sizeof info, pieces.data(), body.size() - sizeof info);
  answer.nbytes = static_cast<uint32_t>(body.size());
  Fd passed = file_for_peer(from, region, &answer.c);
  (void)from.out().send(answer, body.data(), OutQueue::Room::kAlways, Deadline(),
                        std::move(passed));
}

// The memfd of a region, if it has one: for writing when the peer may do that by itself.
Fd ShmEndpoint::file_for_peer(Connection& from, const std::shared_ptr<Region>& region,
                              uint64_t* out_flags) {
  if (region->fd() < 0) return Fd();
  const bool trusted = ties_.it_reads && process_ != nullptr;
  if (trusted && (region->access() & MC_ACCESS_REMOTE_WRITE) != 0) {
    std::shared_ptr<GateKeeper> keeper;
    {
      const std::lock_guard lock(mutex_);
      keeper = keeper_;
    }
    Fd page;
    if (!keeper && !gate_failed_) {  // queries come one after the other
      const std::shared_ptr<Gate> gate = Gate::make(&page);
      gate_failed_ = gate == nullptr;
      if (gate) keeper = std::make_shared<GateKeeper>(gate, process_);
    }
    if (page) {
      const std::lock_guard lock(mutex_);
      keeper_ = keeper;
      if (is_closed()) keeper->close();
      FrameHead head;
      head.type = FrameType::kGate;
      (void)from.out().send(head, nullptr, OutQueue::Room::kAlways, Deadline(), std::move(page));
    }
    const int32_t slot = keeper ? keeper->admit(region) : -1;
    Fd file(slot >= 0 ? fcntl(region->fd(), F_DUPFD_CLOEXEC, 3) : -1);
    if (file) {
      *out_flags = kRegionHasFd | kRegionWritable | static_cast<uint64_t>(slot) << kRegionSlotShift;
      return file;
    }
  }
  Fd file = reopen_read_only(region->fd());
  if (file) *out_flags = kRegionHasFd;
  return file;
}

bool ShmEndpoint::join_gate_on_progress(Connection& from) {
  const Fd page = from.take_fd();
  std::shared_ptr<Gate> gate = can_copy_guarded() ? Gate::join(page) : nullptr;
  const std::lock_guard lock(mutex_);
  if (gate_) return false;  // it comes once
  gate_ = std::move(gate);
  return true;
}

bool ShmEndpoint::learn_on_progress(Connection& from, const FrameHead& head,
                                    const uint8_t* bytes) {
  Fd fd = (head.c & kRegionHasFd) != 0 ? from.take_fd() : Fd();
  std::shared_ptr<RemoteRegion> region;
  if (head.b == 0) {
    RegionInfo info{};
    if (head.nbytes < sizeof info) return false;
    memcpy(&info, bytes, sizeof info);
    if (head.nbytes != sizeof info + uint64_t{info.piece_count} * sizeof(mc_piece)) return false;
    std::vector<mc_piece> pieces(info.piece_count);
    if (info.piece_count > 0) {
      memcpy(pieces.data(), bytes + sizeof info, info.piece_count * sizeof(mc_piece));
    }
    uint64_t sum = 0;
    for (const mc_piece& piece : pieces) {
      if (__builtin_add_overflow(sum, piece.nbytes, &sum)) return false;
    }
    if (info.piece_count > 0 && sum != info.nbytes) return false;
    std::shared_ptr<GateSlot> slot;
    if (const uint64_t i = head.c >> kRegionSlotShift; (head.c & kRegionWritable) != 0) {
      if (i >= kGateSlots) return false;
      const std::lock_guard lock(mutex_);
      if (gate_) slot = {gate_, &gate_->slot(static_cast<uint32_t>(i))};
    }
    region = std::make_shared<RemoteRegion>(head.a, std::move(pieces), info.access & kRemoteAccess,
                                            std::move(fd), std::move(slot));
  }
  const std::lock_guard lock(mutex_);
  const auto found = queries_.find(head.tag);
  if (found == queries_.end()) return true;
  if (region) regions_[head.a] = region;
  found->second->region = std::move(region);
  found->second->status = static_cast<int32_t>(head.b);
  found->second->done.set();
  queries_.erase(found);
  return true;
}

void ShmEndpoint::let_go_on_progress(Connection& from, uint32_t id) {
  std::shared_ptr<RemoteRegion> region;
  {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found != regions_.end()) {
      region = std::move(found->second);
      regions_.erase(found);
    }
  }
  if (region) region->shape()->revoke();
  FrameHead ack;
  ack.type = FrameType::kRevokedAck;
  ack.a = id;
  if (!region || region->shape()->quiet()) {
    (void)from.out().send(ack, nullptr, OutQueue::Room::kAlways);
    return;
  }
  // A copy runs; look again soon.
  const auto again = [self = std::static_pointer_cast<ShmEndpoint>(shared_from_this()),
                      lane = from.shared_from_this(), region, ack](const auto& retry) -> void {
    if (self->is_closed()) return;
    if (region->shape()->quiet()) {
      (void)lane->write(
          [&](OutQueue& out) { return out.send(ack, nullptr, OutQueue::Room::kAlways); });
      return;
    }
    self->host().loop().call_at(Deadline::in_us(200), [retry] { retry(retry); });
  };
  again(again);
}

void ShmEndpoint::forget(const std::shared_ptr<Region>& region) {
  StreamEndpoint::forget(region);
  {
    const std::lock_guard lock(mutex_);
    if (told_.erase(region->id()) == 0 || is_closed()) return;
    forgetting_[region->id()] = std::make_shared<Event>();
  }
  FrameHead head;
  head.type = FrameType::kRevoked;
  head.a = region->id();
  (void)lane(0)->write(
      [&](OutQueue& out) { return out.send(head, nullptr, OutQueue::Room::kAlways); });
}

void ShmEndpoint::wait_forgotten(const Region& region, Deadline deadline) {
  std::shared_ptr<Event> event;
  {
    const std::lock_guard lock(mutex_);
    const auto found = forgetting_.find(region.id());
    if (found == forgetting_.end()) return;
    event = found->second;
  }
  if (!host().loop().wait(*event, deadline)) {
    host().refused();
    close({MC_E_PEER_UNREACHABLE, "the peer did not let go of a region that was deregistered"});
  }
}

void ShmEndpoint::closed(const Failure& why) {
  std::map<uint64_t, std::shared_ptr<Query>> queries;
  std::map<uint32_t, std::shared_ptr<Event>> forgetting;
  Regions regions;
  {
    const std::lock_guard lock(mutex_);
    if (keeper_) keeper_->close();
    queries.swap(queries_);
    forgetting.swap(forgetting_);
    regions.swap(regions_);
  }
  for (const auto& [tag, query] : queries) {
    query->status = why.status;
    query->done.set();
  }
  for (const auto& [id, event] : forgetting) event->set();
}

}  // namespace mc
