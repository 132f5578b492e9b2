#include "base/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

#include "base/status.h"

namespace mc {
namespace {

constexpr int kBacklog = 1024;  // first contacts that arrive in one burst

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

// The address alone, in network order; empty for families that have none.
std::span<const uint8_t> bytes_of(const SocketAddress& at) {
  if (at.storage.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(at.storage).sin_addr;
    return {reinterpret_cast<const uint8_t*>(&in), sizeof in};
  }
  if (at.storage.ss_family == AF_INET6) {
    return {reinterpret_cast<const sockaddr_in6&>(at.storage).sin6_addr.s6_addr, sizeof(in6_addr)};
  }
  return {};
}

uint32_t common_bits(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto difference = static_cast<uint8_t>(a[i] ^ b[i]);
    if (difference != 0) return static_cast<uint32_t>(8 * i) + std::countl_zero(difference);
  }
  return static_cast<uint32_t>(8 * a.size());
}

bool same_address(const SocketAddress& a, const SocketAddress& b) {
  return !bytes_of(a).empty() && a.storage.ss_family == b.storage.ss_family &&
         common_bits(bytes_of(a), bytes_of(b)) == 8 * bytes_of(a).size();
}

uint16_t port_of(const SocketAddress& at) {
  return ntohs(at.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(at.storage).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(at.storage).sin_port);
}

bool end_of(int fd, int (*ask)(int, sockaddr*, socklen_t*), SocketAddress* out) {
  out->length = sizeof out->storage;
  return ask(fd, reinterpret_cast<sockaddr*>(&out->storage), &out->length) == 0;
}

std::string text_of(const SocketAddress& at) {
  char host[INET6_ADDRSTRLEN] = "";
  if (bytes_of(at).empty()) return "";
  inet_ntop(at.storage.ss_family, bytes_of(at).data(), host, sizeof host);
  return HostPort{host, port_of(at)}.text();
}

// What cannot be bound, because the address has just gone, is the kernel's choice after all.
void call_from_the_best(int fd, const SocketAddress& to, const Calling& calling) {
  if (calling.listen.empty() && calling.interfaces.empty()) return;
  const std::vector<LocalAddress> all = local_addresses();
  const LocalAddress* from = choose_source(to, all, calling);
  if (from == nullptr) return;
  set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  (void)!bind(fd, reinterpret_cast<const sockaddr*>(&from->address.storage), from->address.length);
}

int32_t connect_one(const SocketAddress& to, Deadline deadline, int abort_fd, Fd* out,
                    const Calling& calling) {
  Fd fd(socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(MC_E_PEER_UNREACHABLE, "socket");
  call_from_the_best(fd.get(), to, calling);
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
  tune_tcp(fd.get(), calling.silence_max_ms);
  *out = std::move(fd);
  return MC_OK;
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
  if (!end_of(fd.get(), getsockname, &bound)) return fail_errno(MC_E_INTERNAL, "getsockname");
  *out_port = port_of(bound);
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

std::vector<LocalAddress> local_addresses() {
  std::vector<LocalAddress> out;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_netmask == nullptr || (one->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    const bool v6 = one->ifa_addr->sa_family == AF_INET6;
    if (!v6 && one->ifa_addr->sa_family != AF_INET) continue;
    LocalAddress found{one->ifa_name, {}, 0};
    SocketAddress mask;
    found.address.length = mask.length = v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    memcpy(&found.address.storage, one->ifa_addr, found.address.length);
    memcpy(&mask.storage, one->ifa_netmask, mask.length);
    mask.storage.ss_family = one->ifa_addr->sa_family;
    for (const uint8_t byte : bytes_of(mask)) found.prefix_bits += std::popcount(byte);
    out.push_back(std::move(found));
  }
  return out;
}

const LocalAddress* choose_source(const SocketAddress& to, const std::vector<LocalAddress>& from,
                                  const Calling& calling) {
  const std::string listen = HostPort{calling.listen, 0}.text();
  const LocalAddress* best = nullptr;
  size_t best_rank = 0, count = 0;
  for (const LocalAddress& one : from) {
    if (same_address(one.address, to)) return nullptr;
    const uint32_t common = one.address.storage.ss_family == to.storage.ss_family
                                ? common_bits(bytes_of(one.address), bytes_of(to))
                                : 0;
    if (one.prefix_bits == 0 || common < one.prefix_bits) continue;
    const auto at = std::find(calling.interfaces.begin(), calling.interfaces.end(), one.interface);
    size_t rank = 1 + static_cast<size_t>(at - calling.interfaces.begin());
    if (text_of(one.address) == listen) rank = 0;
    ++count;
    if (best != nullptr && best_rank <= rank) continue;
    best = &one;
    best_rank = rank;
  }
  return count > 1 ? best : nullptr;
}

int32_t connect_to(const HostPort& where, Deadline deadline, int abort_fd, Fd* out,
                   const Calling& calling) {
  std::vector<SocketAddress> candidates;
  int32_t status = resolve(where, false, &candidates);
  for (const SocketAddress& to : candidates) {
    status = connect_one(to, deadline, abort_fd, out, calling);
    if (status == MC_OK) return MC_OK;
  }
  return fail(status, "%s: %s", where.text().c_str(), last_error());
}

bool stays_here(int fd) {
  SocketAddress here, there;
  return end_of(fd, getsockname, &here) && end_of(fd, getpeername, &there) &&
         same_address(here, there);
}

void tune_tcp(int fd, uint32_t silence_max_ms) {
  // A control that paces its packets (bbr) sleeps in between: through memory that halves the rate.
  if (stays_here(fd)) (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // Linux has the user timeout decide for idle connections, too: from then on the next probe without
  // an answer is the last, however many there were.
  const int silence_ms = static_cast<int>(silence_max_ms);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, silence_ms);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, silence_ms / 3'000));
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, silence_ms / 10'000));
}

std::string local_end(int fd) {
  SocketAddress at;
  return end_of(fd, getsockname, &at) ? text_of(at) : "";
}

std::string remote_end(int fd) {
  SocketAddress at;
  return end_of(fd, getpeername, &at) ? text_of(at) : "";
}

}  // namespace mc
