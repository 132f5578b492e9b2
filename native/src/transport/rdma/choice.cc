#include "transport/rdma/choice.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <tuple>

namespace mc::rdma {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kOtherNodeBytes = 1 << 20;  // what crossing to another NUMA node counts as

bool is_empty(const GidEntry& gid) {
  // A table's unused entries are all zeros, or a bare prefix without an interface.
  return std::all_of(gid.raw.begin() + 8, gid.raw.end(), [](uint8_t byte) { return byte == 0; });
}

int rank_of(const GidEntry& gid) {
  if (gid.kind == kGidInfiniBand) return 0;
  if (is_ipv4(gid)) return 1;
  return is_link_local(gid) ? 3 : 2;
}

int common_bits(const GidEntry& a, const GidEntry& b) {
  int bits = 0;
  for (size_t i = 0; i < a.raw.size(); ++i) {
    const auto difference = static_cast<uint8_t>(a.raw[i] ^ b.raw[i]);
    if (difference != 0) return bits + std::countl_zero(difference);
    bits += 8;
  }
  return bits;
}

}  // namespace

bool is_ipv4(const GidEntry& gid) {
  return std::all_of(gid.raw.begin(), gid.raw.begin() + 10, [](uint8_t b) { return b == 0; }) &&
         gid.raw[10] == 0xff && gid.raw[11] == 0xff;
}

bool is_link_local(const GidEntry& gid) {
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

std::string gid_text(const GidEntry& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid)) inet_ntop(AF_INET, gid.raw.data() + 12, text, sizeof text);
  else inet_ntop(AF_INET6, gid.raw.data(), text, sizeof text);
  return text;
}

std::vector<GidEntry> rank_gids(std::vector<GidEntry> table, int wanted) {
  std::erase_if(table, [wanted](const GidEntry& gid) {
    return is_empty(gid) || gid.kind == kGidRoce1 || (wanted >= 0 && gid.index != wanted);
  });
  std::stable_sort(table.begin(), table.end(), [](const GidEntry& a, const GidEntry& b) {
    return rank_of(a) < rank_of(b);
  });
  if (table.size() > kGidsMax) table.resize(kGidsMax);
  return table;
}

bool choose_gids(std::span<const GidEntry> ours, std::span<const GidEntry> theirs, GidPair* out,
                 std::string* why) {
  using Score = std::tuple<int, bool, int>;  // rank (less is better), two VLANs, -common bits
  Score best{};
  bool found = false;
  for (size_t i = 0; i < ours.size(); ++i) {
    for (size_t j = 0; j < theirs.size(); ++j) {
      const GidEntry &a = ours[i], &b = theirs[j];
      if (a.kind != b.kind || rank_of(a) != rank_of(b)) continue;
      const Score score{rank_of(a), a.vlan != b.vlan, -common_bits(a, b)};
      if (found && best <= score) continue;
      found = true;
      best = score;
      *out = {i, j};
    }
  }
  if (!found) {
    *why = ours.empty()     ? "our port has no usable GID (an address on its network interface)"
           : theirs.empty() ? "the peer's port has no usable GID (an address on its interface)"
                            : "no two GIDs are of one kind: ours is " + gid_text(ours[0]) +
                                  ", the peer's " + gid_text(theirs[0]);
  }
  return found;
}

uint64_t part_bytes(size_t rails) { return rails > 1 ? kStripe : kWorkMax; }

int pick_rail(std::span<const RailView> rails, uint64_t length, int memory_node) {
  int best = -1;
  uint64_t best_cost = 0;
  for (size_t i = 0; i < rails.size(); ++i) {
    const RailView& rail = rails[i];
    if (!rail.ready || rail.outstanding_count >= kRailCountMax) continue;
    if (rail.outstanding_bytes > 0 && rail.outstanding_bytes + length > kRailBytesMax) continue;
    const bool far = memory_node >= 0 && rail.numa_node >= 0 && memory_node != rail.numa_node;
    const uint64_t cost = rail.outstanding_bytes + (far ? kOtherNodeBytes : 0);
    if (best >= 0 && best_cost <= cost) continue;
    best = static_cast<int>(i);
    best_cost = cost;
  }
  return best;
}

uint64_t Backoff::pause_ms() const {
  if (breaks_ <= 1) return breaks_ == 0 ? 0 : kFirstMs;
  const uint32_t doublings = std::min<uint32_t>(breaks_ - 1, 16);
  return std::min(kFirstMs << doublings, kLastMs);
}

std::vector<Range> split_range(Range range, uint64_t limit_bytes) {
  if (limit_bytes == 0 || range.nbytes <= limit_bytes) return {range};
  const uint64_t step = std::max(kPage, limit_bytes / kPage * kPage);
  std::vector<Range> cuts;
  for (uint64_t at = range.address, end = range.address + range.nbytes; at < end;) {
    // Cuts lie on page boundaries, so that no page is registered twice.
    const uint64_t next = std::min(end, (at + step) / kPage * kPage);
    cuts.push_back({at, next - at});
    at = next;
  }
  return cuts;
}

std::string locked_memory_words(uint64_t needed_bytes, uint64_t limit_bytes, uint64_t locked_bytes) {
  return "the limit of locked memory (RLIMIT_MEMLOCK, ulimit -l) is " +
         std::to_string(limit_bytes / 1024) + " KiB, of which " +
         std::to_string(locked_bytes / 1024) + " KiB are in use; " +
         std::to_string((needed_bytes + 1023) / 1024) +
         " KiB more are needed. Remedy: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd "
         "unit, --ulimit memlock=-1 for a container";
}

DeviceMemoryWay plan_device_memory(const DeviceMemoryFacts& facts, std::string* reason) {
  if (facts.exporter && facts.verbs_have_dmabuf && facts.device_takes_dmabuf) {
    *reason = "by dmabuf";
    return DeviceMemoryWay::kDmabuf;
  }
  if (facts.peer_module) {
    *reason = "by the peer memory module of the GPU's driver";
    return DeviceMemoryWay::kPeerMemory;
  }
  *reason = !facts.exporter
                ? "no dmabuf descriptor was given for the memory, and no peer memory module "
                  "(nvidia_peermem) is loaded"
            : !facts.verbs_have_dmabuf
                ? "libibverbs is older than ibv_reg_dmabuf_mr (rdma-core 34), and no peer memory "
                  "module is loaded"
                : "the device does not take dmabuf memory, and no peer memory module is loaded";
  return DeviceMemoryWay::kRefused;
}

}  // namespace mc::rdma
