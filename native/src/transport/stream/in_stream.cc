#include "transport/stream/in_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace mc {
namespace {

constexpr int kRoundsMax = 16;   // reads in a row before others get their turn
constexpr size_t kPiecesMax = 256;
// Behind a body that is received where it belongs: the next head and no more than is cheap to copy.
constexpr size_t kTailBytes = 4 << 10;

}  // namespace

InStream::InStream(int fd, bool takes_fds, FrameHandler& handler)
    : fd_(fd),
      takes_fds_(takes_fds),
      handler_(handler),
      buffer_(std::make_unique_for_overwrite<uint8_t[]>(kBufferBytes)) {}

Fd InStream::take_fd() {
  if (fds_.empty()) return Fd();
  Fd fd = std::move(fds_.front());
  fds_.pop_front();
  return fd;
}

ssize_t InStream::receive_into(iovec* pieces, size_t n) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = n;
  alignas(cmsghdr) char control[CMSG_SPACE(kFdsMax * sizeof(int))];
  if (takes_fds_) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  const ssize_t received = recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received < 0 || !takes_fds_) return received;
  for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
    if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(one) + i * sizeof fd, sizeof fd);
      Fd owned(fd);
      if (fds_.size() < kFdsMax) fds_.push_back(std::move(owned));  // nobody asked for more
    }
  }
  return received;
}

ssize_t InStream::receive_on_progress(bool* drained) {
  if (begin_ == end_) begin_ = end_ = 0;
  const uint64_t left = in_body_ ? head_.nbytes - done_ : 0;
  ssize_t direct = 0;
  bool placed = false;
  if (in_body_ && kind_ == FrameHandler::Body::kPlaced && buffered() == 0 && left >= kDirectMin) {
    ssize_t received = -1;
    int error = 0;
    direct = handler_.place_on_progress(head_, done_, left, [&](const iovec* pieces, size_t n) {
      std::array<iovec, kPiecesMax + 1> all;
      size_t used = std::min(n, kPiecesMax);
      std::copy(pieces, pieces + used, all.begin());
      uint64_t room = 0;
      for (size_t i = 0; i < used; ++i) room += all[i].iov_len;
      const bool whole = room == left;  // only then the bytes behind it are the next frame's
      if (whole) all[used++] = {buffer_.get(), kTailBytes};
      placed = true;
      received = receive_into(all.data(), used);
      error = errno;
      if (received <= 0) return ssize_t{0};
      const auto got = static_cast<uint64_t>(received);
      *drained = got < room;
      end_ = got > room ? got - room : 0;
      return static_cast<ssize_t>(std::min(got, room));
    });
    if (placed) {
      errno = error;
      if (received <= 0) return received;
      done_ += static_cast<uint64_t>(direct);
      return received;
    }
  }
  if (end_ == kBufferBytes) {
    memmove(buffer_.get(), buffer_.get() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  iovec piece{buffer_.get() + end_, kBufferBytes - end_};
  const ssize_t received = receive_into(&piece, 1);
  if (received > 0) {
    *drained = static_cast<uint64_t>(received) < piece.iov_len;
    end_ += static_cast<uint64_t>(received);
  }
  return received;
}

InStream::Outcome InStream::read_on_progress() {
  for (int round = 0; round < kRoundsMax; ++round) {
    bool drained = false;
    const ssize_t received = receive_on_progress(&drained);
    if (received == 0) return Outcome::kClosed;
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Outcome::kDrained;
      return Outcome::kClosed;
    }
    received_bytes_.fetch_add(static_cast<uint64_t>(received), std::memory_order_relaxed);
    const Outcome outcome = parse_on_progress();
    if (outcome != Outcome::kDrained) return outcome;
    if (drained) return Outcome::kDrained;
  }
  return Outcome::kMore;
}

bool InStream::consume_body_on_progress() {
  const uint64_t n = std::min(buffered(), head_.nbytes - done_);
  if (n > 0 && kind_ == FrameHandler::Body::kPlaced) {
    uint64_t taken = 0;
    while (taken < n) {
      const uint8_t* from = buffer_.get() + begin_ + taken;
      const ssize_t placed = handler_.place_on_progress(
          head_, done_ + taken, n - taken, [&](const iovec* pieces, size_t count) {
            const uint8_t* at = from;
            for (size_t i = 0; i < count; ++i) {
              memcpy(pieces[i].iov_base, at, pieces[i].iov_len);
              at += pieces[i].iov_len;
            }
            return static_cast<ssize_t>(at - from);
          });
      if (placed <= 0) break;  // the destination is gone: the rest is dropped
      taken += static_cast<uint64_t>(placed);
    }
  }
  begin_ += n;
  done_ += n;
  return done_ == head_.nbytes;
}

InStream::Outcome InStream::parse_on_progress() {
  for (;;) {
    if (in_body_) {
      if (kind_ == FrameHandler::Body::kInline) {
        if (buffered() < head_.nbytes) {
          if (begin_ > 0) {  // make sure that the whole of it fits behind the beginning
            memmove(buffer_.get(), buffer_.get() + begin_, buffered());
            end_ -= begin_;
            begin_ = 0;
          }
          return Outcome::kDrained;
        }
        in_body_ = false;
        const uint8_t* bytes = buffer_.get() + begin_;
        begin_ += head_.nbytes;
        if (!handler_.end_on_progress(head_, bytes)) return Outcome::kBad;
        continue;
      }
      if (!consume_body_on_progress()) return Outcome::kDrained;
      in_body_ = false;
      if (!handler_.end_on_progress(head_, nullptr)) return Outcome::kBad;
      continue;
    }
    if (buffered() < sizeof head_) return Outcome::kDrained;
    memcpy(&head_, buffer_.get() + begin_, sizeof head_);
    kind_ = handler_.begin_on_progress(head_);
    if (kind_ == FrameHandler::Body::kBad) return Outcome::kBad;
    if (kind_ == FrameHandler::Body::kInline && head_.nbytes > kInlineMax) return Outcome::kBad;
    begin_ += sizeof head_;
    in_body_ = true;
    done_ = 0;
  }
}

}  // namespace mc
