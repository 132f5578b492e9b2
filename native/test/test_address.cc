// Sockets: how connections of one host are tuned.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "base/abi.h"
#include "base/address.h"
#include "check.h"

namespace {

std::string control_of(int fd) {
  char name[16] = {};
  socklen_t length = sizeof name;
  CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
  return std::string(name, strnlen(name, sizeof name));
}

// Both ends of a connection within this host pace nothing, whatever the system's default is.
void within_one_host(const char* host) {
  mc::Fd listener, near;
  uint16_t port = 0;
  if (mc::listen_on({host, 0}, &listener, &port) != MC_OK) return;  // no IPv6 here
  CHECK_EQ(mc::connect_to({host, port}, mc::Deadline::in_ms(10'000), -1, &near), MC_OK);
  pollfd ready{listener.get(), POLLIN, 0};
  CHECK_EQ(poll(&ready, 1, 10'000), 1);
  mc::Fd far(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(far);
  mc::tune_tcp(far.get());
  for (const int fd : {near.get(), far.get()}) {
    CHECK(control_of(fd) == "reno");
    int on = 0;
    socklen_t length = sizeof on;
    CHECK_EQ(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, &length), 0);
    CHECK_EQ(on, 1);
  }
}

}  // namespace

int main() {
  within_one_host("127.0.0.1");
  within_one_host("::1");
  return 0;
}
