// Sockets: how connections of one host are tuned.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

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

mc::LocalAddress local(const char* interface, const char* host, uint32_t prefix_bits) {
  std::vector<mc::SocketAddress> found;
  CHECK_EQ(mc::resolve({host, 0}, false, &found), MC_OK);
  return {interface, found.front(), prefix_bits};
}

// "" when the kernel chooses.
std::string source_for(const char* to, const mc::Calling& calling) {
  const std::vector<mc::LocalAddress> from{
      local("lo", "127.0.0.1", 8),       local("eth0", "10.1.0.5", 16),
      local("eth1", "10.1.0.6", 16),     local("eth2", "10.2.0.5", 16),
      local("eth0", "fd00::5", 64),      local("eth1", "fd00::6", 64),
      local("tunnel", "10.1.0.7", 32),   local("odd", "10.1.0.8", 0),
  };
  const mc::LocalAddress target = local("", to, 0);
  const mc::LocalAddress* chosen = mc::choose_source(target.address, from, calling);
  return chosen == nullptr ? "" : chosen->interface;
}

// Several addresses in the peer's network: what was asked for, then the best card; else the kernel's.
void calls_come_from_the_best() {
  const mc::Calling ranked{"", {"eth1", "eth0"}, 0}, asked{"10.1.0.5", {"eth1", "eth0"}, 0};
  CHECK(source_for("10.1.9.9", ranked) == "eth1");
  CHECK(source_for("10.1.9.9", asked) == "eth0");
  CHECK(source_for("10.1.9.9", {"10.2.0.5", {"eth1"}, 0}) == "eth1");  // not in that network
  CHECK(source_for("10.2.9.9", asked) == "");                         // one address there
  CHECK(source_for("10.3.9.9", asked) == "");                         // behind a router
  CHECK(source_for("10.1.0.6", asked) == "");                         // this host itself
  CHECK(source_for("127.0.0.9", asked) == "");
  CHECK(source_for("fd00::9", ranked) == "eth1");
  CHECK(source_for("fd00::9", {"fd00::5", {"eth1"}, 0}) == "eth0");
  CHECK(!mc::local_addresses().empty());
}

int option(int fd, int name) {
  int value = 0;
  socklen_t length = sizeof value;
  CHECK_EQ(getsockopt(fd, IPPROTO_TCP, name, &value, &length), 0);
  return value;
}

void silence_is_bounded(uint32_t silence_ms) {
  const mc::Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  mc::tune_tcp(fd.get(), silence_ms);
  const auto ms = static_cast<int>(silence_ms);
  CHECK_EQ(option(fd.get(), TCP_USER_TIMEOUT), ms);
  CHECK(option(fd.get(), TCP_KEEPIDLE) * 1000 < ms);  // probes are on their way by then
  CHECK(option(fd.get(), TCP_KEEPINTVL) * 1000 <= std::max(1000, ms / 10));
}

}  // namespace

int main() {
  calls_come_from_the_best();
  for (const uint32_t silence_ms : {2'000U, 10'000U, 60'000U}) silence_is_bounded(silence_ms);
  within_one_host("127.0.0.1");
  within_one_host("::1");
  return 0;
}
