#include "engine/engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "engine/greeter.h"
#include "engine/hello.h"
#include "transport/fake/fake_endpoint.h"
#include "transport/stream/messages_endpoint.h"
#include "transport/rdma/rdma_endpoint.h"

namespace mc {
namespace {

constexpr uint64_t kStrangersMax = 1024;  // connections that are not peers yet
constexpr size_t kLostMax = 64;
constexpr uint64_t kWindowMin = 64 << 10, kWindowMax = 1 << 20;
constexpr uint64_t kOutsideMs = 1'000;  // a peer's copy that runs ends in microseconds
constexpr uint64_t kLeaveMs = 10'000;  // a caller that does not leave by then is our bug

// Ends come to their end also when there is no memory for a moment.
template <typename Use>
void without_memory_too(Use use) {
  try {
    use();
  } catch (const std::bad_alloc&) {
    // Sockets are closed, and their peers dropped, with the engine.
  }
}

std::mutex registry_mutex;
std::map<Token, std::weak_ptr<Engine>> registry;

}  // namespace

std::shared_ptr<Engine> engine_here(const Token& incarnation) {
  const std::lock_guard lock(registry_mutex);
  const auto found = registry.find(incarnation);
  return found == registry.end() ? nullptr : found->second.lock();
}

Engine::Engine(Settings settings)
    : settings_(std::move(settings)),
      transports_(settings_.transports),
      queue_(settings_.queue_bytes_max) {}

int32_t Engine::open(Settings settings, std::shared_ptr<Engine>* out) {
  const std::shared_ptr<Engine> engine(new Engine(std::move(settings)));
  const int32_t status = engine->start();
  if (status != MC_OK) {
    const std::string words = last_error();  // shutting down must not change them
    engine->shutdown();
    return fail(status, "%s", words.c_str());
  }
  *out = engine;
  return MC_OK;
}

int32_t Engine::start() {
  closing_fd_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!closing_fd_) return fail_errno(MC_E_OUT_OF_SPACE, "eventfd");
  if (const int32_t status = loop_.start(); status != MC_OK) return status;
  if ((transports_ & MC_TRANSPORT_RDMA) != 0) {
    if (const int32_t status = start_rdma(); status != MC_OK) return status;
  }
  if (!settings_.listen.empty()) {
    if (const int32_t status = start_listening(); status != MC_OK) return status;
  }
  const std::lock_guard lock(registry_mutex);
  registry[incarnation_] = weak_from_this();
  return MC_OK;
}

// Without a usable device: a failure, or tcp where that was allowed.
int32_t Engine::start_rdma() {
  const int32_t status = rdma::Fabric::open(settings_.rdma, loop_, &fabric_);
  if (status == MC_OK) {
    rdma_text_ = fabric_->text();
    return MC_OK;
  }
  rdma_text_ = last_error();
  if ((transports_ & MC_TRANSPORT_TCP) == 0) return status;
  transports_ &= ~static_cast<uint32_t>(MC_TRANSPORT_RDMA);
  return MC_OK;
}

int32_t Engine::start_listening() {
  HostPort where;
  if (const int32_t status = parse_host_port(settings_.listen, &where); status != MC_OK) {
    return status;
  }
  Fd fd;
  if (const int32_t status = listen_on(where, &fd, &where.port); status != MC_OK) return status;
  if (!settings_.advertise.empty()) where.host = settings_.advertise;
  if (where.host.size() > 2 && where.host.front() == '[' && where.host.back() == ']') {
    where.host = where.host.substr(1, where.host.size() - 2);
  }
  address_ = where.text();
  if (address_.size() >= sizeof Hello::address) {
    return fail(MC_E_USAGE, "address '%s' is too long", address_.c_str());
  }
  listeners_.push_back(std::make_shared<Listener>(*this, std::move(fd), false));
  if ((transports_ & MC_TRANSPORT_SHM) != 0) {
    shm_name_ = "mooncake-" + hex(random_token()).substr(0, 30);  // cannot be guessed
    Fd unix_fd;
    if (const int32_t status = listen_abstract(shm_name_, &unix_fd); status != MC_OK) return status;
    listeners_.push_back(std::make_shared<Listener>(*this, std::move(unix_fd), true));
  }
  for (const auto& listener : listeners_) {
    if (const int32_t status = listener->start(); status != MC_OK) return status;
  }
  return MC_OK;
}

