// How fast the kernels copy and check on this machine, beside memcpy: where the figures in the
// comments of native/src/memory come from. Medians in GB/s; cold: going round in 256 MiB.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "memory/crc32c.h"

namespace {

constexpr size_t kRing = 256 << 20;
constexpr size_t kSizes[] = {4096, 65536, 1 << 20, 16 << 20};

using Copy = uint32_t (*)(uint32_t, uint8_t*, const uint8_t*, size_t);

uint32_t libc_copy(uint32_t, uint8_t* to, const uint8_t* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
  return to[nbytes - 1];
}

uint8_t* ring(int flags) {
  void* const memory = mmap(nullptr, kRing + kSizes[3], PROT_READ | PROT_WRITE,
                            MAP_ANONYMOUS | MAP_POPULATE | flags, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  return static_cast<uint8_t*>(memory);
}

// cold_from, cold_to: whether source and target move on through the ring.
double gb_per_s(Copy copy, uint8_t* to, const uint8_t* from, size_t nbytes, bool cold_from,
                bool cold_to) {
  const size_t step = (nbytes + 8191) / 4096 * 4096;
  const int repeat = nbytes >= 1 << 20 ? 30 : 500;
  std::vector<double> seconds;
  size_t at_from = 0;
  size_t at_to = 0;
  uint32_t sum = 0;
  for (int i = 0; i < repeat; i++) {
    if (cold_from) at_from = (at_from + 17 * step) % kRing;
    if (cold_to) at_to = (at_to + 13 * step) % kRing;
    const auto start = std::chrono::steady_clock::now();
    sum ^= copy(~0u, to + at_to, from + at_from, nbytes);
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  volatile uint32_t kept = sum;
  (void)kept;
  std::nth_element(seconds.begin(), seconds.begin() + repeat / 2, seconds.end());
  return static_cast<double>(nbytes) / seconds[static_cast<size_t>(repeat) / 2] / 1e9;
}

void print_row(const char* name, const char* how, Copy copy, uint8_t* to, const uint8_t* from) {
  std::printf("%-9s %-8s", name, how);
  const bool places[3][2] = {{true, true}, {true, false}, {false, false}};
  for (const auto& cold : places) {
    for (size_t nbytes : kSizes)
      std::printf(" %6.1f", gb_per_s(copy, to, from, nbytes, cold[0], cold[1]));
    std::printf("  |");
  }
  std::printf("\n");
}

}  // namespace

int main() {
  uint8_t* const from = ring(MAP_SHARED);
  uint8_t* const to = ring(MAP_PRIVATE);
  for (size_t i = 0; i < kRing; i++) from[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  std::printf("%-18s %-28s  | %-28s  | %s\n", "", "cold to cold", "cold to hot", "hot to hot");
  std::printf("%-18s", "");
  for (int i = 0; i < 3; i++) std::printf("   4 Ki  64 Ki   1 Mi  16 Mi  |");
  std::printf("\n");
  print_row("libc", "memcpy", libc_copy, to, from);
  for (const auto* kernel : mc::memory::all_kernels()) {
    if (!kernel->usable()) continue;
    print_row(kernel->name, "copy", kernel->copy, to, from);
    print_row(kernel->name, "stream", kernel->stream, to, from);
  }
  return 0;
}
