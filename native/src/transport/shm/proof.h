// Proof that a peer on the other end of a unix socket shares this host's memory.
//
// Each side makes a memfd with a random token and passes it over the socket; the other one maps
// it, reads the token and says it back. Addresses prove nothing: containers may have equal ones,
// and a unix socket in a shared namespace may belong to a process whose memory cannot be reached.
//
// A second, separate question is whether process_vm_readv is permitted (ptrace rules, user and
// pid namespaces): the same token, read out of the other process's memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/fd.h"
#include "base/random.h"

namespace mc {

class Proof {
 public:
  int32_t make();  // MC_E_OUT_OF_SPACE
  int fd() const { return fd_.get(); }
  const Token& token() const { return token_; }
  uint64_t token_address() const { return reinterpret_cast<uint64_t>(&token_); }

 private:
  Fd fd_;
  Token token_{};
};

// What is known of a proven peer's process.
struct ShmTies {
  pid_t pid = 0;         // as seen from here; 0: not visible
  Fd pidfd;              // tells when it ended, so that a re-used pid is never read
  bool we_read = false;  // process_vm_readv of the peer's memory is permitted
  bool it_reads = false; // the peer may read ours
  std::string why_not;   // we_read is false because ...
};

// The token behind a passed memfd; false when it is no such thing.
bool read_proof(const Fd& memfd, Token* out);
// Fill pid, pidfd, we_read and why_not for the process at the other end of this unix socket.
void tie(int socket, const Token& token, uint64_t token_address, ShmTies* out);

// Whether it is a file in memory (memfd, tmpfs: reading it waits for no device) of at least nbytes.
bool is_memory(int fd, uint64_t nbytes);

// True: `fd` is a file in memory of at least this size that nobody can shrink under a mapping.
bool is_safe_to_map(int fd, uint64_t nbytes);

// The same file, opened for reading only; empty when that cannot be had.
Fd reopen_read_only(int fd);

}  // namespace mc
