#include "transport/rdma/fabric.h"

#include <unistd.h>

#include <algorithm>

#include "transport/rdma/rdma_endpoint.h"

namespace mc::rdma {

Fabric::Fabric(const FabricOptions& options, Adapters adapters)
    : options_(options),
      adapters_(std::move(adapters)),
      memory_(adapters_,
              (*std::min_element(adapters_.begin(), adapters_.end(), [](const auto& a, const auto& b) {
                return a->region_bytes_max() < b->region_bytes_max();
              }))->region_bytes_max()),
      staging_(adapters_) {}

int32_t Fabric::open(const FabricOptions& options, Loop& loop, std::unique_ptr<Fabric>* out) {
  std::string why;
  Adapters adapters = open_adapters(options.adapters, &why);
  if (adapters.empty()) return fail(MC_E_USAGE, "no RDMA here: %s", why.c_str());
  if (adapters.size() > kAdaptersMax) {
    if (!options.adapters.devices.empty()) {
      return fail(MC_E_USAGE, "%zu RDMA ports were named, and %zu are the most: name fewer",
                  adapters.size(), kAdaptersMax);
    }
    adapters.resize(kAdaptersMax);
  }
  std::unique_ptr<Fabric> fabric(new Fabric(options, std::move(adapters)));
  for (const auto& adapter : fabric->adapters_) {
    const int32_t status = adapter->start(loop, [raw = fabric.get()] { raw->port_changed(); });
    if (status != MC_OK) return status;
  }
  *out = std::move(fabric);
  return MC_OK;
}

Fabric::~Fabric() { stop(); }

void Fabric::stop() {
  for (const auto& adapter : adapters_) adapter->stop();
}

std::string Fabric::text() const {
  std::string out;
  for (const auto& adapter : adapters_) out += (out.empty() ? "" : "; ") + adapter->text();
  return out;
}

std::string Fabric::device_memory_text() const {
  const auto is_loaded = [](const char* module) {
    return access((std::string("/sys/module/") + module).c_str(), F_OK) == 0;
  };
  const verbs::Library* library = verbs::library(nullptr);
  DeviceMemoryFacts facts;
  facts.verbs_have_dmabuf = library != nullptr && library->reg_dmabuf_mr != nullptr;
  facts.peer_module = is_loaded("nvidia_peermem") || is_loaded("nv_peer_mem");
  std::string reason;
  if (plan_device_memory(facts, &reason) == DeviceMemoryWay::kRefused) return reason;
  return "this release has no way for it, though there is one " + reason;
}

std::string Fabric::json() const {
  const auto field = [](const char* name, uint64_t value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  std::string out = "{\"ports\": [";
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const Adapter& adapter = *adapters_[i];
    out += (i > 0 ? ", " : "") + std::string("{\"name\": \"") + adapter.name() + "\"" +
           field("port", adapter.port()) + ", \"chosen\": \"" + adapter.text() + "\"" +
           ", \"active\": " + (adapter.is_active() ? "true" : "false") +
           field("queue_pairs", adapter.qps()) + field("works", adapter.works()) +
           field("inlined", adapter.inlined()) +
           field("doorbells", adapter.doorbells()) + field("completions", adapter.completions()) +
           field("polls", adapter.polls()) + field("events", adapter.events()) + "}";
  }
  const MemoryNumbers memory = memory_.numbers();
  std::string refusal;
  for (const char c : memory.refusal) refusal += c == '"' || c == '\\' ? '\'' : c;
  return out + "], \"memory\": {\"registrations\": " + std::to_string(memory.registrations) +
         field("registered_bytes", memory.registered_bytes) +
         field("registered_total", memory.total) + field("registering_ns", memory.total_ns) +
         field("refused", memory.refused) + ", \"refusal\": \"" + refusal + "\"}" +
         field("rails", rails_) + field("rails_max", options_.rails_max) +
         field("evictions", evictions_) + "}";
}

bool Fabric::admit_rail(const std::shared_ptr<RdmaEndpoint>& endpoint) {
  while (rails_.fetch_add(1) >= options_.rails_max) {
    --rails_;
    std::vector<std::shared_ptr<RdmaEndpoint>> oldest_first;
    {
      const std::lock_guard lock(mutex_);
      for (auto it = users_.rbegin(); it != users_.rend(); ++it) {
        auto other = it->endpoint.lock();
        if (other && other != endpoint) oldest_first.push_back(std::move(other));
      }
    }
    const bool evicted = std::any_of(oldest_first.begin(), oldest_first.end(),
                                     [](const auto& other) { return other->evict(); });
    if (!evicted) return false;
    ++evictions_;
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(users_, [&](const User& user) { return user.raw == endpoint.get(); });
  users_.push_front({endpoint.get(), endpoint});
  return true;
}

void Fabric::touch(const RdmaEndpoint& endpoint) {
  const std::lock_guard lock(mutex_);
  if (users_.empty() || users_.front().raw == &endpoint) return;
  const auto found = std::find_if(users_.begin(), users_.end(),
                                  [&](const User& user) { return user.raw == &endpoint; });
  if (found != users_.end()) users_.splice(users_.begin(), users_, found);
}

// Every peer that ever had a rail: also one whose rails are down may have its path again.
void Fabric::port_changed() {
  std::vector<std::shared_ptr<RdmaEndpoint>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const User& user : users_) {
      if (auto endpoint = user.endpoint.lock()) all.push_back(std::move(endpoint));
    }
  }
  for (const auto& endpoint : all) endpoint->port_changed();
}

void Fabric::forget(const RdmaEndpoint& endpoint) {
  const std::lock_guard lock(mutex_);
  std::erase_if(users_, [&](const User& user) { return user.raw == &endpoint; });
}

}  // namespace mc::rdma
