// A peer with which there is no way for bytes, such as a node that has RDMA alone for a master that
// has no device: messages and replies, and nothing else in either direction.
#pragma once

#include <memory>

#include "transport/stream/stream_endpoint.h"

namespace mc {

class MessagesEndpoint final : public StreamEndpoint {
 public:
  MessagesEndpoint(Host& host, Introduction peer, StreamLimits limits)
      : StreamEndpoint(host, std::move(peer), limits, kReason) {}

  uint32_t transport() const override { return MC_TRANSPORT_MESSAGES; }
  bool carries_bytes() const override { return false; }
  void submit(const std::shared_ptr<Batch>& batch, bool) override {
    batch->finish(MC_E_PEER_UNREACHABLE, kReason);
  }
  int32_t map(uint32_t, Deadline, uint64_t*, uint64_t*) override {
    return fail(MC_E_PEER_UNREACHABLE, "%s", kReason);
  }

 private:
  static constexpr const char* kReason = "messages alone: there is no way for bytes in common";
};

}  // namespace mc
