#include "transport/stream/out_queue.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <unordered_set>

#include "base/status.h"
#include "transport/raw.h"

namespace mc {
namespace {

constexpr uint64_t kSendingMax = 512 << 10;  // put on its way at once
constexpr uint64_t kPumpMax = 8 << 20;       // of one pump(), so that one peer cannot keep a thread
constexpr size_t kIovMax = 512;
// More than this each sender copies into the socket by itself, side by side with others.
constexpr uint64_t kLittleBytes = 16 << 10;
constexpr size_t kLittleFrames = 8;

bool is_answer(const FrameHead& head) {
  return head.type == FrameType::kData || head.type == FrameType::kDone ||
         head.type == FrameType::kRegion || head.type == FrameType::kRevokedAck;
}

}  // namespace

uint64_t OutQueue::Frame::left() const {
  uint64_t sum = sizeof head - head_sent;
  for (size_t i = next; i < body.size(); ++i) sum += body[i].iov_len;
  return sum;
}

int32_t OutQueue::send(const FrameHead& head, const void* bytes, Room room, Deadline deadline,
                       Fd passed) {
  std::unique_lock lock(mutex_);
  const bool is_message = head.type == FrameType::kMessage;
  const uint64_t& copied = copied_bytes_[is_message];
  const auto has_room = [&] {
    return closed_ || copied == 0 || copied + head.nbytes <= copied_max_;
  };
  if (room != Room::kAlways && deferred_ && !full_ && !has_room()) pump_locked();
  if (room != Room::kAlways && !has_room()) {
    if (room == Room::kRefuse) {
      return fail(MC_E_BACKPRESSURE, "the peer does not read: %lu bytes are queued", copied);
    }
    if (!room_.wait_until(lock, deadline.as_time_point(), has_room)) {
      return fail(MC_E_TIMEOUT, "the peer takes nothing: %lu bytes are queued", copied);
    }
  }
  if (closed_) return fail(MC_E_PEER_UNREACHABLE, "the connection is closed");
  Frame frame;
  frame.head = head;
  frame.borrowed = true;
  frame.passed = std::move(passed);
  if (head.nbytes > 0) frame.body.push_back({const_cast<void*>(bytes), head.nbytes});
  Frames& queue = is_message ? messages_ : urgent_;
  queue.push_back(std::move(frame));
  if (is_answer(head)) ++answers_;
  bool kept = true;
  try {
    if (deferred_ && head.nbytes <= kLittleBytes) left_ = true;
    else if (!full_) pump_locked();
  } catch (const std::bad_alloc&) {
    kept = false;  // half-way, with the caller's bytes in a queue
  }
  // What did not go out needs memory of its own: it is the last of its kind, here or there.
  if (!kept) {
    // Too late for this connection.
  } else if (!queue.empty()) {
    kept = own_rest_locked(queue.back());
  } else {
    const auto left = std::find_if(sending_.rbegin(), sending_.rend(),
                                   [](const Frame& one) { return one.borrowed; });
    if (left != sending_.rend()) kept = own_rest_locked(*left);
  }
  if (kept) return MC_OK;
  give_up_locked();
  return fail(MC_E_OUT_OF_SPACE, "no memory for %u bytes that the peer does not read", head.nbytes);
}

bool OutQueue::own_rest_locked(Frame& frame) {
  uint64_t n = 0;
  for (size_t i = frame.next; i < frame.body.size(); ++i) n += frame.body[i].iov_len;
  std::unique_ptr<uint8_t[]> copy(new (std::nothrow) uint8_t[n]);
  if (!copy) return false;
  uint8_t* at = copy.get();
  for (size_t i = frame.next; i < frame.body.size(); ++i) {
    const iovec& piece = frame.body[i];
    if (!frame.region || !frame.region->is_raw()) memcpy(at, piece.iov_base, piece.iov_len);
    else if (!copy_raw(reinterpret_cast<uint64_t>(at), reinterpret_cast<uint64_t>(piece.iov_base),
                       piece.iov_len)) return false;
    at += frame.body[i].iov_len;
  }
  frame.body.assign(n > 0 ? 1 : 0, iovec{copy.get(), n});
  frame.next = 0;
  frame.copy = std::move(copy);
  frame.copied_nbytes = n;
  copied_bytes_[frame.is_message()] += n;
  frame.borrowed = false;
  frame.region.reset();
  frame.batch.reset();
  return true;
}

// Nothing of what is queued is looked at any more: there is no memory to keep it.
void OutQueue::give_up_locked() {
  broken_ = closed_ = true;
  for (Frames* frames : {&sending_, &urgent_, &messages_, &data_}) frames->clear();
}

void OutQueue::queue(const FrameHead& head) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  urgent_.emplace_back().head = head;
  if (is_answer(head)) ++answers_;
}

