// The frame decoder and everything behind it, fed with bytes that were frames before they were
// mutated. Proof is that the process lives, that memory beside the regions stays as it was, and that
// every connection comes to its end; the sanitizer builds look at the rest.
//
// One input is the bytes of one connection. Inputs are derived from a corpus of whole frames by a
// seed, for FUZZ_SECONDS (default 5); a failure prints the seed that repeats it. `run.sh fuzz` makes it
// a target of libFuzzer instead (MC_LIBFUZZER), which begins with the same corpus: it is written into
// the folder FUZZ_CORPUS.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "transport/shm/shm_endpoint.h"

namespace {

using mc::FrameHead;
using mc::FrameType;
using Input = std::vector<uint8_t>;

constexpr uint64_t kRegionBytes = 64 << 10, kGuardBytes = 64 << 10;
constexpr uint8_t kGuard = 0xC3;
constexpr uint64_t kEndMs = 20'000;

class StubHost final : public mc::Host {
 public:
  StubHost() : memory_(kGuardBytes * 2 + kRegionBytes, kGuard) {
    CHECK_EQ(loop_.start(), MC_OK);
    const mc_piece piece{reinterpret_cast<uint64_t>(memory_.data()) + kGuardBytes, kRegionBytes};
    uint32_t id = 0;
    CHECK_EQ(regions_.add(&piece, 1, MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE, -1, &id),
             MC_OK);
  }
  std::shared_ptr<mc::Region> region(uint32_t id) override { return regions_.find(id); }
  bool reserve(uint32_t, const std::shared_ptr<mc::RoomWaiter>&) override { return true; }
  bool is_crowded(const std::shared_ptr<mc::RoomWaiter>&) override { return false; }
  void unreserve(uint32_t) override {}
  void deliver(mc::Endpoint& from, const mc::MessageHead& head, mc::Bytes bytes) override {
    if (head.nbytes > 0) sum_ += bytes.get()[head.nbytes - 1];  // all of it is ours to look at
    from.taken(head.nbytes);
  }
  void deliver_reply(mc::Endpoint&, uint64_t, mc::Bytes bytes, uint32_t nbytes) override {
    if (nbytes > 0) sum_ += bytes.get()[nbytes - 1];
  }
  void lost(mc::Endpoint&, const mc::Failure&) override { ended_->set(); }
  void refused() override { ++refused_; }
  mc::Loop& loop() override { return loop_; }
  mc::Executor& executor() override { return executor_; }

  void expect_end(mc::Event* ended) { ended_ = ended; }
  bool guards_hold() const {
    for (uint64_t i = 0; i < kGuardBytes; ++i) {
      if (memory_[i] != kGuard || memory_[kGuardBytes + kRegionBytes + i] != kGuard) return false;
    }
    return true;
  }
  uint64_t refusals() const { return refused_; }

 private:
  std::vector<uint8_t> memory_;
  mc::RegionTable regions_;
  mc::Loop loop_;
  mc::Executor executor_;
  mc::Event* ended_ = nullptr;
  std::atomic<uint64_t> refused_{0}, sum_{0};
};

// Send the bytes, take what comes back, hang up, and wait for the other side's end.
void run(StubHost& host, const Input& input) {
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
  const mc::Fd ours(pair[0]);
  mc::Event ended;
  host.expect_end(&ended);
  const mc::Introduction peer{{}, "fuzz", MC_TRANSPORT_SHM, 1 << 20, 1 << 20};
  const auto endpoint = std::make_shared<mc::ShmEndpoint>(
      host, peer, mc::StreamLimits{1 << 20, 1 << 20, 1 << 16}, mc::ShmTies{});
  CHECK_EQ(endpoint->add_lane(mc::Fd(pair[1]), true), MC_OK);
  CHECK_EQ(endpoint->start(), MC_OK);
  std::vector<uint8_t> target(4096);
  mc_slice slice{MC_OP_READ, 1, 0, reinterpret_cast<uint64_t>(target.data()), target.size(),
                 MC_SLICE_CRC, 0, 0, 0};
  const auto batch = std::make_shared<mc::Batch>(&slice, 1, kEndMs);
  endpoint->submit(batch, false);  // so that data frames can have an addressee
  char sink[4096];
  for (size_t at = 0; at < input.size();) {
    const ssize_t n = send(ours.get(), input.data() + at, input.size() - at, MSG_NOSIGNAL);
    if (n > 0) at += static_cast<size_t>(n);
    else if (errno != EAGAIN) break;  // it hung up
    while (recv(ours.get(), sink, sizeof sink, 0) > 0) continue;
  }
  shutdown(ours.get(), SHUT_WR);
  const mc::Deadline end = mc::Deadline::in_ms(kEndMs);
  while (!ended.is_set()) {
    CHECK(!end.passed());
    while (recv(ours.get(), sink, sizeof sink, 0) > 0) continue;
    pollfd ready{ours.get(), POLLIN, 0};
    (void)poll(&ready, 1, 1);
  }
  CHECK(batch->done());
}

void append(Input* out, const FrameHead& head, const void* body = nullptr) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&head);
  out->insert(out->end(), bytes, bytes + sizeof head);
  const auto* more = static_cast<const uint8_t*>(body);
  if (body != nullptr) out->insert(out->end(), more, more + head.nbytes);
}

template <typename Entry>
Input frame(FrameType type, uint64_t tag, uint32_t a, uint32_t b, uint64_t c,
            const std::vector<Entry>& body) {
  Input out;
  append(&out, {static_cast<uint32_t>(body.size() * sizeof(Entry)), type, 0, tag, a, b, c},
         body.data());
  return out;
}

