#include "base/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>

#include "base/status.h"

namespace mc {
namespace {

constexpr int kBacklog = 1024;           // first contacts that arrive in one burst
constexpr int kUserTimeoutMs = 60'000;   // data without an answer: the peer's host is gone, or
                                         // its program takes nothing any more
// Probes say that an idle peer is gone after as long: Linux has the user timeout replace their number.
constexpr int kKeepaliveIdleS = 10, kKeepaliveEveryS = 3, kKeepaliveProbes = 3;

void set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof value);  // each is an improvement, not a need
}

SocketAddress abstract(const std::string& name) {
  SocketAddress address;
  auto& un = reinterpret_cast<sockaddr_un&>(address.storage);
  un.sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof un.sun_path - 1);
  memcpy(un.sun_path + 1, name.data(), n);  // the first byte stays 0
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

int32_t connect_one(const SocketAddress& to, Deadline deadline, int abort_fd, Fd* out) {
  Fd fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(MC_E_PEER_UNREACHABLE, "socket");
  const auto* address = reinterpret_cast<const sockaddr*>(&to.storage);
  if (::connect(fd.get(), address, to.length) != 0 && errno != EINPROGRESS) {
    return fail_errno(MC_E_PEER_UNREACHABLE, "connect");
  }
  if (const int32_t status = wait_ready(fd.get(), POLLOUT, deadline, abort_fd); status != MC_OK) {
    return status;
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    errno = error;
    return fail_errno(MC_E_PEER_UNREACHABLE, "connect");
  }
  tune_tcp(fd.get());
  *out = std::move(fd);
  return MC_OK;
}

bool same_address(const SocketAddress& a, const SocketAddress& b) {
  if (a.storage.ss_family != b.storage.ss_family) return false;
  if (a.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&a.storage)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(&b.storage)->sin_addr.s_addr;
  }
  return a.storage.ss_family == AF_INET6 &&
         memcmp(&reinterpret_cast<const sockaddr_in6*>(&a.storage)->sin6_addr,
                &reinterpret_cast<const sockaddr_in6*>(&b.storage)->sin6_addr,
                sizeof(in6_addr)) == 0;
}

// Whether both ends of a connection have one address: its packets leave no machine. That is a
// matter of speed only; who is whom is proven otherwise.
bool stays_here(int fd) {
  SocketAddress here, there;
  here.length = there.length = sizeof here.storage;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&here.storage), &here.length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&there.storage), &there.length) == 0 &&
         same_address(here, there);
}

}  // namespace

std::string HostPort::text() const {
  const bool v6 = host.find(':') != std::string::npos;
  return (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

int32_t parse_host_port(const std::string& text, HostPort* out) {
  const size_t colon = text.rfind(':');
  std::string host = colon == std::string::npos ? "" : text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":[]") != std::string::npos) {
    return fail(MC_E_USAGE, "'%s': an IPv6 host is written in brackets: [host]:port",
                text.c_str());
  }
  if (host.empty()) return fail(MC_E_USAGE, "'%s' is not host:port", text.c_str());
  uint16_t port = 0;
  const char* begin = text.data() + colon + 1;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(begin, end, port);
  if (begin == end || rest != end || error != std::errc()) {
    return fail(MC_E_USAGE, "'%s': the port is not a number from 0 to 65535", text.c_str());
  }
  *out = {std::move(host), port};
  return MC_OK;
}

int32_t resolve(const HostPort& where, bool passive, std::vector<SocketAddress>* out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  const int rc = getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &list);
  if (rc != 0) {
    return fail(MC_E_PEER_UNREACHABLE, "host '%s': %s", where.host.c_str(), gai_strerror(rc));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    SocketAddress address;
    memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.length = one->ai_addrlen;
    out->push_back(address);
  }
  return MC_OK;
}

int32_t listen_on(const HostPort& where, Fd* out, uint16_t* out_port) {
  std::vector<SocketAddress> candidates;
  if (resolve(where, true, &candidates) != MC_OK) {
    return fail(MC_E_USAGE, "cannot listen on %s: %s", where.text().c_str(), last_error());
  }
  const SocketAddress& at = candidates.front();
  Fd fd(socket(at.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(MC_E_USAGE, "cannot listen on %s", where.text().c_str());
  set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // does not share a port that another one listens on
  if (at.storage.ss_family == AF_INET6) set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  const auto* address = reinterpret_cast<const sockaddr*>(&at.storage);
  if (bind(fd.get(), address, at.length) != 0 || listen(fd.get(), kBacklog) != 0) {
    return fail_errno(MC_E_USAGE, "cannot listen on %s", where.text().c_str());
  }
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    return fail_errno(MC_E_INTERNAL, "getsockname");
  }
  *out_port = ntohs(bound.storage.ss_family == AF_INET6
                        ? reinterpret_cast<const sockaddr_in6*>(&bound.storage)->sin6_port
                        : reinterpret_cast<const sockaddr_in*>(&bound.storage)->sin_port);
  *out = std::move(fd);
  return MC_OK;
}

int32_t listen_abstract(const std::string& name, Fd* out) {
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const SocketAddress at = abstract(name);
  if (!fd || bind(fd.get(), reinterpret_cast<const sockaddr*>(&at.storage), at.length) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return fail_errno(MC_E_OUT_OF_SPACE, "unix socket %s", name.c_str());
  }
  *out = std::move(fd);
  return MC_OK;
}

int32_t connect_abstract(const std::string& name, Fd* out) {
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const SocketAddress to = abstract(name);
  if (!fd || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to.storage), to.length) != 0) {
    return fail_errno(MC_E_PEER_UNREACHABLE, "its unix socket is not on this host");
  }
  *out = std::move(fd);
  return MC_OK;
}

int32_t wait_ready(int fd, short events, Deadline deadline, int abort_fd) {
  pollfd ready[2] = {{fd, events, 0}, {abort_fd, POLLIN, 0}};
  int n = 0;
  do {
    n = poll(ready, 2, deadline.left_ms());
  } while (n < 0 && errno == EINTR);
  if (n < 0) return fail_errno(MC_E_INTERNAL, "poll");
  if (ready[1].revents != 0) return fail(MC_E_CANCELLED, "the engine was closed");
  if (ready[0].revents == 0) return fail(MC_E_TIMEOUT, "no answer before the deadline");
  return MC_OK;
}

int32_t connect_to(const HostPort& where, Deadline deadline, int abort_fd, Fd* out) {
  std::vector<SocketAddress> candidates;
  int32_t status = resolve(where, false, &candidates);
  for (const SocketAddress& to : candidates) {
    status = connect_one(to, deadline, abort_fd, out);
    if (status == MC_OK) return MC_OK;
  }
  return fail(status, "%s: %s", where.text().c_str(), last_error());
}

void tune_tcp(int fd) {
  // A control that paces its packets (bbr) sleeps in between: through memory that halves the rate.
  if (stays_here(fd)) (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleS);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveEveryS);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
}

}  // namespace mc