Engine::~Engine() { shutdown(); }

bool Engine::enter() {
  ++calls_;  // before the look: shutdown() says that it closes before it counts
  if (!closing_) return true;
  leave();
  return false;
}

void Engine::leave() {
  if (--calls_ > 0 || !closing_) return;
  const std::lock_guard lock(mutex_);
  calls_left_.notify_all();
}

void Engine::shutdown() {
  std::vector<std::shared_ptr<Peer>> peers;
  std::vector<std::pair<std::shared_ptr<Batch>, std::shared_ptr<Endpoint>>> batches;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    for (const auto& [id, peer] : peers_) peers.push_back(peer);
    for (const auto& [raw, weak] : batches_) {
      batches.emplace_back(weak.first.lock(), weak.second.lock());
    }
    closing_ = true;  // what may fail for want of memory came before: it can be called again
  }
  {
    const std::lock_guard lock(registry_mutex);
    registry.erase(incarnation_);
  }
  const Failure why{MC_E_CANCELLED, "the engine was closed"};
  const uint64_t one = 1;
  if (closing_fd_) (void)!write(closing_fd_.get(), &one, sizeof one);
  for (const auto& listener : listeners_) listener->close();
  queue_.close();
  for (const auto& [batch, endpoint] : batches) {
    if (!batch || !endpoint) continue;
    without_memory_too([&] { endpoint->cancel(batch, why.status, why.reason.c_str()); });
  }
  for (const auto& peer : peers) without_memory_too([&] { peer->endpoint->close(why); });
  {
    std::unique_lock lock(mutex_);
    calls_left_.wait_for(lock, std::chrono::milliseconds(kLeaveMs), [this] { return calls_ == 0; });
  }
  executor_.stop();
  if (fabric_) {
    fabric_->stop();
    fabric_->memory().drop_all();
  }
  const Deadline leave = Deadline::in_ms(kOutsideMs);
  for (const auto& region : regions_.all()) region->revoke();
  for (const auto& region : regions_.all()) (void)region->wait_quiet(leave);
  loop_.stop();
  for (;;) {  // peers that were taken in while we closed
    std::shared_ptr<Peer> late;
    {
      const std::lock_guard lock(mutex_);
      if (peers_.empty()) break;
      late = peers_.begin()->second;
    }
    without_memory_too([&] { late->endpoint->close(why); });
    lost(*late->endpoint, why);  // whatever became of that
  }
  listeners_.clear();
}

// ---- peers ---------------------------------------------------------------------------------

int32_t Engine::find_peer(uint64_t id, std::shared_ptr<Peer>* out) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  if (found != peers_.end()) {
    *out = found->second;
    return MC_OK;
  }
  for (const auto& [lost_id, why] : lost_) {
    if (lost_id == id) return fail(MC_E_PEER_UNREACHABLE, "peer %lu: %s", id, why.reason.c_str());
  }
  return id > 0 && id < next_peer_ ? fail(MC_E_PEER_UNREACHABLE, "peer %lu is gone", id)
                                   : fail(MC_E_USAGE, "there has never been a peer %lu", id);
}

uint64_t Engine::adopt(std::shared_ptr<Endpoint> endpoint, Introduction who,
                       const std::string& opened_as) {
  const auto peer = std::make_shared<Peer>();
  peer->endpoint = std::move(endpoint);
  peer->introduction = std::move(who);
  peer->opened_as = opened_as;
  peer->opened_count = 1;
  const std::lock_guard lock(mutex_);
  peer->id = next_peer_++;
  peer->endpoint->peer_id = peer->id;
  peers_.emplace(peer->id, peer);
  if (!opened_as.empty()) peer_by_address_[opened_as] = peer->id;
  return peer->id;
}

