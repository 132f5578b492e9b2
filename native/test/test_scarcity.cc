// Memory runs out again and again while engines work: calls fail with a status, connections may be
// lost, but the process lives, and once there is memory all of it works as before.
//
// Every allocation by operator new fails with a chance that a seed decides, on every thread.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "base/random.h"
#include "check.h"

namespace {

std::atomic<uint64_t> allocations{0};
std::atomic<uint64_t> failing_one_in{0};  // 0: none fails
uint64_t seed = 7;                        // SCARCITY_SEED

bool fails() {
  const uint64_t chance = failing_one_in;
  return chance > 0 && mc::seeded(seed, allocations++) % chance == 0;
}

}  // namespace

void* operator new(size_t n) {
  void* at = fails() ? nullptr : malloc(n);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}
void* operator new(size_t n, const std::nothrow_t&) noexcept { return fails() ? nullptr : malloc(n); }
void operator delete(void* at) noexcept { free(at); }
void operator delete(void* at, size_t) noexcept { free(at); }

namespace {

constexpr uint32_t kMs = 20'000, kShortMs = 30;

mc_engine* open_engine(uint32_t transport) {
  mc_engine_options options{};
  options.struct_size = sizeof options;
  options.transports = transport;
  options.listen = "127.0.0.1:0";
  mc_engine* engine = nullptr;
  CHECK_EQ(mc_engine_open(&options, &engine), MC_OK);
  return engine;
}

// One round of everything; true: all of it worked.
bool work(mc_engine* here, const char* address, uint32_t region, uint32_t patience_ms) {
  uint64_t peer = 0;
  if (mc_peer_open(here, address, patience_ms, &peer) != MC_OK) return false;
  static uint8_t target[4096], source[90'000];
  mc_slice slices[2] = {
      {MC_OP_READ, region, 0, reinterpret_cast<uint64_t>(target), sizeof target, 0, 0,
       0, 0},
      {MC_OP_WRITE, region, sizeof target, reinterpret_cast<uint64_t>(source), sizeof source, 0, 0,
       0, 0}};
  bool good = mc_transfer(here, peer, slices, 2, patience_ms) == MC_OK;
  mc_message reply{};
  good = mc_message_request(here, peer, 1, "ask", 3, patience_ms, &reply) == MC_OK && good;
  good = good && reply.nbytes == 3 && memcmp(reply.data, "ask", 3) == 0;
  mc_message_free(&reply);
  return good;
}

void check(uint32_t transport) {
  mc_engine* here = open_engine(transport);
  mc_engine* there = open_engine(transport);
  static uint8_t memory[200'000];
  const mc_piece piece{reinterpret_cast<uint64_t>(memory), sizeof memory};
  uint32_t region = 0;
  CHECK_EQ(mc_region_register(there, &piece, 1, MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE, -1,
                              &region),
           MC_OK);
  char address[256];
  CHECK_EQ(mc_engine_address(there, address, sizeof address), MC_OK);
  std::atomic<bool> ending{false};
  std::thread server([&] {
    while (!ending) {
      mc_message message{};
      if (mc_message_receive(there, kShortMs, &message) != MC_OK) continue;
      if (message.correlation != 0) {
        (void)mc_message_reply(there, &message, message.data, message.nbytes);
      }
      mc_message_free(&message);
    }
  });
  CHECK(work(here, address, region, kMs));
  for (const uint64_t chance : {1000, 200, 30}) {
    failing_one_in = chance;
    for (int i = 0; i < 30; ++i) (void)work(here, address, region, kShortMs);
    failing_one_in = 0;
    bool recovered = false;
    for (int i = 0; i < 200 && !recovered; ++i) {
      recovered = work(here, address, region, kShortMs);
      uint64_t peer = 0;
      // A connection that lost a message in the scarcity is closed by whoever noticed.
      if (!recovered && mc_peer_open(here, address, kShortMs, &peer) == MC_OK) {
        while (mc_peer_transport(here, peer) > 0) (void)mc_peer_close(here, peer);
      }
    }
    if (!recovered) {
      fprintf(stderr, "transport %u, one in %lu: %s\n", transport, chance, mc_last_error());
    }
    CHECK(recovered);
  }
  ending = true;
  server.join();
  mc_engine_close(here);
  mc_engine_close(there);
}

// A former owner's extents are taken over, or the call says that it lacks memory.
void check_segment() {
  constexpr uint64_t kBytes = 256 << 10, kCount = 40;
  auto* const memory = static_cast<uint8_t*>(aligned_alloc(64, kBytes));
  memset(memory, 0, kBytes);
  const int fd = memfd_create("journal", MFD_CLOEXEC);
  mc_segment* former = nullptr;
  CHECK_EQ(mc_segment_open(reinterpret_cast<uint64_t>(memory), kBytes, &former), MC_OK);
  CHECK_EQ(mc_segment_journal(former, fd), MC_OK);
  for (uint64_t i = 0; i < kCount; ++i) {
    mc_extent_row row{};
    row.offset = i * 4096;
    row.length = 1000;
    row.generation = i + 1;
    row.expires_ms = ~uint64_t{0} >> 2;
    const uint32_t crc = mc_crc32c(memory + row.offset + 64, row.length, 0);
    int32_t status = MC_OK;
    CHECK_EQ(mc_segment_begin(former, &row, 1, 1, &status), MC_OK);
    CHECK_EQ(mc_segment_seal(former, &row, 1, &crc, 1, &status), MC_OK);
    CHECK_EQ(status, MC_OK);
  }
  std::vector<uint8_t> journal(static_cast<size_t>(lseek(fd, 0, SEEK_END)));
  CHECK_EQ(pread(fd, journal.data(), journal.size(), 0), static_cast<ssize_t>(journal.size()));
  int failures = 0;
  for (const uint64_t chance : {2, 20, 200, 0}) {
    for (int i = 0; i < 20; ++i) {
      mc_segment* next = nullptr;
      mc_adopted found{};
      CHECK_EQ(mc_segment_open(reinterpret_cast<uint64_t>(memory), kBytes, &next), MC_OK);
      failing_one_in = chance;
      const int32_t status = mc_segment_adopt(next, journal.data(), journal.size(), &found);
      failing_one_in = 0;
      failures += status == MC_E_OUT_OF_SPACE;
      CHECK(status == MC_OK || (status == MC_E_OUT_OF_SPACE && chance > 0));
      if (status == MC_OK) CHECK_EQ(found.count, kCount);
      mc_segment_close(next);
    }
  }
  CHECK(failures > 0);
  mc_segment_close(former);
  close(fd);
  free(memory);
}

}  // namespace

int main() {
  if (const char* given = getenv("SCARCITY_SEED")) seed = strtoull(given, nullptr, 10);
  printf("  seed %lu\n", seed);
  check_segment();
  for (const uint32_t transport : {MC_TRANSPORT_LOCAL, MC_TRANSPORT_SHM, MC_TRANSPORT_TCP}) {
    check(static_cast<uint32_t>(transport));
  }
  return 0;
}
