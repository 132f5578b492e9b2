// mc_engine_describe: the engine as JSON.
#include "engine/engine.h"

namespace mc {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

const char* transport_name(uint32_t transport) {
  switch (transport) {
    case MC_TRANSPORT_LOCAL: return "local";
    case MC_TRANSPORT_SHM: return "shm";
    case MC_TRANSPORT_TCP: return "tcp";
    case MC_TRANSPORT_RDMA: return "rdma";
    case MC_TRANSPORT_MESSAGES: return "messages";
    default: return "fake";
  }
}

std::string field(const char* name, uint64_t value) {
  return ", \"" + std::string(name) + "\": " + std::to_string(value);
}

std::string peer_json(const Peer& peer) {
  const EndpointNumbers numbers = peer.endpoint->numbers();
  return "{\"id\": " + std::to_string(peer.id) +
         ", \"address\": " + quoted(peer.introduction.address) +
         ", \"incarnation\": " + quoted(hex(peer.introduction.incarnation)) +
         ", \"transport\": \"" + transport_name(peer.endpoint->transport()) + "\"" +
         ", \"reason\": " + quoted(peer.endpoint->reason()) +
         field("bytes_in", numbers.bytes_in) + field("bytes_out", numbers.bytes_out) +
         field("queued_bytes", numbers.queued_bytes) + field("parts_in_flight", numbers.in_flight) +
         ", \"paths\": " + peer.endpoint->paths_json() + "}";
}

std::string region_json(const Region& region) {
  return "{\"id\": " + std::to_string(region.id()) + field("nbytes", region.nbytes()) +
         field("access", region.access()) + field("pieces", region.pieces().size()) +
         ", \"mappable\": " + (region.fd() >= 0 ? "true" : "false") + "}";
}

}  // namespace

std::string Engine::describe() {
  std::vector<std::shared_ptr<Peer>> peers;
  std::deque<std::pair<uint64_t, Failure>> lost;
  size_t batches = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : peers_) peers.push_back(peer);
    lost = lost_;
    batches = batches_.size();
  }
  std::string out = "{\"address\": " + quoted(address_) +
                    ", \"incarnation\": " + quoted(hex(incarnation_)) + ", \"peers\": [";
  for (size_t i = 0; i < peers.size(); ++i) out += (i > 0 ? ", " : "") + peer_json(*peers[i]);
  out += "], \"lost_peers\": [";
  for (size_t i = 0; i < lost.size(); ++i) {
    out += (i > 0 ? ", " : "") + std::string("{\"id\": ") + std::to_string(lost[i].first) +
           ", \"reason\": " + quoted(lost[i].second.reason) + "}";
  }
  out += "], \"regions\": [";
  const auto regions = regions_.all();
  for (size_t i = 0; i < regions.size(); ++i) out += (i > 0 ? ", " : "") + region_json(*regions[i]);
  out += "], \"queues\": {\"messages\": " + std::to_string(queue_.count()) +
         field("message_bytes", queue_.bytes()) +
         field("message_bytes_max", settings_.queue_bytes_max) + field("batches", batches) +
         field("strangers", strangers_) + "}" + field("refused", refused_) +
         ", \"rdma\": {\"state\": \"" + (fabric_ ? "on" : "off") +
         "\", \"reason\": " + quoted(rdma_text_) + ", \"device_memory\": " +
         quoted(fabric_ ? fabric_->device_memory_text() : "rdma is off, and nothing else reaches it") +
         (fabric_ ? ", \"fabric\": " + fabric_->json() : "") + "}}";
  return out;
}

}  // namespace mc