std::vector<Input> corpus() {
  const std::vector<uint8_t> none, some(300, 7), page(4096, 9), much(40'000, 5);
  const std::vector<mc::ReadEntry> reads{{1, 1, 0, 0, 4096}, {2, 1, 0, 60'000, 5536}, {3, 9, 0, 0, 1}};
  const std::vector<mc::PullEntry> pulls{{1, 1, 1, 0, 4096, 100}, {2, 1, 0, 65'536, 1, 1}};
  const std::vector<uint64_t> tags{1, 2, 3};
  std::vector<uint8_t> info(sizeof(mc::RegionInfo) + sizeof(mc_piece));
  const mc::RegionInfo shape{4096, 1, 1};
  const mc_piece piece{4096, 4096};
  memcpy(info.data(), &shape, sizeof shape);
  memcpy(info.data() + sizeof shape, &piece, sizeof piece);
  return {
      frame(FrameType::kMessage, 0, 1, 0, 0, some),
      frame(FrameType::kMessage, 5, 1, 0, 0, much),
      frame(FrameType::kMessage, 5, 1, 0, 0, none),
      frame(FrameType::kReply, 5, 0, 0, 0, some),
      frame(FrameType::kRead, 0, 3, 0, 0, reads),
      frame(FrameType::kData, uint64_t{1} << 32, 0, 0, 0, page),
      frame(FrameType::kData, uint64_t{1} << 32, static_cast<uint32_t>(MC_E_ACCESS), 0, 0, none),
      frame(FrameType::kWrite, 7, 1, 1, 100, some),
      frame(FrameType::kWrite, 7, 1, 0, 65'236, some),
      frame(FrameType::kWrite, 7, 1, 1, 20'000, much),
      frame(FrameType::kPull, 0, 2, 0, 0, pulls),
      frame(FrameType::kDone, uint64_t{1} << 32, 0, 1, 0, none),
      frame(FrameType::kQuery, 1, 1, 0, 0, none),
      frame(FrameType::kRegion, 1, 1, 0, 0, info),
      frame(FrameType::kRevoked, 0, 1, 0, 0, none),
      frame(FrameType::kRevokedAck, 0, 1, 0, 0, none),
      frame(FrameType::kCredit, 0, 0, 0, 4096, none),
      frame(FrameType::kCancel, 0, 3, 0, 0, tags),
  };
}

// A few frames of the corpus, then damaged in up to four places.
Input mutate(const std::vector<Input>& frames, uint64_t seed) {
  uint64_t number = 0;
  const auto dice = [&](uint64_t n) { return mc::seeded(seed, number++) % n; };
  Input out;
  const uint64_t count = 1 + dice(6);
  std::vector<size_t> starts;
  for (uint64_t i = 0; i < count; ++i) {
    const Input& one = frames[dice(frames.size())];
    starts.push_back(out.size());
    out.insert(out.end(), one.begin(), one.end());
  }
  constexpr uint64_t kEdges[] = {0, 1, 31, 32, 4096, 1 << 20, (1 << 20) + 1, UINT32_MAX,
                                 1ULL << 63, UINT64_MAX};
  for (uint64_t damages = dice(5); damages > 0 && out.size() > 8; --damages) {
    const size_t start = starts[dice(starts.size())];
    const uint64_t edge = kEdges[dice(std::size(kEdges))];
    switch (dice(4)) {
      case 0: out[dice(out.size())] ^= static_cast<uint8_t>(1U << dice(8)); break;
      case 1: out.resize(dice(out.size()) + 1); break;
      case 2:  // a field of a head
        if (start + sizeof(FrameHead) <= out.size()) memcpy(&out[start + 4 * dice(7)], &edge, 4);
        break;
      default:  // anything, eight bytes of it
        memcpy(&out[dice(out.size() - 7)], &edge, 8);
    }
  }
  return out;
}

}  // namespace

#ifdef MC_LIBFUZZER
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* folder = getenv("FUZZ_CORPUS");
  uint64_t number = 0;
  for (const Input& whole : corpus()) {
    if (folder == nullptr) break;
    const std::string path = std::string(folder) + "/frame-" + std::to_string(number++);
    FILE* file = fopen(path.c_str(), "wb");
    CHECK(file != nullptr);
    CHECK_EQ(fwrite(whole.data(), 1, whole.size(), file), whole.size());
    CHECK_EQ(fclose(file), 0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t n) {
  static StubHost host;
  run(host, Input(bytes, bytes + n));
  CHECK(host.guards_hold());
  return 0;
}
#else
int main() {
  StubHost host;
  const std::vector<Input> frames = corpus();
  for (const Input& whole : frames) run(host, whole);
  CHECK(host.guards_hold());
  const char* seconds = getenv("FUZZ_SECONDS");
  const uint64_t fuzz_s = seconds == nullptr ? 5 : static_cast<uint64_t>(atoi(seconds));
  const mc::Deadline end = mc::Deadline::in_ms(fuzz_s * 1000);
  uint64_t seed = 1;
  for (; !end.passed(); ++seed) {
    run(host, mutate(frames, seed));
    if (host.guards_hold()) continue;
    fprintf(stderr, "seed %lu wrote beside the region\n", seed);
    return 1;
  }
  printf("  %lu inputs, %lu refusals\n", seed, host.refusals());
  CHECK(host.refusals() > 0);
  return 0;
}
#endif
