// The C ABI of native/abi/engine.h over the engine. Each function: check, enter, do, leave.
//
// Nothing is thrown across the ABI, and nothing works in a forked child: threads do not survive
// fork(), so every call there says so instead of waiting for them.
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>

#include <sys/mman.h>
#include <time.h>

#include "engine/engine.h"

using namespace mc;

namespace {

std::atomic<uint32_t> fork_generation{0};
const int fork_watch = pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });

constexpr int kEndTries = 1000;
constexpr uint64_t kNowBytes = 64 << 10;  // a few microseconds of copying
constexpr const char* kForked =
    "this engine was opened before fork(); open a new one in the child process";

}  // namespace

struct mc_engine {
  std::shared_ptr<Engine> core;
  uint32_t generation = fork_generation;
};

struct mc_batch {
  std::shared_ptr<Engine> core;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<Batch> batch;
  uint64_t timer = 0;
  uint32_t generation = fork_generation;
};

namespace {

void pause_for_memory() {
  const timespec pause{0, 1'000'000};  // others give back what they can
  nanosleep(&pause, nullptr);
}

// Runs `use(core)` as a call in progress and turns exceptions into statuses.
template <typename Use>
int32_t call(mc_engine* engine, Use use) {
  if (engine == nullptr) return fail(MC_E_USAGE, "the engine is null");
  if (engine->generation != fork_generation) return fail(MC_E_USAGE, "%s", kForked);
  const std::shared_ptr<Engine> core = engine->core;
  if (!core->enter()) return fail(MC_E_CANCELLED, "the engine was closed");
  int32_t status = MC_OK;
  try {
    status = use(*core);
  } catch (const std::bad_alloc&) {
    status = fail(MC_E_OUT_OF_SPACE, "out of memory");
  } catch (const std::exception& error) {
    status = fail(MC_E_INTERNAL, "%s", error.what());
  }
  core->leave();
  return status;
}

// The beginning of every transfer: the slices are sound, and there is such a peer.
template <typename Use>
int32_t call_with(mc_engine* engine, uint64_t id, const mc_slice* slices, uint64_t n, Use use) {
  return call(engine, [&](Engine& core) {
    int32_t status = Batch::check(slices, n);
    std::shared_ptr<Peer> peer;
    if (status == MC_OK) status = core.find_peer(id, &peer);
    return status == MC_OK ? use(core, *peer) : status;
  });
}

int32_t copy_text(const std::string& text, char* out, uint64_t capacity) {
  if (out == nullptr || capacity == 0) return fail(MC_E_USAGE, "no room for the text");
  const uint64_t n = std::min<uint64_t>(text.size(), capacity - 1);
  memcpy(out, text.data(), n);
  out[n] = '\0';
  return MC_OK;
}

std::vector<std::string> names_in(const char* text) {
  std::vector<std::string> out;
  std::istringstream names(text == nullptr ? "" : text);
  for (std::string name; std::getline(names, name, ',');) out.push_back(name);
  return out;
}

int32_t settings_of(const mc_engine_options& options, Settings* out) {
  constexpr uint32_t known = MC_TRANSPORT_LOCAL | MC_TRANSPORT_SHM | MC_TRANSPORT_TCP |
                             MC_TRANSPORT_RDMA | MC_TRANSPORT_FAKE | MC_TRANSPORT_MESSAGES;
  if (options.struct_size != sizeof options) {
    return fail(MC_E_USAGE, "mc_engine_options has %zu bytes, not %u", sizeof options,
                options.struct_size);
  }
  if (options.transports == 0 || (options.transports & ~known) != 0) {
    return fail(MC_E_USAGE, "transports %#x is not a mask of MC_TRANSPORT_*", options.transports);
  }
  out->transports = options.transports;
  out->listen = options.listen == nullptr ? "" : options.listen;
  out->advertise = options.advertise == nullptr ? "" : options.advertise;
  if (options.tcp_lanes > 0) out->tcp_lanes = options.tcp_lanes;
  if (options.message_max_bytes > 0) out->message_bytes_max = options.message_max_bytes;
  if (options.queue_max_bytes > 0) out->queue_bytes_max = options.queue_max_bytes;
  out->rdma.adapters.devices = names_in(options.rdma_devices);
  out->calling.interfaces = names_in(options.interfaces);
  if (HostPort where; parse_host_port(out->listen, &where) == MC_OK) out->calling.listen = where.host;
  if (options.silence_max_ms > 0) out->calling.silence_max_ms = options.silence_max_ms;
  out->rdma.adapters.gid_index = options.rdma_gid_index;
  out->rdma.adapters.traffic_class = options.rdma_traffic_class;
  out->rdma.adapters.region_bytes_max = options.rdma_region_max_bytes;
  if (options.rdma_rails_max > 0) out->rdma.rails_max = options.rdma_rails_max;
  out->fault_seed = options.fault_seed;
  out->fault_loss_ppm = options.fault_loss_ppm;
  out->fault_corrupt_ppm = options.fault_corrupt_ppm;
  out->fault_cut_ppm = options.fault_cut_ppm;
  out->fault_delay_us = options.fault_delay_us;
  return MC_OK;
}

void hand_over(uint64_t peer, const MessageHead& head, Bytes bytes, mc_message* out) {
  out->peer = peer;
  out->correlation = head.correlation;
  out->kind = head.kind;
  out->nbytes = head.nbytes;
  out->data = bytes.get();
  out->owner = bytes.release();
}

// Cancel, also when there is no memory for that: then the connection goes with the batch, so that
// nothing on it looks at the caller's memory any more.
void end_batch(Endpoint& endpoint, const std::shared_ptr<Batch>& batch, int32_t status,
               const char* reason) {
  try {
    return endpoint.cancel(batch, status, reason);
  } catch (const std::bad_alloc&) {
    batch->stop();
    batch->finish(status, reason);
  }
  for (int i = 0; i < kEndTries; ++i) {
    try {
      return endpoint.close({MC_E_OUT_OF_SPACE, ""});
    } catch (const std::bad_alloc&) {
      pause_for_memory();
    }
  }
}

int32_t outcome_of(const Batch& batch) { return batch.outcome().raise(); }

}  // namespace

