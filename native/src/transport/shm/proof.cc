#include "transport/shm/proof.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace mc {
namespace {

// As ptrace(2) has them.
constexpr const char* kPermissionRules =
    "; the kernel permits it to the same user, unless kernel.yama.ptrace_scope is above 0, and to "
    "CAP_SYS_PTRACE";

}  // namespace

int32_t Proof::make() {
  token_ = random_token();
  fd_.reset(memfd_create("mooncake proof", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd_) return fail_errno(MC_E_OUT_OF_SPACE, "memfd_create");
  if (pwrite(fd_.get(), token_.data(), token_.size(), 0) != static_cast<ssize_t>(token_.size()) ||
      fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0) {
    return fail_errno(MC_E_OUT_OF_SPACE, "the memfd of the shm proof");
  }
  return MC_OK;
}

bool is_memory(int fd, uint64_t nbytes) {
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return false;
  return fcntl(fd, F_GET_SEALS) >= 0 && info.st_size >= 0 &&
         static_cast<uint64_t>(info.st_size) >= nbytes;
}

bool is_safe_to_map(int fd, uint64_t nbytes) {
  return is_memory(fd, nbytes) && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
}

Fd reopen_read_only(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return Fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

bool read_proof(const Fd& memfd, Token* out) {
  if (!is_safe_to_map(memfd.get(), out->size())) return false;
  void* at = mmap(nullptr, out->size(), PROT_READ, MAP_SHARED, memfd.get(), 0);
  if (at == MAP_FAILED) return false;
  memcpy(out->data(), at, out->size());
  munmap(at, out->size());
  return true;
}

void tie(int socket, const Token& token, uint64_t token_address, ShmTies* out) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
      credentials.pid <= 0) {
    out->why_not = "the peer's process is not visible from here";
    return;
  }
  out->pid = credentials.pid;
  out->pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
  if (!out->pidfd) {
    out->why_not = "pidfd_open: " + errno_text(errno);
    return;
  }
  Token seen{};
  iovec here{seen.data(), seen.size()};
  iovec there{reinterpret_cast<void*>(token_address), seen.size()};
  const ssize_t n = process_vm_readv(out->pid, &here, 1, &there, 1, 0);
  if (n != static_cast<ssize_t>(seen.size())) {
    const int error = errno;
    out->why_not = "process_vm_readv: " + errno_text(error);
    if (error == EPERM) out->why_not += kPermissionRules;
  } else if (seen != token) {
    out->why_not = "process_vm_readv reached another process";
  } else {
    out->we_read = true;
  }
}

}  // namespace mc
