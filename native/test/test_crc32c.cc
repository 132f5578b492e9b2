// Every kernel that this processor can run, against the definition of crc32c, bit by bit: around
// every length at which a kernel changes its way, at every alignment, and with guard bytes.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "base/abi.h"
#include "check.h"
#include "memory/crc32c.h"

using mc::memory::CrcKernel;

namespace {

uint32_t by_definition(uint32_t raw, const uint8_t* data, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) {
    raw ^= data[i];
    for (int bit = 0; bit < 8; bit++) raw = (raw >> 1) ^ ((raw & 1) != 0 ? 0x82f63b78u : 0);
  }
  return raw;
}

std::vector<uint8_t> noise(size_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

using Copy = uint32_t (*)(uint32_t, uint8_t*, const uint8_t*, size_t);

void check_copy(Copy copy, const uint8_t* from, size_t nbytes, size_t shift, uint32_t expected) {
  constexpr uint8_t kGuard = 0xa5;
  constexpr size_t kRoom = 64;
  std::vector<uint8_t> target(nbytes + 4 * kRoom, kGuard);
  uint8_t* const to = target.data() + kRoom + shift;
  CHECK_EQ(copy(~0u, to, from, nbytes), expected);
  CHECK(nbytes == 0 || std::memcmp(to, from, nbytes) == 0);
  for (const uint8_t* p = target.data(); p < to; p++) CHECK_EQ(*p, kGuard);
  for (const uint8_t* p = to + nbytes; p < target.data() + target.size(); p++) CHECK_EQ(*p, kGuard);
}

void check_join() {
  const std::vector<uint8_t> bytes = noise(70000, 3);
  for (const size_t n : {0, 1, 8, 63, 4096, 65536, 70000})
    for (const size_t split : {size_t{0}, size_t{1}, n / 3, n}) {
      if (split > n) continue;
      const uint32_t first = mc_crc32c(bytes.data(), split, 0);
      const uint32_t second = mc_crc32c(bytes.data() + split, n - split, 0);
      CHECK_EQ(mc_crc32c_join(first, second, n - split), mc_crc32c(bytes.data(), n, 0));
    }
}

void check_kernel(const CrcKernel& kernel) {
  const std::vector<uint8_t> bytes = noise(20000, 1);
  std::vector<size_t> lengths;
  for (size_t n = 0; n < 700; n++) lengths.push_back(n);
  for (size_t edge : {1024, 1344, 2 * 1344, 3 * 1344, 6 * 1344, 4096, 8192, 16384})
    for (size_t n = edge - 9; n <= edge + 9; n++) lengths.push_back(n);
  for (size_t n : lengths)
    for (size_t shift : {0, 1, 7, 8, 31, 63}) {
      const uint8_t* const from = bytes.data() + shift;
      const uint32_t expected = by_definition(~0u, from, n);
      CHECK_EQ(kernel.crc(~0u, from, n), expected);
      const size_t split = n / 3;
      CHECK_EQ(kernel.crc(kernel.crc(~0u, from, split), from + split, n - split), expected);
      const size_t other = (shift * 5 + n) % 64;
      check_copy(kernel.copy, from, n, other, expected);
      check_copy(kernel.stream, from, n, other, expected);
    }
}

void check_public_calls() {
  CHECK_EQ(mc_crc32c("123456789", 9, 0), 0xe3069283u);
  CHECK_EQ(mc_crc32c("", 0, 0), 0u);
  CHECK_EQ(mc_crc32c("56789", 5, mc_crc32c("1234", 4, 0)), 0xe3069283u);
  const std::vector<uint8_t> bytes = noise(300 * 1024, 2);
  const auto address = [](const uint8_t* p) { return reinterpret_cast<uint64_t>(p); };
  for (size_t n : {0ul, 1ul, 64ul, 256ul * 1024 - 1, 256ul * 1024, 256ul * 1024 + 1}) {
    std::vector<uint8_t> target(n + 1, 7);
    CHECK_EQ(mc_copy_crc32c(address(target.data()), address(bytes.data() + 3), n),
             mc_crc32c(bytes.data() + 3, n, 0));
    CHECK(n == 0 || std::memcmp(target.data(), bytes.data() + 3, n) == 0);
    CHECK_EQ(target[n], 7);
    mc_copy(address(target.data()), address(bytes.data() + 5), n);
    CHECK(n == 0 || std::memcmp(target.data(), bytes.data() + 5, n) == 0);
    CHECK_EQ(target[n], 7);
  }
}

}  // namespace

int main() {
  check_join();
  for (const CrcKernel* kernel : mc::memory::all_kernels()) {
    std::printf("  %s%s\n", kernel->name, kernel->usable() ? "" : ": not on this processor");
    if (kernel->usable()) check_kernel(*kernel);
  }
  check_public_calls();
  return 0;
}
