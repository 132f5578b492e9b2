// Rails of a peer: making, answering, breaking and evicting them (states in rail.h).
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/rdma_endpoint.h"

namespace mc {

using namespace rdma;

namespace {

constexpr uint64_t kAnswerMs = 2'000;  // a peer's time to answer an offer
constexpr uint64_t kSoonMs = 2;        // until what others gave back is looked for
constexpr uint8_t kAckTimeout = 14;    // 4.096 us * 2^14 = 67 ms, eight times at most
constexpr uint8_t kRetries = 7, kRnrTimer = 12, kHopLimit = 64;
constexpr uint32_t kPsnMask = 0xffffff;

uint32_t random_psn() {
  const Token token = random_token();
  uint32_t psn = 0;
  memcpy(&psn, token.data(), sizeof psn);
  return psn & kPsnMask;
}

struct Target {
  uint32_t qp_number, psn, send_psn;
  uint16_t lid;
  uint8_t mtu, rd_atomic, source_index;
  GidEntry gid;
};

int32_t to_init(Adapter& adapter, verbs::Qp* qp, uint32_t access) {
  verbs::QpAttr attr{};
  attr.state = verbs::kInit;
  attr.port = adapter.port();
  attr.access = access;
  const int error = adapter.modify_qp(
      qp, &attr,
      static_cast<int>(verbs::kAttrState | verbs::kAttrPkey | verbs::kAttrPort | verbs::kAttrAccess));
  return error == 0 ? MC_OK
                    : fail(MC_E_PEER_UNREACHABLE, "%s: no queue pair on the port: %s",
                           adapter.name().c_str(), errno_text(error).c_str());
}

// Ready to receive, which is all that a queue pair needs that the peer posts to.
int32_t to_receive(Adapter& adapter, verbs::Qp* qp, const Target& to) {
  verbs::QpAttr attr{};
  attr.state = verbs::kReadyToReceive;
  attr.path_mtu = std::min<uint32_t>(to.mtu, adapter.mtu());
  attr.peer_number = to.qp_number;
  attr.receive_psn = to.psn;
  attr.max_peer_rd_atomic = std::min(to.rd_atomic, adapter.rd_atomic());
  attr.min_rnr_timer = kRnrTimer;
  attr.address.port = adapter.port();
  attr.address.lid = to.lid;
  if (adapter.link_layer() != verbs::kLinkInfiniBand) {
    attr.address.is_global = 1;
    memcpy(attr.address.route.destination.raw, to.gid.raw.data(), to.gid.raw.size());
    attr.address.route.source_index = to.source_index;
    attr.address.route.hop_limit = kHopLimit;
    attr.address.route.traffic_class = adapter.traffic_class();
  }
  const int error = adapter.modify_qp(
      qp, &attr,
      static_cast<int>(verbs::kAttrState | verbs::kAttrAddress | verbs::kAttrMtu |
                       verbs::kAttrPeerNumber | verbs::kAttrReceivePsn |
                       verbs::kAttrPeerRdAtomic | verbs::kAttrRnrTimer));
  return error == 0 ? MC_OK
                    : fail(MC_E_PEER_UNREACHABLE, "%s: no way to %s: %s", adapter.name().c_str(),
                           gid_text(to.gid).c_str(), errno_text(error).c_str());
}

int32_t to_send(Adapter& adapter, verbs::Qp* qp, const Target& to) {
  verbs::QpAttr attr{};
  attr.state = verbs::kReadyToSend;
  attr.timeout = kAckTimeout;
  attr.retry_count = attr.rnr_retry = kRetries;
  attr.send_psn = to.send_psn;
  attr.max_rd_atomic = std::min(to.rd_atomic, adapter.rd_atomic());
  const int error = adapter.modify_qp(
      qp, &attr,
      static_cast<int>(verbs::kAttrState | verbs::kAttrTimeout | verbs::kAttrRetries |
                       verbs::kAttrRnrRetries | verbs::kAttrSendPsn | verbs::kAttrRdAtomic));
  return error == 0 ? MC_OK
                    : fail(MC_E_PEER_UNREACHABLE, "%s: the queue pair does not send: %s",
                           adapter.name().c_str(), errno_text(error).c_str());
}

}  // namespace

bool RdmaEndpoint::any_hope_locked() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.state == Rail::State::kReady || !rail.backoff.down();
  });
}

const std::string& RdmaEndpoint::why_no_rail_locked() const { return rails_[0].why; }

