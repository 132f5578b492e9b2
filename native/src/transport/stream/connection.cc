#include "transport/stream/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <new>

#include "transport/raw.h"
#include "transport/stream/stream_endpoint.h"

namespace mc {
namespace {

// Bodies up to here may come out of the receive buffer; larger ones go where they belong at once.
constexpr uint64_t kBounceMax = 128 << 10;
// While frames of up to so many bytes are handled, what others send waits for up to so many of them.
constexpr uint64_t kDeferBytes = 32 << 10;
constexpr uint32_t kDeferFrames = 16;

}  // namespace

Connection::Connection(Fd fd, bool passes_fds, StreamEndpoint& owner, Host& host,
                       const StreamLimits& limits, uint64_t credit)
    : fd_(std::move(fd)),
      host_(host),
      loop_(host.loop()),
      owner_raw_(&owner),
      out_(fd_.get(), limits.copied_max, credit),
      in_(fd_.get(), passes_fds, *this),
      message_window_(limits.message_window),
      carries_bytes_(owner.carries_bytes()) {}

Connection::~Connection() {
  if (reserved_) host_.unreserve(reserved_nbytes_);
}

int32_t Connection::start(const std::shared_ptr<StreamEndpoint>& owner) {
  owner_ = owner;
  const std::lock_guard lock(interest_mutex_);
  interest_ = EPOLLIN;
  return loop_.add(shared_from_this(), fd_.get(), interest_, Loop::Set::kShared);
}

void Connection::close() {
  if (closed_.exchange(true)) return;
  loop_.remove(*this, fd_.get());
  ::shutdown(fd_.get(), SHUT_RDWR);
  out_.close();
}

void Connection::update_interest() {
  const std::lock_guard lock(interest_mutex_);
  if (closed_) return;
  const uint32_t want = (crowded_ ? 0U : static_cast<uint32_t>(EPOLLIN)) |
                        (out_.full() ? static_cast<uint32_t>(EPOLLOUT) : 0U);
  if (want == interest_) return;
  interest_ = want;
  loop_.modify(*this, fd_.get(), want);
}

void Connection::settle() {
  if (out_.broken()) {
    loop_.post([self = shared_from_this()] { self->broken_on_progress("cannot be written"); });
  } else if (out_.full()) {
    update_interest();
    loop_.watch();  // nobody waits for the rest to leave
  }
}

void Connection::flush() {
  out_.defer(false);
  if (!out_.full()) (void)out_.pump();
  settle();
}

void Connection::broken_on_progress(const char* what) {
  const std::shared_ptr<StreamEndpoint> owner = owner_.lock();
  if (owner) owner->close({MC_E_PEER_UNREACHABLE, std::string("the connection ") + what});
}

void Connection::ready_on_progress(uint32_t events) {
  assert(loop_.drives_shared());
  try {
    handle_on_progress(events);
  } catch (const std::bad_alloc&) {
    // What was being received is lost, so the connection is; the process and its peers go on.
    ::shutdown(fd_.get(), SHUT_RDWR);
    broken_on_progress("was given up: out of memory");
  }
}

void Connection::handle_on_progress(uint32_t events) {
  const std::shared_ptr<StreamEndpoint> owner = owner_.lock();
  if (!owner) return close();
  if ((events & EPOLLOUT) != 0) {
    if (out_.pump() == OutQueue::Pumped::kBroken) return broken_on_progress("was cut");
    if (crowded_ && out_.answers() + work_ < kBacklogMax / 2) {
      crowded_ = false;
      act_on_progress(in_.resume_on_progress(), owner);
    }
    update_interest();
  }
  if ((events & EPOLLIN) != 0 && !crowded_) {
    act_on_progress(in_.read_on_progress(), owner);
  } else if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
    broken_on_progress("was cut by the peer");
  }
}

void Connection::act_on_progress(InStream::Outcome outcome,
                                 const std::shared_ptr<StreamEndpoint>& owner) {
  flush();
  owner->issue();
  switch (outcome) {
    case InStream::Outcome::kDrained:
    case InStream::Outcome::kMore:
      if (backlogged()) {
        crowded_ = true;
        // Work that ended just before saw no crowd, and would not come back to resume.
        if (!backlogged()) crowded_ = false;
        update_interest();
      }
      break;
    case InStream::Outcome::kClosed:
      broken_on_progress("was closed by the peer");
      break;
    case InStream::Outcome::kBad:
      host_.refused();
      broken_on_progress("carried a frame against the protocol");
      break;
  }
}

void Connection::taken(uint32_t nbytes) {
  const uint64_t credit = credit_ += message_cost(nbytes);
  if (credit < message_window_ / 2) return;
  if (!host_.is_crowded(shared_from_this())) give_credit();
}

void Connection::room() { give_credit(); }

void Connection::give_credit() {
  FrameHead head;
  head.type = FrameType::kCredit;
  head.c = credit_.exchange(0);
  if (head.c == 0 || closed_) return;
  untaken_ -= head.c;
  (void)write([&](OutQueue& out) { return out.send(head, nullptr, OutQueue::Room::kAlways); });
}

