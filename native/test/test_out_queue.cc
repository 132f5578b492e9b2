// What of a connection leaves at once, and what waits for whoever makes progress.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "transport/stream/out_queue.h"

namespace {

using mc::Batch;
using mc::FrameHead;
using mc::FrameType;
using mc::OutQueue;

struct Pair {
  mc::Fd here, there;
  Pair() {
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    here.reset(fds[0]);
    there.reset(fds[1]);
  }
  // Bytes that have left and not been looked at.
  int64_t arrived() const {
    static uint8_t bytes[1 << 20];
    return std::max<int64_t>(read(there.get(), bytes, sizeof bytes), 0);
  }
};

FrameHead message(uint32_t nbytes) {
  FrameHead head;
  head.type = FrameType::kMessage;
  head.nbytes = nbytes;
  return head;
}

constexpr int64_t kHead = sizeof(FrameHead);
constexpr uint64_t kCopiedMax = 32 << 10, kCredit = 1 << 20;

void little_is_left_and_goes_together() {
  const Pair pair;
  OutQueue out(pair.here.get(), kCopiedMax, kCredit);
  std::vector<uint8_t> bytes(100, 7);
  CHECK_EQ(out.send(message(100), bytes.data(), OutQueue::Room::kRefuse), MC_OK);
  CHECK_EQ(pair.arrived(), kHead + 100);
  out.defer(true);
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(out.send(message(100), bytes.data(), OutQueue::Room::kRefuse), MC_OK);
    CHECK(out.left_something());
  }
  bytes.assign(100, 9);  // the caller's again: what is queued has its own
  CHECK_EQ(pair.arrived(), 0);
  out.defer(false);
  CHECK(out.pump() == OutQueue::Pumped::kIdle);
  CHECK(!out.left_something());
  CHECK_EQ(pair.arrived(), 3 * (kHead + 100));
}

void much_is_sent_by_whoever_adds_it() {
  const Pair pair;
  OutQueue out(pair.here.get(), 1 << 20, kCredit);
  const std::vector<uint8_t> bytes(64 << 10);
  out.defer(true);
  CHECK_EQ(out.send(message(64 << 10), bytes.data(), OutQueue::Room::kRefuse), MC_OK);
  CHECK_EQ(pair.arrived(), kHead + (64 << 10));
}

void what_was_left_takes_no_room_from_others() {
  const Pair pair;
  OutQueue out(pair.here.get(), kCopiedMax, kCredit);
  const std::vector<uint8_t> bytes(16 << 10);
  out.defer(true);
  for (int i = 0; i < 5; ++i) {  // more than may be queued for a peer that does not read
    CHECK_EQ(out.send(message(16 << 10), bytes.data(), OutQueue::Room::kRefuse), MC_OK);
  }
  out.defer(false);
  CHECK(out.pump() == OutQueue::Pumped::kIdle);
  CHECK_EQ(pair.arrived(), 5 * (kHead + (16 << 10)));
}

void writes_likewise(uint64_t count, bool leaves_at_once) {
  const Pair pair;
  OutQueue out(pair.here.get(), kCopiedMax, kCredit);
  std::vector<uint8_t> bytes(4096);
  std::vector<mc_slice> slices(1, {MC_OP_WRITE, 1, 0, reinterpret_cast<uint64_t>(bytes.data()),
                                   bytes.size(), 0, 0, 0, 0});
  const auto batch = std::make_shared<Batch>(slices.data(), 1, 10'000);
  FrameHead head;
  head.type = FrameType::kWrite;
  head.nbytes = 4096;
  out.defer(true);
  for (uint64_t i = 0; i < count; ++i) CHECK(out.push(head, batch, slices[0].local));
  out.pump_or_defer();
  const auto all = static_cast<int64_t>(count) * (kHead + 4096);
  CHECK_EQ(pair.arrived(), leaves_at_once ? all : 0);
  out.defer(false);
  (void)out.pump();
  CHECK_EQ(pair.arrived(), leaves_at_once ? 0 : all);
  batch->finish(MC_E_CANCELLED, "");
}

}  // namespace

int main() {
  little_is_left_and_goes_together();
  much_is_sent_by_whoever_adds_it();
  what_was_left_takes_no_room_from_others();
  writes_likewise(4, false);
  writes_likewise(16, true);
}