void OutQueue::answer(const FrameHead& head, const std::shared_ptr<Region>& region,
                      uint64_t offset) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  Frame& frame = data_.emplace_back();
  ++answers_;
  frame.head = head;
  region->slice(offset, head.nbytes, &frame.body);
  frame.region = region;
  if (!region->alive()) refuse(frame);  // after forget_region() looked
}

bool OutQueue::push(const FrameHead& head, const std::shared_ptr<Batch>& batch, uint64_t local) {
  const std::lock_guard lock(mutex_);
  if (closed_ || batch->stopped()) return false;
  Frame& frame = data_.emplace_back();
  frame.head = head;
  if (head.nbytes > 0) frame.body.push_back({reinterpret_cast<void*>(local), head.nbytes});
  frame.batch = batch;
  return true;
}

void OutQueue::refuse(Frame& frame) {
  frame.head.nbytes = 0;
  frame.head.a = static_cast<uint32_t>(MC_E_ACCESS);
  frame.body.clear();
  frame.region.reset();
}

OutQueue::Pumped OutQueue::pump() {
  const std::lock_guard lock(mutex_);
  full_ = false;
  return pump_locked();
}

void OutQueue::pump_or_defer() {
  const std::lock_guard lock(mutex_);
  if (deferred_ && is_little_locked()) left_ = true;
  else if (!full_) pump_locked();
}

bool OutQueue::is_little_locked() const {
  if (data_.size() > kLittleFrames) return false;
  uint64_t sum = 0;
  for (const Frame& frame : data_) sum += frame.head.nbytes;
  return sum <= kLittleBytes;
}

OutQueue::Pumped OutQueue::grant(uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  credit_ += static_cast<int64_t>(std::min<uint64_t>(nbytes, kCreditMax));
  return full_ ? Pumped::kMore : pump_locked();
}

OutQueue::Frames* OutQueue::next_locked() {
  if (!urgent_.empty()) return &urgent_;
  if (!messages_.empty() && credit_ > 0) return &messages_;
  return data_.empty() ? nullptr : &data_;
}

void OutQueue::fill_locked() {
  while (sending_bytes_ < kSendingMax && sending_.size() < kIovMax) {
    Frames* from = next_locked();
    if (from == nullptr) return;
    sending_.push_back(std::move(from->front()));
    from->pop_front();
    const Frame& frame = sending_.back();
    if (frame.is_message()) credit_ -= static_cast<int64_t>(message_cost(frame.head.nbytes));
    sending_bytes_ += frame.left();
  }
}

ssize_t OutQueue::write_some_locked() {
  std::array<iovec, kIovMax> iov;
  size_t n = 0;
  Fd* passed = nullptr;
  for (Frame& frame : sending_) {
    if (n + 1 >= iov.size() || (n > 0 && frame.passed)) break;
    if (frame.passed) passed = &frame.passed;
    if (frame.head_sent < sizeof frame.head) {
      iov[n++] = {reinterpret_cast<uint8_t*>(&frame.head) + frame.head_sent,
                  sizeof frame.head - frame.head_sent};
    }
    size_t i = frame.next;
    for (; i < frame.body.size() && n < iov.size(); ++i) iov[n++] = frame.body[i];
    if (i < frame.body.size() || passed != nullptr) break;  // does not fit, or goes alone
  }
  msghdr message{};
  message.msg_iov = iov.data();
  message.msg_iovlen = n;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  if (passed != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = passed->get();
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0 && passed != nullptr) passed->reset(-1);
  return sent;
}

