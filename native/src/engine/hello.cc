#include "engine/hello.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/address.h"

namespace mc {

int32_t check_hello(const Hello& hello, Step step) {
  if (hello.magic != kHelloMagic) {
    return fail(MC_E_PEER_UNREACHABLE, "something else than a transfer engine listens there");
  }
  if (hello.major != kProtocolMajor) {
    return fail(MC_E_VERSION, "we speak protocol version %u.%u, the peer %u.%u", kProtocolMajor,
                kProtocolMinor, hello.major, hello.minor);
  }
  if (hello.status != MC_OK) return fail(hello.status, "the peer refused (status %d)", hello.status);
  if (hello.step != step) return fail(MC_E_PEER_UNREACHABLE, "the peer is out of step");
  return MC_OK;
}

ssize_t send_with_fd(int fd, const void* bytes, size_t n, int passed) {
  iovec piece{const_cast<void*>(bytes), n};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (passed >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &passed, sizeof passed);
  }
  return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t receive_with_fd(int fd, void* bytes, size_t n, Fd* out_passed) {
  iovec piece{bytes, n};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received < 0) return received;
  for (cmsghdr* one = CMSG_FIRSTHDR(&message); one != nullptr; one = CMSG_NXTHDR(&message, one)) {
    if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
    int passed = -1;
    memcpy(&passed, CMSG_DATA(one), sizeof passed);
    Fd owned(passed);
    if (out_passed != nullptr) *out_passed = std::move(owned);
  }
  return received;
}

int32_t send_hello(int fd, const Hello& hello, Deadline deadline, int abort_fd, int passed) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&hello);
  for (size_t done = 0; done < sizeof hello;) {
    const ssize_t n = send_with_fd(fd, bytes + done, sizeof hello - done, done == 0 ? passed : -1);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      const int32_t status = wait_ready(fd, POLLOUT, deadline, abort_fd);
      if (status != MC_OK) return status;
    } else if (errno != EINTR) {
      return fail_errno(MC_E_PEER_UNREACHABLE, "the connection was cut while meeting");
    }
  }
  return MC_OK;
}

int32_t receive_hello(int fd, Step step, Deadline deadline, int abort_fd, Hello* out,
                      Fd* out_passed) {
  auto* bytes = reinterpret_cast<uint8_t*>(out);
  for (size_t done = 0; done < sizeof *out;) {
    const ssize_t n = receive_with_fd(fd, bytes + done, sizeof *out - done, out_passed);
    if (n > 0) {
      done += static_cast<size_t>(n);
      if (done >= sizeof out->magic && out->magic != kHelloMagic) break;
    } else if (n == 0) {
      return fail(MC_E_PEER_UNREACHABLE, "the peer hung up while meeting");
    } else if (errno == EAGAIN) {
      const int32_t status = wait_ready(fd, POLLIN, deadline, abort_fd);
      if (status != MC_OK) return status;
    } else if (errno != EINTR) {
      return fail_errno(MC_E_PEER_UNREACHABLE, "the connection was cut while meeting");
    }
  }
  return check_hello(*out, step);
}

}  // namespace mc
