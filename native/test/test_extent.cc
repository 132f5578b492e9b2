// One writer and several readers at the same extents: whatever a reader reports as good has exactly
// the bytes of its generation, at every moment of every put. And rows that lie.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "check.h"

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kLargest = 512;  // its payload copies go byte by byte
#else
constexpr uint64_t kLargest = 300 * 1024;  // beyond what is copied with plain stores
#endif
constexpr uint64_t kSegment = 1 << 20;
constexpr auto kDuration = std::chrono::milliseconds(1500);
constexpr int kReaders = 2;

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Everything about generation g follows from g, so that readers need to be told nothing else.
uint64_t length_of(uint64_t g) { return mixed(g) % kLargest; }
// Two overlapping places: the payload of the one covers the header of the other.
uint64_t offset_of(uint64_t g) { return g % 3 == 0 ? 256 : 0; }
uint8_t byte_of(uint64_t g, uint64_t i) { return static_cast<uint8_t>(g * 31 + i * 7 + (i >> 8)); }

mc_extent_row row_of(uint64_t g) {
  mc_extent_row row{};
  row.offset = offset_of(g);
  row.length = length_of(g);
  row.generation = g;
  const uint64_t digest = mixed(g + 77);
  std::memcpy(row.digest, &digest, sizeof digest);
  return row;
}

struct Memory {
  uint64_t address = 0;
  uint64_t nbytes = 0;
  int32_t fd = -1;

  Memory() { CHECK_EQ(mc_memory_open("test", kSegment, 0, &address, &nbytes, &fd), MC_OK); }
  ~Memory() { mc_memory_close(address, nbytes, fd); }
};

using Status = int32_t;

Status begin(const Memory& memory, const mc_extent_row& row) {
  Status status = MC_OK;
  CHECK_EQ(mc_extent_begin(memory.address, memory.nbytes, &row, 1, &status), MC_OK);
  return status;
}

Status seal(const Memory& memory, const mc_extent_row& row, uint32_t crc) {
  Status status = MC_OK;
  CHECK_EQ(mc_extent_seal(memory.address, memory.nbytes, &row, 1, &crc, &status), MC_OK);
  return status;
}

Status unseal(const Memory& memory, const mc_extent_row& row) {
  Status status = MC_OK;
  CHECK_EQ(mc_extent_unseal(memory.address, memory.nbytes, &row, 1, &status), MC_OK);
  return status;
}

Status read(const Memory& memory, const mc_extent_row& row, std::vector<uint8_t>& target) {
  Status status = MC_OK;
  const uint64_t to = reinterpret_cast<uint64_t>(target.data());
  const uint64_t room = target.size();
  CHECK_EQ(mc_extent_read(memory.address, memory.nbytes, &row, 1, &to, &room, &status), MC_OK);
  return status;
}

uint32_t fill(const Memory& memory, const mc_extent_row& row, std::vector<uint8_t>& scratch) {
  for (uint64_t i = 0; i < row.length; i++) scratch[i] = byte_of(row.generation, i);
  return mc_copy_crc32c(memory.address + row.offset + MC_EXTENT_HEADER_NBYTES,
                        reinterpret_cast<uint64_t>(scratch.data()), row.length);
}

// An old payload where a header shall stand: the node's table knows, and wipes it.
void wipe(const Memory& memory, uint64_t offset) {
  auto* words = reinterpret_cast<uint64_t*>(memory.address + offset);
  for (int i = 0; i < 8; i++) __atomic_store_n(words + i, 0, __ATOMIC_RELEASE);
}

void write_until(const Memory& memory, std::atomic<uint64_t>& newest, std::atomic<bool>& stop) {
  std::vector<uint8_t> scratch(kLargest);
  const auto end = std::chrono::steady_clock::now() + kDuration;
  for (uint64_t g = 1; std::chrono::steady_clock::now() < end; g++) {
    const mc_extent_row row = row_of(g);
    if (g > 1) {
      const mc_extent_row old = row_of(g - 1);
      const bool moved = old.offset != row.offset;
      if (moved || g % 2 == 0) CHECK_EQ(unseal(memory, old), MC_OK);  // else begun right over it
      if (moved) wipe(memory, row.offset);
    }
    CHECK_EQ(begin(memory, row), MC_OK);
    const uint32_t crc = fill(memory, row, scratch);
    CHECK_EQ(seal(memory, row, crc), MC_OK);
    newest.store(g, std::memory_order_release);
    if (g % 4 == 0) std::this_thread::yield();
  }
  stop.store(true);
}

struct Counts {
  uint64_t good = 0;
  uint64_t stale = 0;
};