void Connection::finish_work(uint64_t n) {
  work_ -= n;
  if (!crowded_) return;
  loop_.post_shared([self = shared_from_this()] {
    const std::shared_ptr<StreamEndpoint> owner = self->owner_.lock();
    if (!owner || !self->crowded_ || self->backlogged()) return;
    self->crowded_ = false;
    self->act_on_progress(self->in_.resume_on_progress(), owner);
    self->update_interest();
  });
}

// ---- frames --------------------------------------------------------------------------------

// Frames that move no byte of a region and ask for none.
static bool of_messages(FrameType type) {
  return type == FrameType::kMessage || type == FrameType::kReply || type == FrameType::kCredit ||
         type == FrameType::kRevoked || type == FrameType::kRevokedAck;
}

// Others that send meanwhile are let go at once, and what they send leaves with what this frame and
// those behind it give rise to: flush() comes soon, at the latest when what was received is handled.
Connection::Body Connection::begin_on_progress(const FrameHead& head) {
  if (!out_.deferred()) deferring_frames_ = 0;
  if (head.nbytes > kDeferBytes || ++deferring_frames_ > kDeferFrames) {
    out_.defer(false);
    if (out_.left_something()) flush();
  } else {
    out_.defer(true);
  }
  return begin_body_on_progress(head);
}

Connection::Body Connection::begin_body_on_progress(const FrameHead& head) {
  if (!carries_bytes_ && !of_messages(head.type)) return Body::kBad;
  switch (head.type) {
    case FrameType::kMessage:
    case FrameType::kReply:
    case FrameType::kRegion:
      return begin_message_on_progress(head);
    case FrameType::kData:
      return begin_data_on_progress(head);
    case FrameType::kWrite:
      return begin_write_on_progress(head);
    case FrameType::kRead:
      return head.a <= kEntriesMax && head.nbytes == head.a * sizeof(ReadEntry) ? Body::kInline
                                                                                : Body::kBad;
    case FrameType::kPull:
      return head.a <= kEntriesMax && head.nbytes == head.a * sizeof(PullEntry) ? Body::kInline
                                                                                : Body::kBad;
    case FrameType::kCancel:
      return head.a <= kEntriesMax && head.nbytes == head.a * sizeof(uint64_t) ? Body::kInline
                                                                               : Body::kBad;
    case FrameType::kRailOffer:
    case FrameType::kRailAnswer:
      return head.nbytes <= kRailBodyMax ? Body::kInline : Body::kBad;
    case FrameType::kDone:
    case FrameType::kQuery:
    case FrameType::kRevoked:
    case FrameType::kRevokedAck:
    case FrameType::kCredit:
    case FrameType::kGate:
    case FrameType::kRailClose:
    case FrameType::kRailClosed:
      return head.nbytes == 0 ? Body::kInline : Body::kBad;
  }
  return Body::kBad;
}

Connection::Body Connection::begin_message_on_progress(const FrameHead& head) {
  const uint32_t cap =
      head.type == FrameType::kRegion ? kRegionBodyMax : owner_raw_->message_bytes_max();
  if (head.nbytes > cap) return Body::kBad;
  if (head.type == FrameType::kMessage) {
    if (untaken_ >= message_window_) return Body::kBad;  // it had no credit
    untaken_ += message_cost(head.nbytes);
    (void)host_.reserve(head.nbytes, nullptr);
    reserved_ = true;
    reserved_nbytes_ = head.nbytes;
  }
  message_ = allocate_bytes(head.nbytes);
  return message_ ? Body::kPlaced : Body::kBad;
}

Connection::Body Connection::begin_data_on_progress(const FrameHead& head) {
  const auto status = static_cast<int32_t>(head.a);
  if (head.nbytes > kPartMax || status > 0 || (status != MC_OK && head.nbytes > 0)) {
    return Body::kBad;
  }
  crc_ = 0;
  body_status_ = status;
  bool fits = true;
  const bool known = parts_.with(head.tag, [&](const PartTable::Entry& entry) {
    fits = entry.part.op == MC_OP_READ && (status != MC_OK || entry.part.length == head.nbytes);
  });
  if (!fits) return Body::kBad;
  return known ? Body::kPlaced : Body::kDropped;
}

Connection::Body Connection::begin_write_on_progress(const FrameHead& head) {
  if (head.nbytes > kPartMax) return Body::kBad;
  crc_ = 0;
  body_status_ = MC_OK;
  body_region_ = host_.region(head.a);
  if (!body_region_ || !body_region_->allows(MC_ACCESS_REMOTE_WRITE, head.c, head.nbytes)) {
    host_.refused();
    body_region_.reset();
    body_status_ = MC_E_ACCESS;
    return Body::kDropped;
  }
  return Body::kPlaced;
}

ssize_t Connection::place_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                      const Fill& fill) {
  if (head.type == FrameType::kData) return place_data_on_progress(head, done, n, fill);
  if (head.type == FrameType::kWrite) return place_write_on_progress(head, done, n, fill);
  const iovec piece{message_.get() + done, n};
  return fill(&piece, 1);
}