extern "C" {

const char* mc_last_error(void) { return last_error(); }

// ---- engine

int32_t mc_engine_open(const mc_engine_options* options, mc_engine** out) try {
  if (options == nullptr || out == nullptr) return fail(MC_E_USAGE, "options or out is null");
  if (fork_watch != 0) return fail(MC_E_OUT_OF_SPACE, "pthread_atfork failed");
  Settings settings;
  int32_t status = settings_of(*options, &settings);
  if (status != MC_OK) return status;
  std::shared_ptr<Engine> core;
  status = Engine::open(std::move(settings), &core);
  if (status == MC_OK) *out = new mc_engine{std::move(core)};
  return status;
} catch (const std::exception& error) {
  return fail(MC_E_OUT_OF_SPACE, "%s", error.what());
}

void mc_engine_shutdown(mc_engine* engine) {
  if (engine == nullptr || engine->generation != fork_generation) return;
  for (int i = 0; i < kEndTries; ++i) {
    try {
      return engine->core->shutdown();
    } catch (const std::bad_alloc&) {
      pause_for_memory();
    }
  }
}

void mc_engine_close(mc_engine* engine) {
  if (engine == nullptr || engine->generation != fork_generation) return;
  mc_engine_shutdown(engine);
  delete engine;
}

int32_t mc_engine_address(mc_engine* engine, char* out, uint64_t capacity) {
  return call(engine, [&](Engine& core) { return copy_text(core.address(), out, capacity); });
}

int32_t mc_engine_describe(mc_engine* engine, char* out, uint64_t capacity, uint64_t* out_needed) {
  return call(engine, [&](Engine& core) {
    const std::string text = core.describe();
    if (out_needed != nullptr) *out_needed = text.size() + 1;
    return capacity == 0 ? MC_OK : copy_text(text, out, capacity);
  });
}

void mc_engine_wake(mc_engine* engine) {
  (void)call(engine, [](Engine& core) {
    core.queue().wake();
    return MC_OK;
  });
}

// ---- regions

int32_t mc_region_register(mc_engine* engine, const mc_piece* pieces, uint64_t n, uint32_t access,
                           int32_t fd, uint32_t* out_region) {
  return call(engine, [&](Engine& core) {
    return core.register_region(pieces, n, access, fd, out_region);
  });
}

int32_t mc_region_deregister(mc_engine* engine, uint32_t region, uint32_t timeout_ms) {
  const int32_t status = call(engine, [&](Engine& core) {
    return core.deregister(region, Deadline::in_ms(timeout_ms));
  });
  if (status != MC_E_CANCELLED || engine->core->is_quiet(region)) return status;
  return fail(MC_E_TIMEOUT, "a copy in region %u has not ended: keep its memory", region);
}

// ---- peers

int32_t mc_peer_open(mc_engine* engine, const char* address, uint32_t timeout_ms,
                     uint64_t* out_peer) {
  return call(engine, [&](Engine& core) {
    if (address == nullptr) return fail(MC_E_USAGE, "the address is null");
    return core.open_peer(address, Deadline::in_ms(timeout_ms), out_peer);
  });
}

int32_t mc_peer_close(mc_engine* engine, uint64_t peer) {
  return call(engine, [&](Engine& core) { return core.close_peer(peer); });
}

int32_t mc_peer_transport(mc_engine* engine, uint64_t id) {
  return call(engine, [&](Engine& core) {
    std::shared_ptr<Peer> peer;
    const int32_t status = core.find_peer(id, &peer);
    return status != MC_OK ? status : static_cast<int32_t>(peer->endpoint->transport());
  });
}

int32_t mc_peer_map(mc_engine* engine, uint64_t id, uint32_t region, uint32_t timeout_ms,
                    uint64_t* out_address, uint64_t* out_nbytes) {
  return call(engine, [&](Engine& core) {
    std::shared_ptr<Peer> peer;
    const int32_t status = core.find_peer(id, &peer);
    if (status != MC_OK) return status;
    return peer->endpoint->map(region, Deadline::in_ms(timeout_ms), out_address, out_nbytes);
  });
}

void mc_peer_unmap(uint64_t address, uint64_t nbytes) {
  (void)munmap(reinterpret_cast<void*>(address), nbytes);
}

// ---- transfers

int32_t mc_batch_submit(mc_engine* engine, uint64_t id, mc_slice* slices, uint64_t n,
                        uint32_t timeout_ms, mc_batch** out) {
  return call_with(engine, id, slices, n, [&](Engine& core, Peer& peer) {
    const auto batch = std::make_shared<Batch>(slices, n, timeout_ms);
    auto handle = std::make_unique<mc_batch>();
    handle->core = engine->core;
    handle->endpoint = peer.endpoint;
    handle->batch = batch;
    core.track(batch, peer.endpoint);
    try {
      peer.endpoint->submit(batch, false);
    } catch (const std::bad_alloc&) {
      end_batch(*peer.endpoint, batch, MC_E_OUT_OF_SPACE, "out of memory");
    }
    if (!batch->done()) {
      core.loop().watch();  // nobody may come to wait for it
      handle->timer = core.loop().call_at(
          batch->deadline(), [weak = std::weak_ptr(batch), endpoint = std::weak_ptr(peer.endpoint)] {
            const auto late = weak.lock();
            const auto at = endpoint.lock();
            if (late && at && !late->done()) {
              end_batch(*at, late, MC_E_TIMEOUT, "the batch did not end before its deadline");
            }
          });
    }
    *out = handle.release();
    return MC_OK;
  });
}

int32_t mc_batch_wait(mc_batch* batch, uint32_t timeout_ms) {
  if (batch == nullptr) return fail(MC_E_USAGE, "the batch is null");
  if (batch->generation != fork_generation) return fail(MC_E_USAGE, "%s", kForked);
  bool signalled = false;
  if (!batch->batch->wait(batch->core->loop(), Deadline::in_ms(timeout_ms), &signalled)) {
    if (signalled) return fail(MC_E_SIGNAL, "interrupted by a signal");
    return fail(MC_E_TIMEOUT, "the batch is not done yet");
  }
  return outcome_of(*batch->batch);
}

void mc_on_signal(int32_t (*ask)(void)) { mc::Loop::on_signal(ask); }

int32_t mc_batch_done(mc_batch* batch) {
  return batch != nullptr && batch->batch->done() ? 1 : 0;
}

void mc_batch_cancel(mc_batch* batch) {
  if (batch == nullptr || batch->generation != fork_generation) return;
  if (!batch->batch->done()) {
    end_batch(*batch->endpoint, batch->batch, MC_E_CANCELLED, "the batch was cancelled");
  }
}

int32_t mc_batch_fd(mc_batch* batch) {
  if (batch == nullptr) return fail(MC_E_USAGE, "the batch is null");
  int fd = -1;
  const int32_t status = batch->batch->event_fd(&fd);
  return status == MC_OK ? fd : status;
}

void mc_batch_close(mc_batch* batch) {
  if (batch == nullptr || batch->generation != fork_generation) return;
  mc_batch_cancel(batch);
  if (batch->timer != 0) batch->core->loop().cancel_call(batch->timer);
  batch->core->untrack(*batch->batch);
  delete batch;
}

int32_t mc_transfer(mc_engine* engine, uint64_t id, mc_slice* slices, uint64_t n,
                    uint32_t timeout_ms) {
  return call_with(engine, id, slices, n, [&](Engine& core, Peer& peer) {
    const auto batch = std::make_shared<Batch>(slices, n, timeout_ms);
    core.track(batch, peer.endpoint);
    try {
      peer.endpoint->submit(batch, true);
    } catch (const std::bad_alloc&) {
      end_batch(*peer.endpoint, batch, MC_E_OUT_OF_SPACE, "out of memory");  // what has begun, too
    }
    if (!batch->done() && !batch->wait(core.loop(), batch->deadline())) {
      end_batch(*peer.endpoint, batch, MC_E_TIMEOUT,
                "the transfer did not end before its deadline");
    }
    core.untrack(*batch);
    return outcome_of(*batch);
  });
}

int32_t mc_transfer_now(mc_engine* engine, uint64_t id, mc_slice* slices, uint64_t n) {
  uint64_t left = kNowBytes;
  for (uint64_t i = 0; i < n; ++i) {
    if (i == kNowSlices || slices[i].length > left) return kNotNow;
    left -= slices[i].length;
  }
  return call_with(engine, id, slices, n, [&](Engine&, Peer& peer) {
    return peer.endpoint->run_now({slices, n});
  });
}

// ---- messages

int32_t mc_message_send(mc_engine* engine, uint64_t id, uint32_t kind, const void* data,
                        uint32_t nbytes, uint32_t timeout_ms) {
  return call(engine, [&](Engine& core) {
    std::shared_ptr<Peer> peer;
    const int32_t status = core.find_peer(id, &peer);
    if (status != MC_OK) return status;
    return peer->endpoint->send({0, kind, nbytes}, data, Deadline::in_ms(timeout_ms));
  });
}

int32_t mc_message_request(mc_engine* engine, uint64_t id, uint32_t kind, const void* data,
                           uint32_t nbytes, uint32_t timeout_ms, mc_message* out_reply) {
  return call(engine, [&](Engine& core) {
    RequestTable::Waiter waiter;
    const int32_t status =
        core.request(id, {0, kind, nbytes}, data, Deadline::in_ms(timeout_ms), &waiter);
    if (status != MC_OK) return status;
    hand_over(id, {0, kind, waiter.nbytes}, std::move(waiter.bytes), out_reply);
    return MC_OK;
  });
}

int32_t mc_message_receive(mc_engine* engine, uint32_t timeout_ms, mc_message* out) {
  return call(engine, [&](Engine& core) {
    Received received;
    const int32_t status = core.receive(Deadline::in_ms(timeout_ms), &received);
    if (status != MC_OK) return status;
    hand_over(received.peer, received.head, std::move(received.bytes), out);
    return MC_OK;
  });
}

int32_t mc_message_reply(mc_engine* engine, const mc_message* request, const void* data,
                         uint32_t nbytes) {
  return call(engine, [&](Engine& core) {
    if (request == nullptr || request->correlation == 0) {
      return fail(MC_E_USAGE, "nobody waits for a reply to this message");
    }
    std::shared_ptr<Peer> peer;
    const int32_t status = core.find_peer(request->peer, &peer);
    if (status != MC_OK) return status;
    return peer->endpoint->reply(request->correlation, data, nbytes);
  });
}

void mc_message_free(mc_message* message) {
  if (message == nullptr) return;
  free(message->owner);
  message->owner = nullptr;
  message->data = nullptr;
}

}  // extern "C"