// CHECKSUM is an answer that only damage may give: a race must end as good or as stale.
void read_until(const Memory& memory, std::atomic<uint64_t>& newest, std::atomic<bool>& stop,
                Counts& counts) {
  std::vector<uint8_t> target(kLargest);
  while (!stop.load()) {
    const uint64_t g = newest.load(std::memory_order_acquire);
    if (g == 0) continue;
    const Status status = read(memory, row_of(g), target);
    if (status == MC_OK) {
      counts.good++;
      for (uint64_t i = 0; i < length_of(g); i++) CHECK_EQ(target[i], byte_of(g, i));
    } else {
      CHECK_EQ(status, MC_E_LEASE_EXPIRED);
      counts.stale++;
    }
  }
}

void check_race() {
  const Memory memory;
  std::atomic<uint64_t> newest{0};
  std::atomic<bool> stop{false};
  Counts counts[kReaders];
  std::vector<std::thread> readers;
  for (Counts& mine : counts) readers.emplace_back([&] { read_until(memory, newest, stop, mine); });
  write_until(memory, newest, stop);
  for (std::thread& reader : readers) reader.join();
  uint64_t good = 0;
  uint64_t stale = 0;
  for (const Counts& mine : counts) {
    good += mine.good;
    stale += mine.stale;
  }
  std::printf("  %llu puts, %llu good reads, %llu stale\n",
              static_cast<unsigned long long>(newest.load()), static_cast<unsigned long long>(good),
              static_cast<unsigned long long>(stale));
  CHECK(good > 0);
  CHECK(stale > 0);
}

void check_phases() {
  const Memory memory;
  std::vector<uint8_t> scratch(kLargest);
  std::vector<uint8_t> target(kLargest);
  mc_extent_row row = row_of(5);
  CHECK_EQ(read(memory, row, target), MC_E_LEASE_EXPIRED);  // nothing there
  CHECK_EQ(begin(memory, row), MC_OK);
  CHECK_EQ(begin(memory, row), MC_E_LEASE_EXPIRED);  // the same request again
  CHECK_EQ(read(memory, row, target), MC_E_LEASE_EXPIRED);
  const uint32_t crc = fill(memory, row, scratch);
  CHECK_EQ(seal(memory, row, crc), MC_OK);
  CHECK_EQ(seal(memory, row, crc), MC_E_LEASE_EXPIRED);  // twice
  CHECK_EQ(read(memory, row, target), MC_OK);
  mc_extent_row older = row;
  older.generation = 4;
  CHECK_EQ(begin(memory, older), MC_E_LEASE_EXPIRED);
  CHECK_EQ(unseal(memory, older), MC_E_LEASE_EXPIRED);
  CHECK_EQ(read(memory, older, target), MC_E_LEASE_EXPIRED);
  CHECK_EQ(unseal(memory, row), MC_OK);
  CHECK_EQ(unseal(memory, row), MC_OK);
  CHECK_EQ(read(memory, row, target), MC_E_LEASE_EXPIRED);
  CHECK_EQ(seal(memory, row, crc), MC_E_LEASE_EXPIRED);  // ended is ended
  CHECK_EQ(begin(memory, row), MC_E_LEASE_EXPIRED);
  mc_extent_row younger = row;
  younger.generation = 6;
  CHECK_EQ(begin(memory, younger), MC_OK);
}

void check_damage() {
  const Memory memory;
  std::vector<uint8_t> scratch(kLargest);
  std::vector<uint8_t> target(kLargest);
  mc_extent_row row = row_of(1);
  row.length = 200;
  CHECK_EQ(begin(memory, row), MC_OK);
  CHECK_EQ(seal(memory, row, fill(memory, row, scratch)), MC_OK);
  auto* const bytes = reinterpret_cast<uint8_t*>(memory.address + row.offset);
  for (uint64_t at = 0; at < MC_EXTENT_HEADER_NBYTES + row.length; at++)
    for (int bit = 0; bit < 8; bit++) {
      bytes[at] ^= static_cast<uint8_t>(1 << bit);
      const Status status = read(memory, row, target);
      // Fields that the row names too make it another extent; all the rest is damage.
      CHECK_EQ(status, at < 40 ? MC_E_LEASE_EXPIRED : MC_E_CHECKSUM);
      bytes[at] ^= static_cast<uint8_t>(1 << bit);
    }
  CHECK_EQ(read(memory, row, target), MC_OK);
}

