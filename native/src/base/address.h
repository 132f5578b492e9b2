// "host:port" texts and what they resolve to. Host names, IPv4, and IPv6 in brackets.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace mc {

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;

  std::string text() const;  // an IPv6 host gets its brackets back
};

// MC_E_USAGE when `text` is not host:port.
int32_t parse_host_port(const std::string& text, HostPort* out);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

// MC_E_PEER_UNREACHABLE when the name has no address. Blocks as long as the resolver does.
int32_t resolve(const HostPort& where, bool passive, std::vector<SocketAddress>* out);

// A listening socket; *out_port is the one it got. A port in use is MC_E_USAGE.
int32_t listen_on(const HostPort& where, Fd* out, uint16_t* out_port);

// Unix stream sockets in the abstract namespace, which is one per network namespace and leaves no
// files behind.
int32_t listen_abstract(const std::string& name, Fd* out);
int32_t connect_abstract(const std::string& name, Fd* out);

// An address of this host, and how many leading bits its network has.
struct LocalAddress {
  std::string interface;
  SocketAddress address;
  uint32_t prefix_bits = 0;
};
std::vector<LocalAddress> local_addresses();  // as they are now; none when they cannot be read

constexpr uint32_t kSilenceMs = 10'000;

// How connections are made and kept.
struct Calling {
  std::string listen;                   // host or address that was asked for; "" = none
  std::vector<std::string> interfaces;  // the best first
  uint32_t silence_max_ms = kSilenceMs;
};

// The address to call `to` from: among those in its network that of `listen`, or that of the best
// interface. Null where there is no choice, or where it is this host's own: the kernel knows.
const LocalAddress* choose_source(const SocketAddress& to, const std::vector<LocalAddress>& from,
                                  const Calling& calling);

// A connected, non-blocking, close-on-exec TCP socket without delay. `abort_fd` (or -1): ends the
// waiting with MC_E_CANCELLED once it is readable.
int32_t connect_to(const HostPort& where, Deadline deadline, int abort_fd, Fd* out,
                   const Calling& calling = {});

// Wait until `fd` is ready for `events` (poll's).
int32_t wait_ready(int fd, short events, Deadline deadline, int abort_fd);

// Whether both ends of a connection have one address: its packets leave no machine. That is a
// matter of speed only; who is whom is proven otherwise.
bool stays_here(int fd);

// Without delay; and a peer that is gone without a word, or that takes nothing of what it is sent, is
// found after `silence_max_ms`, idle or not.
void tune_tcp(int fd, uint32_t silence_max_ms = kSilenceMs);

// The two ends of a TCP connection as "host:port"; "" for other sockets.
std::string local_end(int fd);
std::string remote_end(int fd);

}  // namespace mc
