// The engine: regions, peers, messages and batches of one mc_engine, and the Host of its transports.
//
// Life. The handle's core is shared with batch handles, so that a batch may be closed after its
// engine. shutdown() ends everything that waits, lets calls in progress leave, and joins threads.
//
// Lock order: mutex_ is a leaf: nothing is called while it is held.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/address.h"
#include "engine/messages.h"
#include "transport/local/local_endpoint.h"
#include "transport/rdma/fabric.h"
#include "transport/stream/stream_endpoint.h"
#include "transport/transport.h"

namespace mc {

class Greeter;
class Listener;
struct Hello;

struct Settings {
  uint32_t transports = 0;
  std::string listen, advertise;
  Calling calling;
  uint32_t tcp_lanes = 0;  // 0: as suits the peer
  uint32_t message_bytes_max = 16 << 20;
  uint64_t queue_bytes_max = 64 << 20;
  rdma::FabricOptions rdma;
  uint64_t fault_seed = 0;
  uint32_t fault_loss_ppm = 0, fault_corrupt_ppm = 0, fault_cut_ppm = 0, fault_delay_us = 0;
};

struct Peer {
  uint64_t id = 0;
  std::shared_ptr<Endpoint> endpoint;
  Introduction introduction;
  std::string opened_as;    // the address it was opened by; "" when it came to us
  uint64_t opened_count = 0;
  RequestTable requests;
};

class Engine final : public Host, public std::enable_shared_from_this<Engine> {
 public:
  static int32_t open(Settings settings, std::shared_ptr<Engine>* out);
  ~Engine() override;
  void shutdown();

  // A call in progress, between entering and leaving; false: the engine is closing.
  bool enter();
  void leave();

  const Settings& settings() const { return settings_; }
  uint32_t transports() const { return transports_; }  // that work here, of those asked for
  const Token& incarnation() const { return incarnation_; }
  const std::string& address() const { return address_; }
  const std::string& shm_name() const { return shm_name_; }
  int closing_fd() const { return closing_fd_.get(); }
  RegionTable& regions() { return regions_; }
  MessageQueue& queue() { return queue_; }
  std::string describe();

  int32_t open_peer(const std::string& address, Deadline deadline, uint64_t* out_peer);
  int32_t close_peer(uint64_t id);
  // MC_E_PEER_UNREACHABLE with the reason once it is gone.
  int32_t find_peer(uint64_t id, std::shared_ptr<Peer>* out);
  int32_t register_region(const mc_piece* pieces, uint64_t n, uint32_t access, int32_t fd,
                          uint32_t* out_region);
  int32_t deregister(uint32_t region, Deadline deadline);
  // Nothing is written any more into a region that is being deregistered. Also after shutdown().
  bool is_quiet(uint32_t id);
  int32_t request(uint64_t peer, const MessageHead& head, const void* data, Deadline deadline,
                  RequestTable::Waiter* out);

  // MC_E_TIMEOUT; MC_E_CANCELLED: woken or closed.
  int32_t receive(Deadline deadline, Received* out);

  // Batches in progress, so that closing can end them.
  void track(const std::shared_ptr<Batch>& batch, const std::shared_ptr<Endpoint>& endpoint);
  void untrack(const Batch& batch);

  // Take in a new peer. The endpoint is started by the caller afterwards.
  uint64_t adopt(std::shared_ptr<Endpoint> endpoint, Introduction who, const std::string& opened_as);
  std::shared_ptr<StreamEndpoint> make_stream(uint32_t choice, Introduction who,
                                              std::string reason);
  Hello own_hello() const;
  StreamLimits stream_limits() const;

  // For the greeter: peers that more lanes may join, and the bound on strangers.
  void add_session(const Token& session, const std::shared_ptr<StreamEndpoint>& endpoint);
  std::shared_ptr<StreamEndpoint> session(const Token& session);
  bool add_stranger();
  void drop_stranger() { --strangers_; }

  // Host
  std::shared_ptr<Region> region(uint32_t id) override { return regions_.find(id); }
  bool reserve(uint32_t nbytes, const std::shared_ptr<RoomWaiter>& waiter) override {
    return queue_.reserve(nbytes, waiter);
  }
  bool is_crowded(const std::shared_ptr<RoomWaiter>& waiter) override {
    return queue_.is_crowded(waiter);
  }
  void unreserve(uint32_t nbytes) override { queue_.unreserve(nbytes); }
  void deliver(Endpoint& from, const MessageHead& head, Bytes bytes) override;
  void deliver_reply(Endpoint& from, uint64_t correlation, Bytes bytes, uint32_t nbytes) override;
  void lost(Endpoint& endpoint, const Failure& why) override;
  void refused() override { ++refused_; }
  Loop& loop() override { return loop_; }
  Executor& executor() override { return executor_; }

 private:
  explicit Engine(Settings settings);
  int32_t start();
  int32_t start_listening();
  int32_t start_rdma();
  int32_t connect_peer(const std::string& address, Deadline deadline, uint64_t* out_peer);
  int32_t open_local(const Hello& hello, const std::string& address, uint64_t* out_peer);
  int32_t open_shm(const Hello& hello, const std::string& address, Deadline deadline,
                   uint64_t* out_peer);
  int32_t open_stream(Fd fd, const Hello& hello, const std::string& address,
                      const std::string& reason, Deadline deadline, uint64_t* out_peer);
  void open_lanes(const HostPort& where, const Hello& hello, StreamEndpoint& endpoint,
                  Deadline deadline);
  std::shared_ptr<Peer> peer_by_id(uint64_t id);
  uint32_t message_window() const;

  const Settings settings_;
  const Token incarnation_ = random_token();
  std::string address_;   // "" when not listening
  std::string shm_name_;  // of the abstract unix socket; "" when shm is off
  Fd closing_fd_;         // readable once the engine closes
  uint32_t transports_;
  std::string rdma_text_;  // what was chosen, or why there is none
  Loop loop_;
  Executor executor_;
  std::unique_ptr<rdma::Fabric> fabric_;  // or none
  RegionTable regions_;
  MessageQueue queue_;
  std::vector<std::shared_ptr<Listener>> listeners_;
  std::atomic<uint64_t> refused_{0}, next_correlation_{1}, strangers_{0}, fakes_{0}, calls_{0};
  std::atomic<bool> closing_{false};

  std::mutex mutex_;
  std::condition_variable calls_left_, opened_;
  uint64_t next_peer_ = 1;
  std::map<uint64_t, std::shared_ptr<Peer>> peers_;
  std::unordered_map<std::string, uint64_t> peer_by_address_;
  std::set<std::string> opening_;  // addresses that a thread is connecting to
  std::deque<std::pair<uint64_t, Failure>> lost_;  // the last few, for words
  std::unordered_map<const Batch*, std::pair<std::weak_ptr<Batch>, std::weak_ptr<Endpoint>>>
      batches_;
  std::map<Token, std::weak_ptr<StreamEndpoint>> sessions_;
  std::map<uint32_t, std::shared_ptr<Region>> leaving_;  // deregistered, and a copy still runs
};

// Engines of this process by incarnation: the proof of "same process".
std::shared_ptr<Engine> engine_here(const Token& incarnation);

}  // namespace mc