ssize_t Connection::place_data_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                           const Fill& fill) {
  ssize_t filled = 0;
  parts_.with(head.tag, [&](const PartTable::Entry& entry) {
    if (entry.batch->stopped()) return;
    auto* at = reinterpret_cast<uint8_t*>(entry.part.local + done);
    const iovec piece{at, n};
    filled = fill(&piece, 1);
    if (filled > 0 && entry.part.crc) crc_ = mc_crc32c(at, static_cast<uint64_t>(filled), crc_);
  });
  return filled;
}

ssize_t Connection::place_write_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                            const Fill& fill) {
  const Pin pin(body_region_);
  if (!pin) {
    body_status_ = MC_E_ACCESS;
    return 0;
  }
  std::vector<iovec> pieces;
  pin->slice(head.c + done, n, &pieces);
  const ssize_t filled =
      pin->is_raw() && n <= kBounceMax ? bounce(pieces, n, fill) : fill(pieces.data(), pieces.size());
  const auto there = static_cast<uint64_t>(std::max<ssize_t>(filled, 0));
  if (body_status_ == MC_OK && (head.b & kWriteCrc) != 0) {
    body_status_ = pin->crc(pieces, there, &crc_);
  }
  return filled;
}

// What is copied out of a buffer, and not by the kernel, must not run into a hole.
ssize_t Connection::bounce(const std::vector<iovec>& pieces, uint64_t n, const Fill& fill) {
  std::vector<uint8_t> bytes(n);
  const iovec all{bytes.data(), n};
  const ssize_t filled = fill(&all, 1);
  auto left = static_cast<uint64_t>(std::max<ssize_t>(filled, 0));
  auto from = reinterpret_cast<uint64_t>(bytes.data());
  for (const iovec& piece : pieces) {
    const uint64_t part = std::min<uint64_t>(left, piece.iov_len);
    if (!copy_raw(reinterpret_cast<uint64_t>(piece.iov_base), from, part)) {
      body_status_ = MC_E_ACCESS;
    }
    from += part;
    left -= part;
  }
  return filled;
}

bool Connection::end_on_progress(const FrameHead& head, const uint8_t* bytes) {
  switch (head.type) {
    case FrameType::kMessage: {
      reserved_ = false;  // the queue's now
      host_.deliver(*owner_raw_, {head.tag, head.a, head.nbytes}, std::move(message_));
      return true;
    }
    case FrameType::kReply:
      host_.deliver_reply(*owner_raw_, head.tag, std::move(message_), head.nbytes);
      return true;
    case FrameType::kRead:
      return answer_reads_on_progress(head, bytes);
    case FrameType::kData:
      end_data_on_progress(head);
      return true;
    case FrameType::kWrite:
      end_write_on_progress(head);
      return true;
    case FrameType::kDone:
      body_status_ = static_cast<int32_t>(head.a);
      crc_ = head.b;
      end_data_on_progress(head);
      return true;
    case FrameType::kCredit:
      (void)write([&](OutQueue& out) { return out.grant(head.c); });
      return true;
    case FrameType::kCancel:
      return cancel_on_progress(head, bytes);
    case FrameType::kRegion: {
      const Bytes body = std::move(message_);
      return owner_raw_->other_frame_on_progress(*this, head, body.get());
    }
    default:
      return owner_raw_->other_frame_on_progress(*this, head, bytes);
  }
}

void Connection::end_data_on_progress(const FrameHead& head) {
  std::shared_ptr<Batch> batch;
  Part part;
  if (!parts_.take(head.tag, &batch, &part)) return;
  owner_raw_->part_over(batch, part, body_status_, crc_);
}

void Connection::end_write_on_progress(const FrameHead& head) {
  FrameHead done;
  done.type = FrameType::kDone;
  done.tag = head.tag;
  done.a = static_cast<uint32_t>(body_status_);
  done.b = crc_;
  body_region_.reset();
  out_.queue(done);
}

bool Connection::cancel_on_progress(const FrameHead& head, const uint8_t* bytes) {
  if (head.a == 0) return true;
  std::vector<uint64_t> tags(head.a);
  memcpy(tags.data(), bytes, head.nbytes);
  out_.drop_answers(tags);
  owner_raw_->called_off_on_progress(tags);
  return true;
}

bool Connection::answer_reads_on_progress(const FrameHead& head, const uint8_t* bytes) {
  std::shared_ptr<Region> region;
  for (uint32_t i = 0; i < head.a; ++i) {
    ReadEntry entry;
    memcpy(&entry, bytes + i * sizeof entry, sizeof entry);
    if (entry.length > kPartMax) return false;
    if (!region || region->id() != entry.region) region = host_.region(entry.region);
    FrameHead answer;
    answer.type = FrameType::kData;
    answer.tag = entry.tag;
    if (region && region->allows(MC_ACCESS_REMOTE_READ, entry.offset, entry.length)) {
      answer.nbytes = static_cast<uint32_t>(entry.length);
      out_.answer(answer, region, entry.offset);
    } else {
      host_.refused();
      answer.a = static_cast<uint32_t>(MC_E_ACCESS);
      out_.queue(answer);
    }
  }
  return true;
}

}  // namespace mc
