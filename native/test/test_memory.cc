// Segments as they are handed out, and digests against the published vectors.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "base/abi.h"
#include "check.h"

namespace {

void check_open_and_close() {
  uint64_t address = 0;
  uint64_t nbytes = 0;
  int32_t fd = -1;
  CHECK_EQ(mc_memory_open("some name", 100'000, 0, &address, &nbytes, &fd), MC_OK);
  CHECK_EQ(nbytes, 102'400u);
  auto* const bytes = reinterpret_cast<uint8_t*>(address);
  for (uint64_t i = 0; i < nbytes; i++) CHECK_EQ(bytes[i], 0);
  std::memset(bytes, 1, nbytes);
  CHECK_EQ(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  CHECK_EQ(ftruncate(fd, 0), -1);
  CHECK_EQ(ftruncate(fd, 1 << 20), -1);
  void* const other = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(other != MAP_FAILED);
  CHECK_EQ(static_cast<uint8_t*>(other)[nbytes - 1], 1);
  munmap(other, nbytes);
  mc_memory_close(address, nbytes, fd);
  CHECK_EQ(fcntl(fd, F_GETFD), -1);
  mc_memory_close(0, 0, -1);
}

void check_sole_writer() {
  uint64_t address = 0;
  uint64_t nbytes = 0;
  int32_t fd = -1;
  const uint32_t flags = MC_MEMORY_SOLE_WRITER | MC_MEMORY_HUGE;
  CHECK_EQ(mc_memory_open("", 4096, flags, &address, &nbytes, &fd), MC_OK);
  CHECK(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  uint8_t byte = 7;
  CHECK_EQ(pwrite(fd, &byte, 1, 0), -1);
  void* const other = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, 0);
  CHECK(other != MAP_FAILED);
  CHECK_EQ(mprotect(other, nbytes, PROT_READ | PROT_WRITE), -1);
  *reinterpret_cast<volatile uint8_t*>(address) = 5;  // the owner still can
  CHECK_EQ(*static_cast<volatile uint8_t*>(other), 5);
  munmap(other, nbytes);
  mc_memory_close(address, nbytes, fd);
}

void check_refusals() {
  uint64_t address = 1;
  uint64_t nbytes = 2;
  int32_t fd = 3;
  char name[300];
  std::memset(name, 'x', sizeof name);
  name[201] = 0;
  CHECK_EQ(mc_memory_open(name, 4096, 0, &address, &nbytes, &fd), MC_E_USAGE);
  CHECK_EQ(mc_memory_open(nullptr, 4096, 0, &address, &nbytes, &fd), MC_E_USAGE);
  CHECK_EQ(mc_memory_open("", 0, 0, &address, &nbytes, &fd), MC_E_USAGE);
  CHECK_EQ(mc_memory_open("", 4096, 64, &address, &nbytes, &fd), MC_E_USAGE);
  for (uint64_t size : {uint64_t{1} << 45, uint64_t{1} << 46, uint64_t{1} << 62, ~uint64_t{0}})
    CHECK_EQ(mc_memory_open("", size, 0, &address, &nbytes, &fd), MC_E_OUT_OF_SPACE);
  CHECK(address == 1 && nbytes == 2 && fd == 3);  // written on success only
}

void check_digests() {
  uint8_t secret[16];
  uint8_t keys[16];
  for (uint8_t i = 0; i < 16; i++) secret[i] = keys[i] = i;
  const uint8_t expected[4][16] = {
      {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02,
       0x93},  // nothing
      {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc,
       0x45},  // 00
      {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02,
       0x93},
      {0x6e, 0xe2, 0xa4, 0xca, 0x67, 0xb0, 0x54, 0xbb, 0xfd, 0x33, 0x15, 0xbf, 0x85, 0x23, 0x05,
       0x77},  // 00..0f
  };
  uint8_t sequence[17] = {0};
  std::memcpy(sequence + 1, keys, 16);
  const uint64_t ends[] = {0, 1, 1, 17};
  uint8_t out[4][16];
  mc_digest(sequence, ends, 4, secret, &out[0][0]);
  CHECK(std::memcmp(out, expected, sizeof out) == 0);
}

}  // namespace

int main() {
  check_open_and_close();
  check_sole_writer();
  check_refusals();
  check_digests();
  return 0;
}
