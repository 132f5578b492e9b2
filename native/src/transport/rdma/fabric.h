// RDMA of one engine: its adapters, what is registered with them, and the bound on queue pairs.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "transport/rdma/memory_book.h"

namespace mc {
class RdmaEndpoint;
}

namespace mc::rdma {

struct FabricOptions {
  AdapterOptions adapters;
  uint32_t rails_max = 1024;  // of our own making, over all peers; beyond it idle ones are evicted
};

class Fabric {
 public:
  // MC_E_USAGE with the words why RDMA cannot be used here.
  static int32_t open(const FabricOptions& options, Loop& loop, std::unique_ptr<Fabric>* out);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  // Stop looking at the devices; once nobody uses an endpoint any more.
  void stop();

  const Adapters& adapters() const { return adapters_; }
  MemoryBook& memory() { return memory_; }
  Staging& staging() { return staging_; }
  std::string json() const;
  std::string text() const;  // the chosen ports, for a line of the log
  // Why memory of a GPU is not registered, or how it could be.
  std::string device_memory_text() const;

  // Room for one more rail of `endpoint`, making it by evicting the rails of the endpoint that has
  // been idle for longest. False: all are busy.
  bool admit_rail(const std::shared_ptr<RdmaEndpoint>& endpoint);
  void release_rail() { --rails_; }
  void touch(const RdmaEndpoint& endpoint);  // it is in use
  void forget(const RdmaEndpoint& endpoint);
  void port_changed();

 private:
  Fabric(const FabricOptions& options, Adapters adapters);

  const FabricOptions options_;
  const Adapters adapters_;
  MemoryBook memory_;
  Staging staging_;
  std::atomic<uint64_t> rails_{0}, evictions_{0};

  std::mutex mutex_;  // a leaf
  struct User {
    const RdmaEndpoint* raw;
    std::weak_ptr<RdmaEndpoint> endpoint;
  };
  std::list<User> users_;  // the one used last is in front
};

}  // namespace mc::rdma