void RdmaEndpoint::look_again_in(uint64_t ms) {
  const std::weak_ptr<StreamEndpoint> weak = weak_from_this();
  host().loop().call_at(Deadline::in_ms(ms), [weak] {
    const auto endpoint = std::static_pointer_cast<RdmaEndpoint>(weak.lock());
    if (endpoint) endpoint->time_passed();
  });
}

// What is waited for is in the hands of other peers' endpoints, which do not call back.
void RdmaEndpoint::look_again_soon_locked() {
  if (looks_soon_) return;
  looks_soon_ = true;
  look_again_in(kSoonMs);
}

void RdmaEndpoint::time_passed() {
  {
    const std::lock_guard lock(work_mutex_);
    looks_soon_ = false;
    if (ended_) return;
    for (Rail& rail : rails_) {
      if (rail.state == Rail::State::kConnecting && now_ns() >= rail.retry_at_ns) {
        break_locked(rail, "the peer did not answer in time", true);
      }
    }
    if (!ready_.empty()) want_rails_locked();
  }
  pump();
}

void RdmaEndpoint::want_rails_locked() {
  for (size_t i = 0; i < rails_.size(); ++i) {
    const Rail::State state = rails_[i].state;
    const bool waits = state == Rail::State::kPaused || state == Rail::State::kDown;
    if (state == Rail::State::kIdle || (waits && now_ns() >= rails_[i].retry_at_ns)) {
      connect_locked(i);
    }
  }
}

void RdmaEndpoint::connect_locked(size_t index) {
  Rail& rail = rails_[index];
  Adapter& adapter = *fabric_.adapters()[rail.ours];
  if (!adapter.is_active()) return break_locked(rail, "the port is down", true);
  if (!fabric_.admit_rail(self())) {
    return break_locked(rail, "all rails of this process are busy", true);
  }
  rail.qp = adapter.create_qp(true, &rail.inline_bytes);
  if (rail.qp == nullptr) {
    fabric_.release_rail();
    return break_locked(rail, last_error(), true);
  }
  rail.number = adapter.add_rail(weak_owner());
  if (to_init(adapter, rail.qp, 0) != MC_OK) return break_locked(rail, last_error(), true);
  rail.attempt = next_attempt_++;
  rail.next_sequence = 0;
  rail.unsignaled_bytes = 0;
  rail.psn = random_psn();
  rail.state = Rail::State::kConnecting;
  rail.retry_at_ns = Deadline::in_ms(kAnswerMs).at_ns();
  RailOffer offer;
  offer.qp_number = rail.qp->number;
  offer.psn = rail.psn;
  offer.rail = static_cast<uint32_t>(index);
  offer.adapter = static_cast<uint32_t>(rail.theirs);
  offer.lid = adapter.lid();
  offer.link_layer = adapter.link_layer();
  offer.mtu = static_cast<uint8_t>(adapter.mtu());
  offer.rd_atomic = adapter.rd_atomic();
  rail.gids = adapter.gids();
  offer.gid_count = static_cast<uint8_t>(rail.gids.size());
  std::copy(rail.gids.begin(), rail.gids.end(), offer.gids);
  FrameHead head;
  head.type = FrameType::kRailOffer;
  head.tag = rail.attempt;
  head.nbytes = sizeof offer;
  send_frame(head, &offer);
  look_again_in(kAnswerMs + 1);
}

// ---- the answering side ------------------------------------------------------------------------

bool RdmaEndpoint::offer_on_progress(const FrameHead& head, const uint8_t* bytes) {
  RailOffer offer;
  if (head.nbytes != sizeof offer) return false;
  memcpy(&offer, bytes, sizeof offer);
  if (offer.rail >= kRailsMax || offer.gid_count > kGidsMax) return false;
  RailAnswer answer;
  FrameHead reply;
  reply.type = FrameType::kRailAnswer;
  reply.tag = head.tag;
  reply.nbytes = sizeof answer;
  {
    const std::lock_guard lock(work_mutex_);
    if (ended_) return true;
    const int32_t status = accept_locked(offer, head.tag, &answer);
    reply.a = static_cast<uint32_t>(status);
    if (status != MC_OK) strncpy(answer.why, last_error(), sizeof answer.why - 1);
  }
  send_frame(reply, &answer);
  return true;
}