void OutQueue::sent_locked(uint64_t nbytes) {
  sent_bytes_ += nbytes;
  sending_bytes_ -= nbytes;
  bool freed = false;
  while (!sending_.empty()) {
    Frame& frame = sending_.front();
    const uint64_t of_head = std::min<uint64_t>(nbytes, sizeof frame.head - frame.head_sent);
    frame.head_sent += of_head;
    nbytes -= of_head;
    while (frame.next < frame.body.size()) {
      iovec& piece = frame.body[frame.next];
      const uint64_t n = std::min<uint64_t>(nbytes, piece.iov_len);
      piece.iov_base = static_cast<uint8_t*>(piece.iov_base) + n;
      piece.iov_len -= n;
      nbytes -= n;
      if (piece.iov_len > 0) break;
      ++frame.next;
    }
    if (frame.head_sent < sizeof frame.head || frame.next < frame.body.size()) break;
    if (is_answer(frame.head)) --answers_;
    copied_bytes_[frame.is_message()] -= frame.copied_nbytes;
    freed = freed || frame.copied_nbytes > 0;
    sending_.pop_front();
  }
  if (freed) room_.notify_all();
}

OutQueue::Pumped OutQueue::pump_locked() {
  left_ = false;
  uint64_t pumped = 0;
  while (!closed_) {
    fill_locked();
    if (sending_.empty()) return Pumped::kIdle;
    if (pumped >= kPumpMax) break;
    const ssize_t sent = write_some_locked();
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0) {  // also EFAULT: registered memory was unmapped
      broken_ = true;
      return Pumped::kBroken;
    }
    sent_locked(static_cast<uint64_t>(sent));
    pumped += static_cast<uint64_t>(sent);
  }
  full_ = true;
  return Pumped::kMore;
}

void OutQueue::forget_region(const Region& region) {
  const std::lock_guard lock(mutex_);
  for (Frame& frame : data_) {
    if (frame.region.get() == &region) refuse(frame);
  }
  for (Frame& frame : sending_) {
    if (frame.region.get() == &region && !own_rest_locked(frame)) return give_up_locked();
  }
}

void OutQueue::drop_answers(std::span<const uint64_t> tags) {
  const std::unordered_set<uint64_t> unwanted(tags.begin(), tags.end());
  const std::lock_guard lock(mutex_);
  answers_ -= std::erase_if(data_, [&](const Frame& frame) {
    return frame.head.type == FrameType::kData && unwanted.contains(frame.head.tag);
  });
}

std::vector<uint64_t> OutQueue::forget_batch(const Batch& batch) {
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> unsent;
  std::erase_if(data_, [&](const Frame& frame) {
    if (frame.batch.get() != &batch) return false;
    unsent.push_back(frame.head.tag);
    return true;
  });
  for (Frame& frame : sending_) {
    if (frame.batch.get() == &batch && !own_rest_locked(frame)) {
      give_up_locked();
      break;
    }
  }
  return unsent;
}

void OutQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (Frames* frames : {&sending_, &urgent_, &messages_, &data_}) frames->clear();
    copied_bytes_[0] = copied_bytes_[1] = sending_bytes_ = 0;
    answers_ = 0;
  }
  room_.notify_all();
}

uint64_t OutQueue::queued_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t sum = sending_bytes_;
  for (const Frame& frame : urgent_) sum += frame.left();
  for (const Frame& frame : messages_) sum += frame.left();
  for (const Frame& frame : data_) sum += frame.left();
  return sum;
}

uint64_t OutQueue::sent_bytes() const {
  const std::lock_guard lock(mutex_);
  return sent_bytes_;
}

}  // namespace mc
