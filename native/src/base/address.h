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

// A connected, non-blocking, close-on-exec TCP socket without delay. `abort_fd` (or -1): ends the
// waiting with MC_E_CANCELLED once it is readable.
int32_t connect_to(const HostPort& where, Deadline deadline, int abort_fd, Fd* out);

// Wait until `fd` is ready for `events` (poll's).
int32_t wait_ready(int fd, short events, Deadline deadline, int abort_fd);

void tune_tcp(int fd);

}  // namespace mc