void Engine::lost(Endpoint& endpoint, const Failure& why) {
  std::shared_ptr<Peer> peer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(endpoint.peer_id);
    if (found == peers_.end()) return;
    peer = found->second;
    peers_.erase(found);
    const auto by_address = peer_by_address_.find(peer->opened_as);
    if (by_address != peer_by_address_.end() && by_address->second == peer->id) {
      peer_by_address_.erase(by_address);
    }
    try {
      lost_.emplace_back(peer->id, why);
    } catch (const std::bad_alloc&) {
      // The words are lost, too.
    }
    if (lost_.size() > kLostMax) lost_.pop_front();
  }
  peer->requests.fail_all(why);
}

int32_t Engine::close_peer(uint64_t id) {
  std::shared_ptr<Peer> peer;
  if (const int32_t status = find_peer(id, &peer); status != MC_OK) {
    return status == MC_E_PEER_UNREACHABLE ? MC_OK : status;  // gone is closed
  }
  {
    const std::lock_guard lock(mutex_);
    if (peer->opened_count > 1) {
      --peer->opened_count;
      return MC_OK;
    }
  }
  peer->endpoint->close({MC_E_CANCELLED, "the peer was closed here"});
  return MC_OK;
}

std::shared_ptr<Peer> Engine::peer_by_id(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : found->second;
}

std::shared_ptr<StreamEndpoint> Engine::make_stream(uint32_t choice, Introduction who,
                                                    std::string reason) {
  if (choice == MC_TRANSPORT_RDMA) {
    const bool tcp = (transports_ & who.transports & MC_TRANSPORT_TCP) != 0;
    return std::make_shared<RdmaEndpoint>(*this, std::move(who), stream_limits(), *fabric_, tcp);
  }
  if (choice == MC_TRANSPORT_MESSAGES) {
    return std::make_shared<MessagesEndpoint>(*this, std::move(who), stream_limits());
  }
  if (choice != MC_TRANSPORT_FAKE) {
    return std::make_shared<StreamEndpoint>(*this, std::move(who), stream_limits(),
                                            std::move(reason));
  }
  const FaultPlan plan{settings_.fault_seed + fakes_++, settings_.fault_loss_ppm,
                       settings_.fault_corrupt_ppm, settings_.fault_cut_ppm,
                       settings_.fault_delay_us};
  return std::make_shared<FakeEndpoint>(*this, std::move(who), stream_limits(), plan);
}

// Of one peer; the sum over peers is held down by the credit they get (MessageQueue::is_crowded).
uint32_t Engine::message_window() const {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(settings_.queue_bytes_max / 64, kWindowMin, kWindowMax));
}

StreamLimits Engine::stream_limits() const {
  return {settings_.message_bytes_max,
          std::max<uint64_t>(settings_.queue_bytes_max, settings_.message_bytes_max),
          message_window()};
}

Hello Engine::own_hello() const {
  Hello hello;
  hello.incarnation = incarnation_;
  hello.transports = transports_;
  hello.rdma_ports = fabric_ ? static_cast<uint32_t>(fabric_->adapters().size()) : 0;
  hello.message_bytes_max = settings_.message_bytes_max;
  hello.message_window = message_window();
  hello.set_address(address_);
  hello.set_shm_name(shm_name_);
  return hello;
}

void Engine::add_session(const Token& session, const std::shared_ptr<StreamEndpoint>& endpoint) {
  const std::lock_guard lock(mutex_);
  std::erase_if(sessions_, [](const auto& one) { return one.second.expired(); });
  sessions_[session] = endpoint;
}

std::shared_ptr<StreamEndpoint> Engine::session(const Token& session) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : found->second.lock();
}

bool Engine::add_stranger() {
  if (strangers_.fetch_add(1) < kStrangersMax) return true;
  --strangers_;
  return false;
}

// ---- messages, regions, batches ------------------------------------------------------------

void Engine::deliver(Endpoint& from, const MessageHead& head, Bytes bytes) {
  queue_.put({from.peer_id, head, std::move(bytes)});
}

void Engine::deliver_reply(Endpoint& from, uint64_t correlation, Bytes bytes, uint32_t nbytes) {
  if (const auto peer = peer_by_id(from.peer_id)) peer->requests.reply(correlation, std::move(bytes), nbytes);
}

