// The side that calls: mc_peer_open.
#include <algorithm>
#include <new>

#include "engine/engine.h"
#include "engine/hello.h"
#include "transport/shm/shm_endpoint.h"

namespace mc {
namespace {

constexpr uint32_t kLanesMax = 16;
constexpr uint32_t kLanesNear = 1, kLanesFar = 2;  // design/tcp.md

Introduction introduction_of(const Hello& hello) {
  return {hello.incarnation, hello.address_text(), hello.transports, hello.message_bytes_max,
          hello.message_window, hello.rdma_ports};
}

}  // namespace

int32_t Engine::open_peer(const std::string& address, Deadline deadline, uint64_t* out_peer) {
  {
    std::unique_lock lock(mutex_);
    // One connection for all that open the same address at once.
    const auto free = [&] { return closing_ || !opening_.contains(address); };
    if (!opened_.wait_until(lock, deadline.as_time_point(), free)) {
      return fail(MC_E_TIMEOUT, "%s: another thread is still connecting", address.c_str());
    }
    if (closing_) return fail(MC_E_CANCELLED, "the engine was closed");
    const auto known = peer_by_address_.find(address);
    if (known != peer_by_address_.end()) {
      ++peers_.at(known->second)->opened_count;
      *out_peer = known->second;
      return MC_OK;
    }
    opening_.insert(address);
  }
  const auto opened = [&] {
    {
      const std::lock_guard lock(mutex_);
      opening_.erase(address);
    }
    opened_.notify_all();
  };
  try {
    const int32_t status = connect_peer(address, deadline, out_peer);
    opened();
    return status;
  } catch (const std::bad_alloc&) {
    opened();  // others may try
    throw;
  }
}

int32_t Engine::connect_peer(const std::string& address, Deadline deadline, uint64_t* out_peer) {
  HostPort where;
  if (const int32_t status = parse_host_port(address, &where); status != MC_OK) return status;
  Fd fd;
  int32_t status = connect_to(where, deadline, closing_fd(), &fd, settings_.calling);
  if (status != MC_OK) return status;
  Hello hello = own_hello();
  hello.step = Step::kHello;
  Hello theirs;
  status = send_hello(fd.get(), hello, deadline, closing_fd());
  if (status == MC_OK) {
    status = receive_hello(fd.get(), Step::kHello, deadline, closing_fd(), &theirs);
  }
  if (status != MC_OK) return fail(status, "%s: %s", address.c_str(), std::string(last_error()).c_str());
  const uint32_t both = transports_ & theirs.transports;
  if ((both & MC_TRANSPORT_LOCAL) != 0 &&
      open_local(theirs, address, out_peer) == MC_OK) {
    return MC_OK;
  }
  std::string reason = "tcp: shm is not offered on both sides";
  if ((both & MC_TRANSPORT_SHM) != 0) {
    status = open_shm(theirs, address, deadline, out_peer);
    if (status == MC_OK || status == MC_E_CANCELLED) return status;
    reason = std::string("tcp: no shm, because ") + last_error();
  }
  return open_stream(std::move(fd), theirs, address, reason, deadline, out_peer);
}

int32_t Engine::open_local(const Hello& hello, const std::string& address, uint64_t* out_peer) {
  const std::shared_ptr<Engine> other = engine_here(hello.incarnation);
  if (!other || !other->enter()) return fail(MC_E_PEER_UNREACHABLE, "not in this process");
  const LocalLink::Pair ends =
      LocalLink::join(*this, *other, {settings_.message_bytes_max, hello.message_bytes_max});
  other->adopt(ends[1], introduction_of(own_hello()), "");
  *out_peer = adopt(ends[0], introduction_of(hello), address);
  other->leave();
  return MC_OK;
}

int32_t Engine::open_shm(const Hello& hello, const std::string& address, Deadline deadline,
                         uint64_t* out_peer) {
  Fd fd;
  int32_t status = connect_abstract(hello.shm_name_text(), &fd);
  if (status != MC_OK) return status;
  Proof proof;
  if (status = proof.make(); status != MC_OK) return status;
  Hello ours = own_hello();
  ours.step = Step::kShmHello;
  ours.token_address = proof.token_address();
  Hello theirs;
  Fd passed;
  status = send_hello(fd.get(), ours, deadline, closing_fd(), proof.fd());
  if (status == MC_OK) {
    status = receive_hello(fd.get(), Step::kShmHello, deadline, closing_fd(), &theirs, &passed);
  }
  if (status != MC_OK) return status;
  ours.step = Step::kShmProof;
  if (theirs.token != proof.token() || theirs.incarnation != hello.incarnation ||
      !read_proof(passed, &ours.token)) {
    return fail(MC_E_PEER_UNREACHABLE, "the proof of shared memory failed");
  }
  ShmTies ties;
  tie(fd.get(), ours.token, theirs.token_address, &ties);
  ties.it_reads = theirs.reads_memory != 0;
  ours.reads_memory = ties.we_read ? 1 : 0;
  status = send_hello(fd.get(), ours, deadline, closing_fd());
  if (status == MC_OK) {
    status = receive_hello(fd.get(), Step::kReady, deadline, closing_fd(), &theirs);
  }
  if (status != MC_OK) return status;
  const auto endpoint = std::make_shared<ShmEndpoint>(*this, introduction_of(hello),
                                                      stream_limits(), std::move(ties));
  (void)endpoint->add_lane(std::move(fd), true);
  const uint64_t id = adopt(endpoint, introduction_of(hello), address);
  status = endpoint->start();
  if (status != MC_OK) {
    endpoint->close(Failure::last(status));
    return status;
  }
  *out_peer = id;
  return MC_OK;
}

int32_t Engine::open_stream(Fd fd, const Hello& hello, const std::string& address,
                            const std::string& reason, Deadline deadline, uint64_t* out_peer) {
  const uint32_t both = transports_ & hello.transports;
  constexpr uint32_t words = MC_TRANSPORT_MESSAGES;
  const uint32_t choice = (both & MC_TRANSPORT_FAKE) != 0     ? MC_TRANSPORT_FAKE
                          : (both & MC_TRANSPORT_RDMA) != 0   ? MC_TRANSPORT_RDMA
                          : (both & MC_TRANSPORT_TCP) != 0    ? MC_TRANSPORT_TCP
                          : (transports_ & words) != 0        ? words
                                                              : 0;
  if (choice == 0) {
    return fail(MC_E_PEER_UNREACHABLE,
                "%s: no common transport works (here %#x, there %#x; %s)", address.c_str(),
                transports_, hello.transports, reason.c_str());
  }
  Hello choose = own_hello();
  choose.step = Step::kChoice;
  choose.choice = choice;
  Hello ready;
  int32_t status = send_hello(fd.get(), choose, deadline, closing_fd());
  if (status == MC_OK) {
    status = receive_hello(fd.get(), Step::kReady, deadline, closing_fd(), &ready);
  }
  if (status != MC_OK) return fail(status, "%s: %s", address.c_str(), std::string(last_error()).c_str());
  const auto endpoint = make_stream(choice, introduction_of(hello), reason);
  (void)endpoint->add_lane(std::move(fd));
  const uint64_t id = adopt(endpoint, introduction_of(hello), address);
  status = endpoint->start();
  if (status != MC_OK) {
    endpoint->close(Failure::last(status));
    return status;
  }
  HostPort where;
  const bool lanes = choice != MC_TRANSPORT_RDMA && choice != words;  // data goes another way, or none
  if (lanes && parse_host_port(address, &where) == MC_OK) {
    open_lanes(where, hello, *endpoint, deadline);
  }
  *out_peer = id;
  return MC_OK;
}

// More lanes make it faster; without them it works as well.
void Engine::open_lanes(const HostPort& where, const Hello& hello, StreamEndpoint& endpoint,
                        Deadline deadline) {
  const uint32_t suits = endpoint.is_near() ? kLanesNear : kLanesFar;
  const uint32_t lanes = std::min(settings_.tcp_lanes > 0 ? settings_.tcp_lanes : suits, kLanesMax);
  for (uint32_t i = 1; i < lanes; ++i) {
    Fd fd;
    Hello join = own_hello();
    join.step = Step::kLane;
    join.session = hello.session;
    join.lane = i;
    Hello ready;
    if (connect_to(where, deadline, closing_fd(), &fd, settings_.calling) != MC_OK ||
        send_hello(fd.get(), join, deadline, closing_fd()) != MC_OK ||
        receive_hello(fd.get(), Step::kReady, deadline, closing_fd(), &ready) != MC_OK ||
        endpoint.add_lane(std::move(fd)) != MC_OK) {
      return;
    }
  }
}

}  // namespace mc
