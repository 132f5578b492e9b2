// What regions look like: asking the owner, answering a reader, and revoking.
#include <cstring>

#include "transport/rdma/rdma_endpoint.h"

namespace mc {

using namespace rdma;

namespace {

constexpr uint64_t kGraceMs = 500;  // for readers to finish by themselves
constexpr uint32_t kRegionAbsent = static_cast<uint32_t>(MC_E_ACCESS);

}  // namespace

bool RdmaEndpoint::other_frame_on_progress(Connection&, const FrameHead& head,
                                           const uint8_t* bytes) {
  switch (head.type) {
    case FrameType::kRailOffer:
      return offer_on_progress(head, bytes);
    case FrameType::kRailAnswer:
      return answer_on_progress(head, bytes);
    case FrameType::kRailClose:
      close_on_progress(head);
      return true;
    case FrameType::kRailClosed:
      closed_on_progress(head.tag);
      return true;
    case FrameType::kQuery:
      answer_query_on_progress(head);
      return true;
    case FrameType::kRegion:
      return learn_on_progress(head, bytes);
    case FrameType::kRevoked:
      revoked_on_progress(head.a);
      return true;
    case FrameType::kRevokedAck: {
      const std::lock_guard lock(told_mutex_);
      told_.erase(head.a);
      const auto found = forgetting_.find(head.a);
      if (found != forgetting_.end()) found->second.answered->set();
      return true;
    }
    default:
      return false;
  }
}

// ---- the reader --------------------------------------------------------------------------------

void RdmaEndpoint::ask_locked(uint32_t id) {
  FrameHead head;
  head.type = FrameType::kQuery;
  head.a = id;
  send_frame(head, nullptr);
}

bool RdmaEndpoint::learn_on_progress(const FrameHead& head, const uint8_t* bytes) {
  auto region = std::make_shared<RemoteRegion>();
  region->id = static_cast<uint32_t>(head.tag);
  if (head.a == MC_OK) {
    RegionHead shape;
    if (head.nbytes < sizeof shape) return false;
    memcpy(&shape, bytes, sizeof shape);
    if (head.nbytes != sizeof shape + uint64_t{shape.span_count} * sizeof(Span)) return false;
    region->nbytes = shape.nbytes;
    region->access = shape.access;
    region->spans.resize(shape.span_count);
    if (shape.span_count > 0) {
      memcpy(region->spans.data(), bytes + sizeof shape, shape.span_count * sizeof(Span));
    }
    uint64_t end = 0;  // they ascend and do not leave the region
    for (const Span& span : region->spans) {
      if (span.offset < end || span.nbytes == 0 || span.offset > region->nbytes ||
          span.nbytes > region->nbytes - span.offset) {
        return false;
      }
      end = span.offset + span.nbytes;
    }
  }
  {
    const std::lock_guard lock(work_mutex_);
    const auto found = regions_.find(region->id);
    if (found == regions_.end() || found->second.region) return true;  // nobody waits for it
    Jobs waiting = std::move(found->second.waiting);
    found->second.waiting.clear();
    if (head.a == MC_OK) found->second.region = region;
    else regions_.erase(found);
    for (const auto& job : waiting) {
      if (head.a != MC_OK) {
        fail_locked(job, MC_E_ACCESS, kRefused);
      } else {
        begin_job_locked(job);
      }
    }
  }
  pump();
  return true;
}

void RdmaEndpoint::revoked_on_progress(uint32_t id) {
  {
    const std::lock_guard lock(work_mutex_);
    const auto found = regions_.find(id);
    if (found != regions_.end() && found->second.region) {
      const std::shared_ptr<RemoteRegion> region = found->second.region;
      regions_.erase(found);
      region->revoked = true;
      if (region->users > 0) return;  // the last one answers
    }
  }
  acknowledge(id);
}

void RdmaEndpoint::acknowledge(uint32_t id) {
  FrameHead head;
  head.type = FrameType::kRevokedAck;
  head.a = id;
  send_frame(head, nullptr);
}

// ---- the owner ---------------------------------------------------------------------------------

void RdmaEndpoint::answer_query_on_progress(const FrameHead& head) {
  const uint32_t id = head.a;
  const std::shared_ptr<Region> region = host().region(id);
  if (region && (region->access() & MC_ACCESS_GATHERED) != 0) {
    // Registering takes long; the peer's other frames need not wait for it.
    return host().executor().run([self = self(), id] { self->answer_query(id); });
  }
  answer_query(id);
}

void RdmaEndpoint::answer_query(uint32_t id) {
  FrameHead head;
  head.type = FrameType::kRegion;
  head.tag = id;
  head.a = kRegionAbsent;
  const std::shared_ptr<Region> region = host().region(id);
  const Pin pin(region);
  if (!pin) {
    host().refused();
    return send_frame(head, nullptr);
  }
  {
    const std::lock_guard lock(told_mutex_);
    told_.insert(id);
  }
  // Raw memory is looked at before each use, which only its owner's processor can do.
  const bool raw = (region->access() & MC_ACCESS_RAW) != 0;
  const std::vector<Span> spans = raw ? std::vector<Span>() : fabric_.memory().spans(*region);
  const RegionHead shape{region->nbytes(), region->access(), static_cast<uint32_t>(spans.size())};
  std::vector<uint8_t> body(sizeof shape + spans.size() * sizeof(Span));
  memcpy(body.data(), &shape, sizeof shape);
  if (!spans.empty()) memcpy(body.data() + sizeof shape, spans.data(), spans.size() * sizeof(Span));
  const bool fits = body.size() <= kRegionBodyMax;
  head.a = MC_OK;
  head.nbytes = static_cast<uint32_t>(fits ? body.size() : sizeof shape);
  if (!fits) memset(body.data() + offsetof(RegionHead, span_count), 0, sizeof shape.span_count);
  send_frame(head, body.data());
}

void RdmaEndpoint::forget(const std::shared_ptr<Region>& region) {
  StreamEndpoint::forget(region);
  {
    const std::lock_guard lock(told_mutex_);
    if (!told_.contains(region->id()) || is_closed()) return;
    forgetting_.try_emplace(region->id(), std::make_shared<Event>(), Deadline::in_ms(kGraceMs));
  }
  FrameHead head;
  head.type = FrameType::kRevoked;
  head.a = region->id();
  send_frame(head, nullptr);
}

void RdmaEndpoint::wait_forgotten(const Region& region, Deadline deadline) {
  Forgetting one;
  {
    const std::lock_guard lock(told_mutex_);
    const auto found = forgetting_.find(region.id());
    if (found == forgetting_.end()) return;
    one = found->second;
  }
  // Who does not answer is refused by our devices, once the registration is gone.
  // All peers have the same half second, from when they were told.
  if (!is_closed()) {
    (void)host().loop().wait(*one.answered, deadline < one.grace ? deadline : one.grace);
  }
  const std::lock_guard lock(told_mutex_);
  forgetting_.erase(region.id());
  told_.erase(region.id());
}

}  // namespace mc