int32_t Engine::request(uint64_t id, const MessageHead& head, const void* data, Deadline deadline,
                        RequestTable::Waiter* out) {
  std::shared_ptr<Peer> peer;
  if (const int32_t status = find_peer(id, &peer); status != MC_OK) return status;
  MessageHead numbered = head;
  numbered.correlation = next_correlation_++;
  if (const int32_t status = peer->requests.add(numbered.correlation, out); status != MC_OK) {
    return status;
  }
  int32_t status = MC_OK;
  try {
    status = peer->endpoint->send(numbered, data, deadline);
  } catch (const std::bad_alloc&) {
    status = fail(MC_E_OUT_OF_SPACE, "no memory for the request");  // the waiter must not stay
  }
  bool signalled = false;
  if (status == MC_OK && !loop_.wait_or_signal(out->done, deadline, &signalled)) {
    status = signalled ? fail(MC_E_SIGNAL, "interrupted by a signal")
                       : fail(MC_E_TIMEOUT, "no reply from %s before the deadline",
                              peer->introduction.address.c_str());
  }
  if (status != MC_OK) {
    peer->requests.remove(numbered.correlation);
    if (signalled || !out->done.is_set()) return status;
  }
  return out->failure.raise();
}

int32_t Engine::receive(Deadline deadline, Received* out) {
  for (;;) {
    const bool last = deadline.passed();  // then it is a poll
    Event arrival;
    const int32_t status = queue_.take(out, last ? nullptr : &arrival);
    if (status == MC_OK) {
      if (const auto peer = peer_by_id(out->peer)) peer->endpoint->taken(out->head.nbytes);
    }
    if (status != MC_E_TIMEOUT || last) return status;
    (void)loop_.wait(arrival, deadline);
    queue_.unwatch(arrival);
  }
}

int32_t Engine::register_region(const mc_piece* pieces, uint64_t n, uint32_t access, int32_t fd,
                                uint32_t* out_region) {
  uint32_t id = 0;
  if (const int32_t status = regions_.add(pieces, n, access, fd, &id); status != MC_OK) {
    return status;
  }
  const std::shared_ptr<Region> region = regions_.find(id);
  if (fabric_ && region) {
    const int32_t status = fabric_->memory().add(*region);
    // Where tcp is allowed, peers read it that way; describe() has the reason.
    if (status != MC_OK && (transports_ & MC_TRANSPORT_TCP) == 0) {
      const std::string words = last_error();
      std::shared_ptr<Region> last;
      (void)regions_.drop(id, &last);
      return fail(status, "%s", words.c_str());
    }
  }
  *out_region = id;
  return MC_OK;
}

int32_t Engine::deregister(uint32_t id, Deadline deadline) {
  std::shared_ptr<Region> region;
  std::vector<std::shared_ptr<Peer>> peers;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [peer_id, peer] : peers_) peers.push_back(peer);
    const auto left = leaving_.find(id);
    if (left != leaving_.end()) region = left->second;  // once more
  }
  if (!region) {
    if (const int32_t status = regions_.drop(id, &region); status != MC_OK) return status;
    if (!region) return MC_OK;
    region->revoke();
  }
  for (const auto& peer : peers) peer->endpoint->forget(region);
  for (const auto& peer : peers) peer->endpoint->wait_forgotten(*region, deadline);
  if (fabric_) fabric_->memory().drop(id, deadline);
  const bool quiet = region->wait_quiet(deadline);
  const std::lock_guard lock(mutex_);
  if (quiet) {
    leaving_.erase(id);
    return MC_OK;
  }
  leaving_[id] = std::move(region);
  return fail(MC_E_TIMEOUT, "a copy in region %u did not end in time: keep its memory", id);
}

bool Engine::is_quiet(uint32_t id) {
  const std::shared_ptr<Region> region = regions_.find(id);
  const std::lock_guard lock(mutex_);
  const auto left = leaving_.find(id);
  return (!region || region->quiet()) && (left == leaving_.end() || left->second->quiet());
}

void Engine::track(const std::shared_ptr<Batch>& batch, const std::shared_ptr<Endpoint>& endpoint) {
  const std::lock_guard lock(mutex_);
  batches_[batch.get()] = {batch, endpoint};
}

void Engine::untrack(const Batch& batch) {
  const std::lock_guard lock(mutex_);
  batches_.erase(&batch);
}

}  // namespace mc
