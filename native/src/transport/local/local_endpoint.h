// Two engines in one process: copies from memory to memory, messages from hand to hand.
//
// A LocalLink joins the two sides. Whoever uses the other side's Host holds the link's lock
// shared; a side that closes takes it exclusively, so that afterwards nobody calls its Host.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <string>

#include "transport/transport.h"

namespace mc {

class LocalEndpoint;

class LocalLink {
 public:
  using Pair = std::array<std::shared_ptr<LocalEndpoint>, 2>;
  // Two endpoints, [i] to be used by hosts[i]. They may be one and the same host.
  static Pair join(Host& first, Host& second, std::array<uint32_t, 2> message_bytes_max);

 private:
  friend class LocalEndpoint;
  std::shared_mutex mutex_;
  std::array<Host*, 2> hosts_{};  // null: closed
  std::array<std::weak_ptr<LocalEndpoint>, 2> ends_;
  std::array<uint32_t, 2> message_bytes_max_{};
};

class LocalEndpoint final : public Endpoint, public std::enable_shared_from_this<LocalEndpoint> {
 public:
  LocalEndpoint(std::shared_ptr<LocalLink> link, size_t side, Host& own)
      : link_(std::move(link)), side_(side), own_(own) {}

  uint32_t transport() const override { return MC_TRANSPORT_LOCAL; }
  std::string reason() const override { return "same process"; }
  EndpointNumbers numbers() const override;
  void submit(const std::shared_ptr<Batch>& batch, bool blocking) override;
  int32_t run_now(std::span<mc_slice> slices) override;
  void cancel(const std::shared_ptr<Batch>& batch, int32_t status, const char* reason) override;
  int32_t send(const MessageHead& head, const void* bytes, Deadline deadline) override;
  int32_t reply(uint64_t correlation, const void* bytes, uint32_t nbytes) override;
  void taken(uint32_t) override {}  // senders wait for room
  int32_t map(uint32_t region, Deadline deadline, uint64_t* out_address,
              uint64_t* out_nbytes) override;
  void forget(const std::shared_ptr<Region>&) override {}  // pins are all there is
  void wait_forgotten(const Region&, Deadline) override {}
  void close(const Failure& why) override;

 private:
  void run(const std::shared_ptr<Batch>& batch);
  int32_t move(const Part& part, uint32_t* out_crc);
  size_t other() const { return 1 - side_; }
  Failure gone_locked() const;  // under the link's lock

  const std::shared_ptr<LocalLink> link_;
  const size_t side_;
  Host& own_;
  std::atomic<bool> closed_{false};
  Failure why_;  // of our own close; under the link's lock
  std::atomic<uint64_t> bytes_in_{0}, bytes_out_{0};
};

}  // namespace mc
