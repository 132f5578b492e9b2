// Raw memory that its program maps and unmaps while peers read and write it: slices fail, or the
// connection does, but nobody crashes.
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "base/random.h"
#include "check.h"
#include "transport/raw.h"

namespace {

constexpr uint32_t kMs = 20'000;
constexpr uint64_t kBytes = 512 << 10, kHalf = kBytes / 2;
constexpr int kRounds = 300;
#ifdef __SANITIZE_THREAD__
constexpr bool kRacesAreErrors = true;  // memory that is unmapped while it is used is one by nature
#else
constexpr bool kRacesAreErrors = false;
#endif

uint8_t* reserve() {
  void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  return static_cast<uint8_t*>(at);
}

void holes_are_seen() {
  uint8_t* memory = reserve();
  memory[kHalf - 1] = 7;
  uint8_t byte = 0;
  const auto base = reinterpret_cast<uint64_t>(memory), here = reinterpret_cast<uint64_t>(&byte);
  CHECK_EQ(munmap(memory + kHalf, kHalf), 0);
  CHECK(mc::copy_raw(here, base + kHalf - 1, 1));
  CHECK_EQ(byte, 7);
  CHECK(!mc::copy_raw(here, base + kHalf, 1));
  CHECK(!mc::copy_raw(base + kHalf, here, 1));
  uint32_t crc = 0;
  CHECK(mc::crc_raw(base, kHalf, &crc));
  CHECK_EQ(crc, mc_crc32c(memory, kHalf, 0));
  CHECK(!mc::crc_raw(base, kBytes, &crc));
  CHECK_EQ(munmap(memory, kHalf), 0);
}

mc_engine* open_engine(uint32_t transport) {
  mc_engine_options options{};
  options.struct_size = sizeof options;
  options.transports = transport;
  options.listen = "127.0.0.1:0";
  mc_engine* engine = nullptr;
  CHECK_EQ(mc_engine_open(&options, &engine), MC_OK);
  return engine;
}

void comes_and_goes(uint32_t transport) {
  mc_engine* here = open_engine(transport);
  mc_engine* there = open_engine(transport);
  uint8_t* memory = reserve();
  const mc_piece piece{reinterpret_cast<uint64_t>(memory), kBytes};
  uint32_t region = 0;
  const uint32_t access = MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE | MC_ACCESS_RAW;
  CHECK_EQ(mc_region_register(there, &piece, 1, access, -1, &region), MC_OK);
  char address[256];
  CHECK_EQ(mc_engine_address(there, address, sizeof address), MC_OK);
  std::atomic<bool> ending{false};
  std::thread owner([&] {
    while (!ending) {  // not given back: another mapping of this process must not land there
      CHECK(mmap(memory, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
      CHECK_EQ(mprotect(memory, kBytes, PROT_READ | PROT_WRITE), 0);
    }
  });
  std::vector<uint8_t> local(kBytes);
  for (int i = 0; i < kRounds; ++i) {
    uint64_t peer = 0;
    CHECK_EQ(mc_peer_open(here, address, kMs, &peer), MC_OK);
    mc_slice slices[2];
    for (uint64_t k = 0; k < 2; ++k) {
      const uint64_t length = mc::seeded(1, static_cast<uint64_t>(2 * i) + k) % kHalf;
      const uint32_t op = mc::seeded(2, static_cast<uint64_t>(2 * i) + k) % 2 ? MC_OP_READ : MC_OP_WRITE;
      slices[k] = {op, region, k * kHalf, reinterpret_cast<uint64_t>(local.data()) + k * kHalf,
                   i % 3 == 0 ? length : length % 6000, MC_SLICE_CRC * (static_cast<uint32_t>(i) % 2), 0, 0, 0};
    }
    const int32_t status = mc_transfer(here, peer, slices, 2, kMs);
    CHECK(status == MC_OK || status == MC_E_ACCESS || status == MC_E_PEER_UNREACHABLE);
  }
  ending = true;
  owner.join();
  mc_engine_close(here);
  mc_engine_close(there);
  CHECK_EQ(munmap(memory, kBytes), 0);
}

}  // namespace

int main() {
  holes_are_seen();
  if (kRacesAreErrors) return 0;
  for (const uint32_t transport : {MC_TRANSPORT_LOCAL, MC_TRANSPORT_SHM, MC_TRANSPORT_TCP}) {
    comes_and_goes(static_cast<uint32_t>(transport));
  }
  return 0;
}