int32_t RdmaEndpoint::accept_locked(const RailOffer& offer, uint64_t attempt, RailAnswer* answer) {
  for (auto it = passive_.begin(); it != passive_.end();) {  // the one that this offer replaces
    const uint64_t old = (it++)->first;
    if (passive_.at(old).rail == offer.rail) close_passive_locked(old);
  }
  if (offer.adapter >= fabric_.adapters().size()) {
    return fail(MC_E_PEER_UNREACHABLE, "there is no port %u here", offer.adapter);
  }
  Adapter& adapter = *fabric_.adapters()[offer.adapter];
  if (!adapter.is_active() || adapter.link_layer() != offer.link_layer) {
    return fail(MC_E_PEER_UNREACHABLE, "%s: %s", adapter.name().c_str(),
                adapter.is_active() ? "its link layer is another one" : "the port is down");
  }
  const std::vector<GidEntry> ours = adapter.gids();
  GidPair pair;
  std::string why;
  if (adapter.link_layer() != verbs::kLinkInfiniBand) {
    if (!choose_gids({offer.gids, offer.gid_count}, ours, &pair, &why)) {
      return fail(MC_E_PEER_UNREACHABLE, "%s: %s", adapter.name().c_str(), why.c_str());
    }
    answer->gid = ours[pair.theirs];
  }
  close_passive_locked(attempt);  // a peer that numbers two rails alike has one of them
  uint32_t inline_bytes = 0;
  verbs::Qp* qp = adapter.create_qp(false, &inline_bytes);
  if (qp == nullptr) return MC_E_OUT_OF_SPACE;
  passive_[attempt] = {offer.rail, offer.adapter, qp};
  const Target target{offer.qp_number, offer.psn, 0, offer.lid, offer.mtu, offer.rd_atomic,
                      static_cast<uint8_t>(answer->gid.index), offer.gids[pair.ours]};
  int32_t status = to_init(adapter, qp, verbs::kRemoteRead | verbs::kRemoteWrite);
  if (status == MC_OK) status = to_receive(adapter, qp, target);
  if (status != MC_OK) {
    close_passive_locked(attempt);
    return status;
  }
  answer->qp_number = qp->number;
  answer->lid = adapter.lid();
  answer->mtu = static_cast<uint8_t>(adapter.mtu());
  answer->rd_atomic = adapter.rd_atomic();
  answer->gid_index = static_cast<uint8_t>(pair.ours);
  return MC_OK;
}

void RdmaEndpoint::close_on_progress(const FrameHead& head) {
  {
    const std::lock_guard lock(work_mutex_);
    close_passive_locked(head.tag);
  }
  if (head.a == 0) return;
  FrameHead reply;
  reply.type = FrameType::kRailClosed;
  reply.tag = head.tag;
  send_frame(reply, nullptr);
}

void RdmaEndpoint::close_passive_locked(uint64_t attempt) {
  const auto found = passive_.find(attempt);
  if (found == passive_.end()) return;
  fabric_.adapters()[found->second.adapter]->destroy_qp(found->second.qp);
  passive_.erase(found);
}

// ---- the answer --------------------------------------------------------------------------------

bool RdmaEndpoint::answer_on_progress(const FrameHead& head, const uint8_t* bytes) {
  RailAnswer answer;
  if (head.nbytes != sizeof answer) return false;
  memcpy(&answer, bytes, sizeof answer);
  {
    const std::lock_guard lock(work_mutex_);
    const auto found = std::find_if(rails_.begin(), rails_.end(), [&](const Rail& rail) {
      return rail.state == Rail::State::kConnecting && rail.attempt == head.tag;
    });
    if (ended_ || found == rails_.end()) return true;  // too late
    Rail& rail = *found;
    if (head.a != MC_OK) {
      const std::string why(answer.why, strnlen(answer.why, sizeof answer.why));
      break_locked(rail, "the peer refused the path: " + why, true);
    } else if (make_ready(rail, answer) != MC_OK) {
      break_locked(rail, last_error(), true);
    } else {
      rail.state = Rail::State::kReady;
      ++rail.connects;
      const Adapter& adapter = *fabric_.adapters()[rail.ours];
      rail.path = adapter.name() + ":" + std::to_string(adapter.port());
      if (answer.gid_index < rail.gids.size()) {
        rail.path.append(" ").append(gid_text(rail.gids[answer.gid_index]));
      }
      rail.path += " -> " + gid_text(answer.gid) + ", MTU " +
                   std::to_string(128U << std::min<uint32_t>(answer.mtu, adapter.mtu()));
    }
  }
  pump();
  return true;
}

