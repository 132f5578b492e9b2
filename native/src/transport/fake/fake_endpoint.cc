#include "transport/fake/fake_endpoint.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace mc {
namespace {

constexpr uint64_t kNumbersAnOperation = 8;

void flip(uint8_t* bytes, uint64_t nbytes, uint64_t bit) {
  const uint64_t at = bit % (nbytes * 8);
  bytes[at / 8] = static_cast<uint8_t>(bytes[at / 8] ^ (1U << (at % 8)));
}

void delay(uint64_t us, Deadline deadline) {
  const Deadline until = std::min(deadline, Deadline::in_us(us));
  std::this_thread::sleep_until(until.as_time_point());
}

}  // namespace

FakeEndpoint::FakeEndpoint(Host& host, Introduction peer, StreamLimits limits, FaultPlan plan)
    : StreamEndpoint(host, std::move(peer), limits, "fake: seed " + std::to_string(plan.seed)),
      plan_(plan) {}

FakeEndpoint::Fate FakeEndpoint::throw_dice() {
  const uint64_t first = operations_++ * kNumbersAnOperation;
  const auto happens = [&](uint64_t i, uint32_t ppm) {
    return seeded(plan_.seed, first + i) % 1'000'000 < ppm;
  };
  Fate fate;
  if (happens(0, plan_.cut_ppm)) {
    if (seeded(plan_.seed, first + 1) % 2 == 0) {
      silent_ = true;
    } else {
      host().loop().post([self = shared_from_this()] {
        self->close({MC_E_PEER_UNREACHABLE, "the fake transport cut the connection"});
      });
    }
    fate.lost = true;
  }
  fate.lost = fate.lost || silent_ || happens(2, plan_.loss_ppm);
  fate.corrupt = happens(3, plan_.corrupt_ppm);
  fate.bit = seeded(plan_.seed, first + 4);
  if (plan_.delay_us > 0) fate.delay_us = seeded(plan_.seed, first + 5) % (plan_.delay_us + 1);
  return fate;
}

int32_t FakeEndpoint::send(const MessageHead& head, const void* bytes, Deadline deadline) {
  const std::lock_guard lock(order_mutex_);
  const Fate fate = throw_dice();
  delay(fate.delay_us, deadline);
  return fate.lost ? MC_OK : StreamEndpoint::send(head, bytes, deadline);
}

int32_t FakeEndpoint::reply(uint64_t correlation, const void* bytes, uint32_t nbytes) {
  const std::lock_guard lock(order_mutex_);
  const Fate fate = throw_dice();
  delay(fate.delay_us, Deadline());
  return fate.lost ? MC_OK : StreamEndpoint::reply(correlation, bytes, nbytes);
}

bool FakeEndpoint::passes(const Part& part) {
  return part.op == MC_OP_WRITE || !throw_dice().lost;  // writes are thrown for in issue_write()
}

void FakeEndpoint::issue_write(Connection& lane, const std::shared_ptr<Batch>& batch,
                               const Part& part, uint64_t tag) {
  const Fate fate = throw_dice();
  if (fate.lost) return lane.parts().not_sent(tag);
  if (!fate.corrupt || part.length == 0) return StreamEndpoint::issue_write(lane, batch, part, tag);
  std::vector<uint8_t> wrong(part.length);
  memcpy(wrong.data(), reinterpret_cast<const void*>(part.local), part.length);
  flip(wrong.data(), part.length, fate.bit);
  (void)lane.write([&](OutQueue& out) {
    return out.send(write_head(part, tag), wrong.data(), OutQueue::Room::kAlways);
  });
}

void FakeEndpoint::part_over(const std::shared_ptr<Batch>& batch, const Part& part, int32_t status,
                             uint32_t crc) {
  const Fate fate = throw_dice();
  if (fate.corrupt && status == MC_OK && part.op == MC_OP_READ && part.length > 0) {
    if (const Copying copying(*batch); copying) {
      auto* bytes = reinterpret_cast<uint8_t*>(part.local);
      flip(bytes, part.length, fate.bit);
      crc = mc_crc32c(bytes, part.length, 0);
    }
  }
  if (fate.delay_us == 0) return StreamEndpoint::part_over(batch, part, status, crc);
  const auto self = std::static_pointer_cast<FakeEndpoint>(shared_from_this());
  host().loop().call_at(Deadline::in_us(fate.delay_us), [self, batch, part, status, crc] {
    self->StreamEndpoint::part_over(batch, part, status, crc);
    self->issue();
  });
}

}  // namespace mc