void check_hostile_rows() {
  const Memory memory;
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  const uint64_t end = memory.nbytes;
  const struct {
    uint64_t offset, length;
  } bad[] = {
      {1, 0},
      {63, 0},
      {end, 0},
      {end - 64, 1},
      {end - 32, 0},
      {0, end},
      {0, end - 63},
      {64, end - 127},
      {0, kMax},
      {kMax, 0},
      {kMax - 63, 0},
      {kMax - 63, 64},
      {kMax - 63, kMax},
      {64, kMax - 127},
      {64, kMax - 63},
      {end - 64, kMax},
      {end + 64, 0},
      {1ull << 63, 1ull << 63},
  };
  std::vector<uint8_t> target(64, 9);
  for (const auto& range : bad) {
    mc_extent_row row{};
    row.offset = range.offset;
    row.length = range.length;
    row.generation = 1;
    CHECK_EQ(begin(memory, row), MC_E_USAGE);
    CHECK_EQ(seal(memory, row, 0), MC_E_USAGE);
    CHECK_EQ(unseal(memory, row), MC_E_USAGE);
    CHECK_EQ(read(memory, row, target), MC_E_USAGE);
  }
  mc_extent_row last{};
  last.offset = end - 64;
  last.generation = 1;
  CHECK_EQ(begin(memory, last), MC_OK);
  CHECK_EQ(seal(memory, last, 0), MC_OK);
  CHECK_EQ(read(memory, last, target), MC_OK);
  for (uint8_t byte : target) CHECK_EQ(byte, 9);

  mc_extent_row large = row_of(1);
  large.offset = 0;
  large.length = 65;
  std::vector<uint8_t> scratch(kLargest);
  CHECK_EQ(begin(memory, large), MC_OK);
  CHECK_EQ(seal(memory, large, fill(memory, large, scratch)), MC_OK);
  CHECK_EQ(read(memory, large, target), MC_E_USAGE);  // 64 bytes of room
  for (uint8_t byte : target) CHECK_EQ(byte, 9);
}

void check_batches() {
  const Memory memory;
  mc_extent_row rows[3] = {};
  for (uint64_t i = 0; i < 3; i++) {
    rows[i].offset = i * 128;
    rows[i].generation = 10;
  }
  rows[1].offset = 1;
  Status statuses[3] = {MC_OK, MC_OK, MC_E_CANCELLED};
  CHECK_EQ(mc_extent_begin(memory.address, memory.nbytes, rows, 3, statuses), MC_OK);
  CHECK_EQ(statuses[0], MC_OK);
  CHECK_EQ(statuses[1], MC_E_USAGE);
  CHECK_EQ(statuses[2], MC_E_CANCELLED);  // left out, and left as it was
  rows[2].generation = 1;
  CHECK_EQ(begin(memory, rows[2]), MC_OK);  // nothing had been begun there
  CHECK_EQ(mc_extent_begin(memory.address + 8, memory.nbytes, rows, 3, statuses), MC_E_USAGE);
  CHECK_EQ(mc_extent_begin(0, memory.nbytes, rows, 3, statuses), MC_E_USAGE);
  CHECK_EQ(mc_extent_begin(memory.address, memory.nbytes, nullptr, 3, statuses), MC_E_USAGE);
  CHECK_EQ(mc_extent_begin(memory.address, memory.nbytes, nullptr, 0, nullptr), MC_OK);
}

void check_verify() {
  const Memory memory;
  std::vector<uint8_t> scratch(kLargest);
  const mc_extent_row row = row_of(2);
  CHECK_EQ(begin(memory, row), MC_OK);
  const uint32_t crc = fill(memory, row, scratch);
  CHECK_EQ(seal(memory, row, crc), MC_OK);
  uint8_t before[64];
  uint8_t after[64];
  std::memcpy(before, reinterpret_cast<void*>(memory.address + row.offset), 64);
  std::memcpy(after, before, 64);
  const auto judged = [&](uint32_t arrived) {
    Status status = MC_OK;
    CHECK_EQ(mc_extent_verify(before, after, &row, 1, &arrived, &status), MC_OK);
    return status;
  };
  CHECK_EQ(judged(crc), MC_OK);
  CHECK_EQ(judged(crc ^ 1), MC_E_CHECKSUM);
  after[8] ^= 1;
  CHECK_EQ(judged(crc), MC_E_LEASE_EXPIRED);
  before[8] ^= 1;
  CHECK_EQ(judged(crc), MC_E_LEASE_EXPIRED);
  before[8] ^= 1;
  after[8] ^= 1;
  before[60] ^= 1;
  after[60] ^= 1;
  CHECK_EQ(judged(crc), MC_E_CHECKSUM);
}

}  // namespace

int main() {
  check_phases();
  check_damage();
  check_hostile_rows();
  check_batches();
  check_verify();
  check_race();
  return 0;
}
