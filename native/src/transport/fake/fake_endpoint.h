// A peer with seeded faults: the stream transport, and before each operation one throw of dice.
//
// An operation is one part of a slice, one message or one reply of this side. It may be
//   lost        never sent; whoever waits for it ends at its deadline
//   corrupted   one bit of a part differs in the destination (a crc tells)
//   cut         the connection ends; every second cut is silent: it stays open and carries nothing
//               any more, as a half-open connection does
//   delayed     by up to delay_us; messages stay in order
// All of it follows from the seed, the number of the endpoint in its engine, and the number of the
// operation, so that a failure found in a test is a seed to be replayed.
#pragma once

#include "transport/stream/stream_endpoint.h"

namespace mc {

struct FaultPlan {
  uint64_t seed = 0;
  uint32_t loss_ppm = 0, corrupt_ppm = 0, cut_ppm = 0, delay_us = 0;
};

class FakeEndpoint final : public StreamEndpoint {
 public:
  FakeEndpoint(Host& host, Introduction peer, StreamLimits limits, FaultPlan plan);

  uint32_t transport() const override { return MC_TRANSPORT_FAKE; }
  int32_t send(const MessageHead& head, const void* bytes, Deadline deadline) override;
  int32_t reply(uint64_t correlation, const void* bytes, uint32_t nbytes) override;
  void part_over(const std::shared_ptr<Batch>& batch, const Part& part, int32_t status,
                 uint32_t crc) override;

 protected:
  bool passes(const Part& part) override;
  void issue_write(Connection& lane, const std::shared_ptr<Batch>& batch, const Part& part,
                   uint64_t tag) override;

 private:
  struct Fate {
    bool lost = false, corrupt = false;
    uint64_t delay_us = 0, bit = 0;
  };
  Fate throw_dice();

  const FaultPlan plan_;
  std::atomic<uint64_t> operations_{0};
  std::atomic<bool> silent_{false};  // half-open
  std::mutex order_mutex_;           // held while a message is delayed
};

}  // namespace mc
