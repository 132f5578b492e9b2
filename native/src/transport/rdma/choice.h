// What is decided about ports, paths, slices and memory: pure functions, tested without a device.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace mc::rdma {

// ---- addresses ---------------------------------------------------------------------------------

enum GidKind : uint8_t { kGidInfiniBand = 0, kGidRoce1 = 1, kGidRoce2 = 2 };

// One entry of a port's table of addresses. Also its form in a frame.
struct GidEntry {
  std::array<uint8_t, 16> raw{};
  uint16_t index = 0;
  uint16_t vlan = 0;  // 0: none
  uint8_t kind = kGidRoce2;
  uint8_t reserved[3]{};
};
static_assert(sizeof(GidEntry) == 24);

bool is_ipv4(const GidEntry& gid);
bool is_link_local(const GidEntry& gid);
std::string gid_text(const GidEntry& gid);

inline constexpr size_t kGidsMax = 8;  // of a port that a peer is told

// Those worth trying, the best first: RoCE v2 with an IPv4 address, with a global IPv6 one, with a
// link-local one; InfiniBand's own. Never RoCE v1, which no router forwards, nor an empty entry.
// `wanted` >= 0: only that index.
std::vector<GidEntry> rank_gids(std::vector<GidEntry> table, int wanted);

struct GidPair {
  size_t ours = 0, theirs = 0;
};
// The two addresses that most likely reach each other: of one kind and family, of one VLAN before
// two, with the longest common prefix, then by rank. False and *why: no two fit.
bool choose_gids(std::span<const GidEntry> ours, std::span<const GidEntry> theirs, GidPair* out,
                 std::string* why);

// ---- slices and rails --------------------------------------------------------------------------

inline constexpr uint64_t kStripe = 256 << 10;    // of a slice over several rails
inline constexpr uint64_t kWorkMax = 1 << 20;     // bytes of one work request

// Bytes that a slice is cut into for so many rails: with several, small enough that one large slice
// is carried by all of them.
uint64_t part_bytes(size_t rails);

struct RailView {
  bool ready = false;
  uint64_t outstanding_bytes = 0, outstanding_count = 0;
  int numa_node = -1;
};
inline constexpr uint64_t kRailBytesMax = 8 << 20;   // outstanding on a rail: bounds a cancel
inline constexpr uint64_t kRailCountMax = 96;
// The rail that will be done first with `length` bytes more: what is outstanding, with a surcharge
// for another NUMA node than the memory's. -1: none is ready and has room.
int pick_rail(std::span<const RailView> rails, uint64_t length, int memory_node);

// ---- failures ----------------------------------------------------------------------------------

// A path that breaks is tried again after a growing pause; after kDownAfter breaks in a row it is
// down: nothing waits for it any more, and it is looked at now and then. A success forgets it all.
class Backoff {
 public:
  static constexpr uint32_t kDownAfter = 5;
  static constexpr uint64_t kFirstMs = 50, kLastMs = 5'000;

  void broke() { if (breaks_ < 1000) ++breaks_; }
  void worked() { breaks_ = 0; }
  bool down() const { return breaks_ >= kDownAfter; }
  uint32_t breaks() const { return breaks_; }
  uint64_t pause_ms() const;

 private:
  uint32_t breaks_ = 0;
};

// ---- memory ------------------------------------------------------------------------------------

struct Range {
  uint64_t address = 0, nbytes = 0;
};
// A range cut to what a device registers at once: equal cuts on page boundaries. limit 0: none.
std::vector<Range> split_range(Range range, uint64_t limit_bytes);

// Words for a registration that failed for want of locked memory (ENOMEM): the limit, its value and
// what is needed, and the remedy.
std::string locked_memory_words(uint64_t needed_bytes, uint64_t limit_bytes, uint64_t locked_bytes);

// How memory of a GPU could be registered on this machine. This is the one place that decides it.
struct DeviceMemoryFacts {
  bool verbs_have_dmabuf = false;  // ibv_reg_dmabuf_mr is there
  bool exporter = false;            // a descriptor of the memory was given
  bool peer_module = false;         // nvidia_peermem or the like is loaded
  bool device_takes_dmabuf = true;  // false: the device said so before
};
enum class DeviceMemoryWay { kDmabuf, kPeerMemory, kRefused };
DeviceMemoryWay plan_device_memory(const DeviceMemoryFacts& facts, std::string* reason);

}  // namespace mc::rdma
