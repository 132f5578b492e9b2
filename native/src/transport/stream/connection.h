// One framed connection: a socket, its two halves, and the parts asked for on it.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>

#include "transport/stream/in_stream.h"
#include "transport/stream/out_queue.h"
#include "transport/stream/part_table.h"
#include "transport/transport.h"

namespace mc {

class StreamEndpoint;

struct StreamLimits {
  uint32_t message_bytes_max = 0;  // of what we accept
  uint64_t copied_max = 0;         // message bytes queued for a peer that does not read
  uint32_t message_window = 0;     // messages we let be on their way to us
};

class Connection final : public Source,
                         public RoomWaiter,
                         public FrameHandler,
                         public std::enable_shared_from_this<Connection> {
 public:
  // `credit`: the window of messages that the peer offered.
  Connection(Fd fd, bool passes_fds, StreamEndpoint& owner, Host& host,
             const StreamLimits& limits, uint64_t credit);
  ~Connection() override;

  int32_t start(const std::shared_ptr<StreamEndpoint>& owner);
  // Nothing is sent or received after it. Does not wait.
  void close();

  // Write something with `use(out)` and see to what it leaves behind. From any thread.
  template <typename Use>
  auto write(Use use) {
    if constexpr (std::is_void_v<std::invoke_result_t<Use, OutQueue&>>) {
      use(out_);
      settle();
    } else {
      const auto result = use(out_);
      settle();
      return result;
    }
  }
  // Send what was queued without being sent.
  void flush();

  OutQueue& out() { return out_; }
  PartTable& parts() { return parts_; }
  Fd take_fd() { return in_.take_fd(); }
  int fd() const { return fd_.get(); }
  uint64_t received_bytes() const { return in_.received_bytes(); }
  // Work taken on for the peer and not yet answered by other means than the out queue.
  void add_work(uint64_t n) { work_ += n; }
  void finish_work(uint64_t n);
  // The program took a message: the peer hears of it, many at a time.
  void taken(uint32_t nbytes);

  void ready_on_progress(uint32_t events) override;
  void room() override;

  Body begin_on_progress(const FrameHead& head) override;
  ssize_t place_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                            const Fill& fill) override;
  bool end_on_progress(const FrameHead& head, const uint8_t* bytes) override;

 private:
  Body begin_body_on_progress(const FrameHead& head);
  Body begin_message_on_progress(const FrameHead& head);
  Body begin_data_on_progress(const FrameHead& head);
  Body begin_write_on_progress(const FrameHead& head);
  ssize_t place_data_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                 const Fill& fill);
  ssize_t place_write_on_progress(const FrameHead& head, uint64_t done, uint64_t n,
                                  const Fill& fill);
  ssize_t bounce(const std::vector<iovec>& pieces, uint64_t n, const Fill& fill);
  void end_data_on_progress(const FrameHead& head);
  void end_write_on_progress(const FrameHead& head);
  bool answer_reads_on_progress(const FrameHead& head, const uint8_t* bytes);
  bool cancel_on_progress(const FrameHead& head, const uint8_t* bytes);
  void give_credit();
  void handle_on_progress(uint32_t events);
  void act_on_progress(InStream::Outcome outcome, const std::shared_ptr<StreamEndpoint>& owner);
  void broken_on_progress(const char* what);
  void settle();
  void update_interest();
  bool backlogged() const { return out_.answers() + work_ > kBacklogMax; }

  Fd fd_;
  Host& host_;
  Loop& loop_;
  std::weak_ptr<StreamEndpoint> owner_;
  StreamEndpoint* const owner_raw_;  // valid while owner_ locks, as it is during a callback
  OutQueue out_;
  InStream in_;
  PartTable parts_;
  std::atomic<uint64_t> work_{0};
  const uint64_t message_window_;
  const bool carries_bytes_;
  std::atomic<uint64_t> untaken_{0};  // messages received and not credited
  std::atomic<uint64_t> credit_{0};   // of untaken_, what the program took
  std::atomic<bool> closed_{false};

  std::mutex interest_mutex_;
  uint32_t interest_ = 0;

  std::atomic<bool> crowded_{false};  // not read until answers have left

  uint32_t deferring_frames_ = 0;  // since out_ defers; for whoever makes progress

  // State of the frame being received; for whoever makes progress.
  Bytes message_;
  bool reserved_ = false;  // room for the message being received
  uint32_t reserved_nbytes_ = 0;
  uint32_t crc_ = 0;
  int32_t body_status_ = MC_OK;
  std::shared_ptr<Region> body_region_;
};

}  // namespace mc