int32_t RdmaEndpoint::make_ready(const Rail& rail, const RailAnswer& answer) {
  Adapter& adapter = *fabric_.adapters()[rail.ours];
  uint8_t source = 0;
  if (adapter.link_layer() != verbs::kLinkInfiniBand) {
    if (answer.gid_index >= rail.gids.size()) {
      return fail(MC_E_PEER_UNREACHABLE, "the peer chose an address that we do not have");
    }
    source = static_cast<uint8_t>(rail.gids[answer.gid_index].index);
  }
  const Target target{answer.qp_number, answer.psn, rail.psn, answer.lid, answer.mtu,
                      answer.rd_atomic, source, answer.gid};
  const int32_t status = to_receive(adapter, rail.qp, target);
  return status == MC_OK ? to_send(adapter, rail.qp, target) : status;
}

// ---- the end of a queue pair -------------------------------------------------------------------

void RdmaEndpoint::take_posted_locked(Rail& rail, std::deque<Work>* out) {
  fabric_.adapters()[rail.ours]->give_credits(rail.posted.size());
  for (Posted& posted : rail.posted) out->push_back(std::move(posted.work));
  rail.posted.clear();
  rail.outstanding_bytes = 0;
}

void RdmaEndpoint::closed_on_progress(uint64_t attempt) {
  {
    const std::lock_guard lock(work_mutex_);
    if (landing_.erase(attempt) == 0 || !landing_.empty()) return;
    if (landed_) landed_->set();
    landed_.reset();
    if (!any_hope_locked()) rails_gone_locked();
  }
  pump();
}

void RdmaEndpoint::destroy_locked(Rail& rail, Tell tell) {
  if (rail.qp == nullptr) return;
  Adapter& adapter = *fabric_.adapters()[rail.ours];
  adapter.drop_rail(rail.number);
  adapter.destroy_qp(rail.qp);
  rail.qp = nullptr;
  rail.number = 0;
  fabric_.release_rail();
  if (tell == Tell::kNobody || is_closed()) return;
  FrameHead head;
  head.type = FrameType::kRailClose;
  head.tag = rail.attempt;
  head.a = tell == Tell::kPeerAndWait ? 1 : 0;
  if (head.a != 0) landing_.insert(rail.attempt);
  send_frame(head, nullptr);
}

void RdmaEndpoint::break_locked(Rail& rail, const std::string& why, bool counts) {
  rail.why = why;
  std::deque<Work> works;
  take_posted_locked(rail, &works);
  rail.resent += works.size();
  const bool wrote = std::any_of(works.begin(), works.end(),
                                 [](const Work& work) { return work.job->writes(); });
  destroy_locked(rail, wrote ? Tell::kPeerAndWait : Tell::kPeer);
  ready_.insert(ready_.begin(), std::make_move_iterator(works.begin()),
                std::make_move_iterator(works.end()));
  rail.state = Rail::State::kIdle;
  rail.retry_at_ns = 0;
  if (!counts) return;
  ++rail.errors;
  rail.backoff.broke();
  rail.state = rail.backoff.down() ? Rail::State::kDown : Rail::State::kPaused;
  const uint64_t pause_ms = rail.backoff.pause_ms();
  rail.retry_at_ns = Deadline::in_ms(pause_ms).at_ns();
  look_again_in(pause_ms + 1);
  if (!any_hope_locked()) rails_gone_locked();
}

void RdmaEndpoint::port_changed() {
  {
    const std::lock_guard lock(work_mutex_);
    if (ended_) return;
    for (Rail& rail : rails_) {
      const bool active = fabric_.adapters()[rail.ours]->is_active();
      const bool used = rail.state == Rail::State::kReady || rail.state == Rail::State::kConnecting;
      if (!active && used) break_locked(rail, "the port went down", true);
      if (active && !used) {  // worth a try at once, and worth waiting for
        rail.retry_at_ns = 0;
        rail.backoff.worked();
      }
    }
  }
  pump();
}

bool RdmaEndpoint::evict() {
  const std::unique_lock lock(work_mutex_, std::try_to_lock);
  if (!lock || ended_ || !ready_.empty()) return false;
  const bool busy = std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return !rail.posted.empty() || rail.state == Rail::State::kConnecting;
  });
  if (busy) return false;
  bool any = false;
  for (Rail& rail : rails_) {
    any = any || rail.qp != nullptr;
    if (rail.qp == nullptr) continue;
    destroy_locked(rail, Tell::kPeer);
    rail.state = Rail::State::kIdle;
    rail.why = "evicted: it was idle, and others wanted a rail";
  }
  return any;
}

}  // namespace mc
