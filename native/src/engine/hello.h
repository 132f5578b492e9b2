// How two engines meet. Fixed-size records, before any frame; little-endian.
//
//   TCP, first lane      hello ->            <- hello (status, session, shm name)
//                        choice (one bit)-> <- ready
//   TCP, another lane    lane (session) ->   <- ready (status)
//   unix (shm proof)     shm_hello + memfd-> <- shm_hello + memfd (echo of the token read in ours)
//                        shm_proof (echo) -> <- ready
//
// The caller decides: the same process (the incarnation is in this process's registry) needs no
// connection at all; else shm when its proof succeeds; else rdma where both have a device; else
// tcp; else, if it asks for that, messages alone, which everybody takes. It hangs up where it does not
// want to go on. A record with another magic or major version is answered with a status and cut.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/random.h"
#include "base/status.h"

namespace mc {

inline constexpr uint32_t kHelloMagic = 0x5445434d;  // "MCET"
inline constexpr uint16_t kProtocolMajor = 2, kProtocolMinor = 1;

enum class Step : uint32_t { kHello = 1, kChoice, kLane, kReady, kShmHello, kShmProof };

struct Hello {
  uint32_t magic = kHelloMagic;
  uint16_t major = kProtocolMajor, minor = kProtocolMinor;
  Step step{};
  int32_t status = MC_OK;
  Token incarnation{};
  Token session{};      // names the peer that more lanes belong to
  Token token{};        // shm: what was read through the other one's memfd
  uint64_t token_address = 0;  // shm: where the sender keeps its token, for process_vm_readv
  uint32_t transports = 0, message_bytes_max = 0, lane = 0, choice = 0;
  uint32_t reads_memory = 0;  // shm: process_vm_readv of the other one's token succeeded
  uint32_t message_window = 0;
  uint32_t rdma_ports = 0, reserved = 0;
  char shm_name[40] = "";
  char address[128] = "";

  void set_address(const std::string& text) { strncpy(address, text.c_str(), sizeof address - 1); }
  void set_shm_name(const std::string& text) {
    strncpy(shm_name, text.c_str(), sizeof shm_name - 1);
  }
  std::string address_text() const { return {address, strnlen(address, sizeof address)}; }
  std::string shm_name_text() const { return {shm_name, strnlen(shm_name, sizeof shm_name)}; }
};
static_assert(sizeof(Hello) == 272);

// MC_E_VERSION or MC_E_PEER_UNREACHABLE unless it is a record of our protocol at this step.
int32_t check_hello(const Hello& hello, Step step);

// Blocking, for the side that opens. `passed`: a descriptor to send along, or -1.
int32_t send_hello(int fd, const Hello& hello, Deadline deadline, int abort_fd, int passed = -1);
int32_t receive_hello(int fd, Step step, Deadline deadline, int abort_fd, Hello* out,
                      Fd* out_passed = nullptr);

// One system call each, for both sides; the number of bytes as send() and recv() have it.
ssize_t send_with_fd(int fd, const void* bytes, size_t n, int passed);
ssize_t receive_with_fd(int fd, void* bytes, size_t n, Fd* out_passed);

}  // namespace mc
