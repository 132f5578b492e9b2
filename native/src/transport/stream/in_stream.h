// The receiving half of a connection: bytes to frames. Belongs to the progress thread.
//
// Small bodies are taken from a buffer; a body with a place of its own (data, writes, messages) is
// received straight into it once the buffer is empty. What a frame means is the handler's affair.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "base/fd.h"
#include "transport/stream/frame.h"

namespace mc {

// Puts up to the pieces' sum of bytes there; returns how many.
using Fill = std::function<ssize_t(const iovec* pieces, size_t n)>;

class FrameHandler {
 public:
  virtual ~FrameHandler() = default;

  enum class Body {
    kInline,   // handed over whole to end(); at most kInlineMax
    kPlaced,   // goes where place() says, piece by piece
    kDropped,  // received and thrown away
    kBad,      // against the protocol: the connection ends
  };
  virtual Body begin_on_progress(const FrameHead& head) = 0;
  // Call fill once with the memory of body bytes [done, done + n), or not at all when it is gone
  // (then those bytes are dropped). Returns what fill returned, or 0.
  virtual ssize_t place_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                    const Fill& fill) = 0;
  // The whole body is there. `bytes`: of an inline one. False: against the protocol.
  virtual bool end_on_progress(const FrameHead& head, const uint8_t* bytes) = 0;
};

class InStream {
 public:
  static constexpr uint64_t kInlineMax = 64 << 10;

  InStream(int fd, bool takes_fds, FrameHandler& handler);

  enum class Outcome { kDrained, kMore, kClosed, kBad };
  Outcome read_on_progress();
  Outcome resume_on_progress() { return parse_on_progress(); }

  Fd take_fd();  // oldest descriptor that came along; none: empty
  uint64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }

 private:
  ssize_t receive_on_progress(bool* drained);
  ssize_t receive_into(iovec* pieces, size_t n);
  Outcome parse_on_progress();
  bool consume_body_on_progress();
  uint64_t buffered() const { return end_ - begin_; }

  static constexpr uint64_t kBufferBytes = 128 << 10;
  static constexpr uint64_t kDirectMin = 8 << 10;  // below it a copy is cheaper than a system call
  static constexpr size_t kFdsMax = 8;

  const int fd_;
  const bool takes_fds_;
  FrameHandler& handler_;
  std::unique_ptr<uint8_t[]> buffer_;
  uint64_t begin_ = 0, end_ = 0;

  bool in_body_ = false;
  FrameHead head_;
  FrameHandler::Body kind_{};
  uint64_t done_ = 0;  // of the body

  std::deque<Fd> fds_;
  std::atomic<uint64_t> received_bytes_{0};
};

}  // namespace mc
