// What the rdma transport decides without a device: addresses, rails, back-off, memory. And its
// declarations of libibverbs beside the real header, where there is one.
#include <cstring>

#include "check.h"
#include "transport/rdma/choice.h"
#include "transport/rdma/memory_book.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/verbs.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace real {
namespace v = mc::verbs;
static_assert(sizeof(ibv_context) == sizeof(v::Context));
static_assert(offsetof(ibv_context, ops) == offsetof(v::Context, operations));
static_assert(offsetof(ibv_context, async_fd) == offsetof(v::Context, async_fd));
static_assert(sizeof(ibv_context_ops) == sizeof(v::Operations));
static_assert(offsetof(ibv_context_ops, poll_cq) == offsetof(v::Operations, poll_cq));
static_assert(offsetof(ibv_context_ops, req_notify_cq) == offsetof(v::Operations, request_notice));
static_assert(offsetof(ibv_context_ops, post_send) == offsetof(v::Operations, post_send));
static_assert(sizeof(ibv_device_attr) == sizeof(v::DeviceAttr));
static_assert(offsetof(ibv_device_attr, max_mr_size) == offsetof(v::DeviceAttr, max_mr_size));
static_assert(offsetof(ibv_device_attr, max_cqe) == offsetof(v::DeviceAttr, max_cqe));
static_assert(offsetof(ibv_device_attr, max_qp_init_rd_atom) ==
              offsetof(v::DeviceAttr, max_qp_init_rd_atom));
static_assert(offsetof(ibv_port_attr, active_mtu) == offsetof(v::PortAttr, active_mtu));
static_assert(offsetof(ibv_port_attr, link_layer) == offsetof(v::PortAttr, link_layer));
static_assert(sizeof(ibv_port_attr) <= sizeof(v::PortAttr));
static_assert(offsetof(ibv_mr, rkey) == offsetof(v::Mr, rkey));
static_assert(offsetof(ibv_comp_channel, fd) == offsetof(v::Channel, fd));
static_assert(offsetof(ibv_qp, qp_num) == offsetof(v::Qp, number));
static_assert(sizeof(ibv_qp_init_attr) == sizeof(v::QpInit));
static_assert(offsetof(ibv_qp_init_attr, qp_type) == offsetof(v::QpInit, type));
static_assert(sizeof(ibv_qp_attr) == sizeof(v::QpAttr));
static_assert(offsetof(ibv_qp_attr, dest_qp_num) == offsetof(v::QpAttr, peer_number));
static_assert(offsetof(ibv_qp_attr, ah_attr) == offsetof(v::QpAttr, address));
static_assert(offsetof(ibv_qp_attr, max_dest_rd_atomic) == offsetof(v::QpAttr, max_peer_rd_atomic));
static_assert(offsetof(ibv_qp_attr, timeout) == offsetof(v::QpAttr, timeout));
static_assert(sizeof(ibv_ah_attr) == sizeof(v::AddressVector));
static_assert(offsetof(ibv_ah_attr, port_num) == offsetof(v::AddressVector, port));
static_assert(sizeof(ibv_send_wr) == sizeof(v::SendWr));
static_assert(offsetof(ibv_send_wr, wr.rdma.rkey) == offsetof(v::SendWr, rkey));
static_assert(sizeof(ibv_sge) == sizeof(v::Sge) && sizeof(ibv_wc) == sizeof(v::Wc));
static_assert(offsetof(ibv_wc, qp_num) == offsetof(v::Wc, qp_number));
static_assert(offsetof(ibv_async_event, event_type) == offsetof(v::AsyncEvent, type));
static_assert(IBV_WC_REM_ACCESS_ERR == v::kWcRemoteAccess && IBV_WC_WR_FLUSH_ERR == v::kWcFlushed);
static_assert(IBV_EVENT_PORT_ERR == v::kEventPortError && IBV_WR_RDMA_READ == v::kOpRead);
static_assert(IBV_QP_DEST_QPN == v::kAttrPeerNumber && IBV_QP_AV == v::kAttrAddress);
}  // namespace real
#endif

namespace {

using namespace mc::rdma;

GidEntry gid(std::initializer_list<uint8_t> tail, uint16_t index, uint8_t kind = kGidRoce2,
             uint16_t vlan = 0) {
  GidEntry entry;
  std::copy(tail.begin(), tail.end(), entry.raw.end() - static_cast<ptrdiff_t>(tail.size()));
  entry.index = index;
  entry.kind = kind;
  entry.vlan = vlan;
  return entry;
}

GidEntry ipv4(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint16_t index, uint16_t vlan = 0) {
  return gid({0xff, 0xff, a, b, c, d}, index, kGidRoce2, vlan);
}

GidEntry local(uint8_t last, uint16_t index) {
  GidEntry entry = gid({0, 0, 0, 0, 0, 0, 0, last}, index);
  entry.raw[0] = 0xfe;
  entry.raw[1] = 0x80;
  return entry;
}

GidEntry global(uint8_t last, uint16_t index) {
  GidEntry entry = gid({0, 0, 0, 0, 0, 0, 0, last}, index);
  entry.raw[0] = 0x20;
  return entry;
}

void addresses_are_ranked() {
  GidEntry old = ipv4(10, 0, 0, 1, 2);
  old.kind = kGidRoce1;
  const auto ranked = rank_gids({local(1, 0), GidEntry{}, old, global(1, 3), ipv4(10, 0, 0, 1, 4)}, -1);
  CHECK_EQ(ranked.size(), 3U);
  CHECK_EQ(ranked[0].index, 4);  // RoCE v2 with an IPv4 address, not v1's of the same address
  CHECK_EQ(ranked[1].index, 3);
  CHECK_EQ(ranked[2].index, 0);
  const auto wanted = rank_gids({local(1, 0), ipv4(10, 0, 0, 1, 4)}, 0);
  CHECK_EQ(wanted.size(), 1U);
  CHECK_EQ(wanted[0].index, 0);
  CHECK(rank_gids({old}, 2).empty());
  CHECK(gid_text(ipv4(10, 77, 0, 1, 0)) == "10.77.0.1");
}

void pairs_of_addresses_fit() {
  GidPair pair;
  std::string why;
  const GidEntry ours[] = {ipv4(10, 1, 0, 1, 1), ipv4(10, 2, 0, 1, 2), global(1, 3), local(1, 0)};
  const GidEntry same_net[] = {ipv4(10, 2, 0, 9, 1)};
  CHECK(choose_gids(ours, same_net, &pair, &why));
  CHECK_EQ(ours[pair.ours].index, 2);  // the one in the peer's network
  const GidEntry only_v6[] = {local(2, 0), global(2, 1)};
  CHECK(choose_gids(ours, only_v6, &pair, &why));
  CHECK_EQ(ours[pair.ours].index, 3);
  CHECK_EQ(only_v6[pair.theirs].index, 1);
  const GidEntry tagged[] = {ipv4(10, 1, 0, 2, 1, 7), ipv4(10, 1, 0, 3, 2, 8)};
  const GidEntry on_vlan[] = {ipv4(10, 1, 0, 1, 5, 0), ipv4(10, 1, 0, 1, 6, 8)};
  CHECK(choose_gids(on_vlan, tagged, &pair, &why));
  CHECK_EQ(on_vlan[pair.ours].vlan, 8);  // one VLAN before two
  CHECK_EQ(tagged[pair.theirs].vlan, 8);
  const GidEntry v4[] = {ipv4(10, 1, 0, 1, 1)};
  CHECK(!choose_gids(v4, only_v6, &pair, &why));
  CHECK(why.find("10.1.0.1") != std::string::npos);
  CHECK(!choose_gids({}, only_v6, &pair, &why));
}

// The table of a ConnectX card with a VLAN on its port, as `show_gids` lists it: every address once
// for RoCE v1 and once for v2, and unused entries.
std::vector<GidEntry> table_of_a_card(uint8_t host) {
  std::vector<GidEntry> table;
  const auto both = [&](GidEntry entry) {
    for (const uint8_t kind : {kGidRoce1, kGidRoce2}) {
      entry.kind = kind;
      entry.index = static_cast<uint16_t>(table.size());
      table.push_back(entry);
    }
  };
  both(local(host, 0));
  both(ipv4(192, 168, 1, host, 0));
  both(global(host, 0));
  GidEntry on_vlan = local(host, 0);
  on_vlan.vlan = 100;
  both(on_vlan);
  both(ipv4(10, 100, 0, host, 0, 100));
  table.resize(16);
  return table;
}

void the_tables_of_two_cards_meet() {
  GidPair pair;
  std::string why;
  const auto ours = rank_gids(table_of_a_card(1), -1), theirs = rank_gids(table_of_a_card(2), -1);
  CHECK_EQ(ours.size(), 5U);  // RoCE v2 only
  CHECK(choose_gids(ours, theirs, &pair, &why));
  CHECK_EQ(ours[pair.ours].index, 3);
  CHECK(gid_text(theirs[pair.theirs]) == "192.168.1.2");
  // The peer is in the VLAN alone: our address of that VLAN, not the first one.
  const auto inside = rank_gids(table_of_a_card(2), 9);
  CHECK(choose_gids(ours, inside, &pair, &why));
  CHECK_EQ(ours[pair.ours].index, 9);
  CHECK_EQ(ours[pair.ours].vlan, 100);
  // It has IPv6 alone: the global address before the link-local ones.
  const auto six = rank_gids(table_of_a_card(2), 5);
  CHECK(choose_gids(ours, six, &pair, &why));
  CHECK_EQ(ours[pair.ours].index, 5);
  CHECK(rank_gids(table_of_a_card(1), 2).empty());  // asked for RoCE v1
  CHECK(rank_gids(table_of_a_card(1), 12).empty());  // an unused one
}

void rails_share_the_work() {
  std::vector<RailView> rails(2);
  CHECK_EQ(pick_rail(rails, 4096, -1), -1);  // none is ready
  rails[0].ready = rails[1].ready = true;
  uint64_t carried[2] = {};
  for (int i = 0; i < 32; ++i) {
    const int rail = pick_rail(rails, kStripe, -1);
    CHECK(rail >= 0);
    rails[static_cast<size_t>(rail)].outstanding_bytes += kStripe;
    carried[rail] += kStripe;
  }
  CHECK_EQ(carried[0], carried[1]);
  rails[0].ready = false;  // the other one carries on alone
  CHECK_EQ(pick_rail(rails, 4096, -1), 1);
  rails[1].outstanding_count = kRailCountMax;
  CHECK_EQ(pick_rail(rails, 4096, -1), -1);
  rails = {{true, 0, 0, 0}, {true, 0, 0, 1}};
  CHECK_EQ(pick_rail(rails, 4096, 1), 1);  // the one near the memory
  rails[1].outstanding_bytes = 4 << 20;    // unless it has much to do
  CHECK_EQ(pick_rail(rails, 4096, 1), 0);
  rails = {{true, kRailBytesMax, 1, 0}};
  CHECK_EQ(pick_rail(rails, 1, 0), -1);  // bounded
  CHECK_EQ(part_bytes(1), kWorkMax);
  CHECK_EQ(part_bytes(2), kStripe);
}

void a_path_that_breaks_again_waits_longer_and_goes_down() {
  Backoff backoff;
  CHECK_EQ(backoff.pause_ms(), 0U);
  uint64_t before = 0;
  for (uint32_t i = 0; i < Backoff::kDownAfter; ++i) {
    CHECK(!backoff.down());
    backoff.broke();
    CHECK(backoff.pause_ms() > before);
    before = backoff.pause_ms();
  }
  CHECK(backoff.down());
  for (int i = 0; i < 2000; ++i) backoff.broke();
  CHECK_EQ(backoff.pause_ms(), Backoff::kLastMs);
  backoff.worked();
  CHECK(!backoff.down());
  CHECK_EQ(backoff.pause_ms(), 0U);
}

void large_ranges_are_cut_to_the_limit() {
  const auto whole = split_range({0x1234, 99}, 0);
  CHECK_EQ(whole.size(), 1U);
  const Range range{0x10010, 10 * 4096 + 5};
  const auto cuts = split_range(range, 3 * 4096 + 100);
  uint64_t at = range.address;
  for (const Range& cut : cuts) {
    CHECK_EQ(cut.address, at);
    CHECK(cut.nbytes > 0 && cut.nbytes <= 3 * 4096 + 100);
    at += cut.nbytes;
    CHECK(at % 4096 == 0 || at == range.address + range.nbytes);
  }
  CHECK_EQ(at, range.address + range.nbytes);
}

void words_name_the_limit_and_the_remedy() {
  const std::string words = locked_memory_words(64 << 20, 8 << 20, 1 << 20);
  for (const char* part : {"8192 KiB", "1024 KiB", "65536 KiB", "RLIMIT_MEMLOCK", "ulimit -l unlimited"}) {
    CHECK(words.find(part) != std::string::npos);
  }
}

void memory_of_a_gpu_is_refused_with_the_reason() {
  std::string reason;
  CHECK(plan_device_memory({true, true, false, true}, &reason) == DeviceMemoryWay::kDmabuf);
  CHECK(plan_device_memory({true, true, true, false}, &reason) == DeviceMemoryWay::kPeerMemory);
  CHECK(plan_device_memory({false, false, true, true}, &reason) == DeviceMemoryWay::kPeerMemory);
  CHECK(plan_device_memory({true, false, false, true}, &reason) == DeviceMemoryWay::kRefused);
  CHECK(reason.find("nvidia_peermem") != std::string::npos);
  CHECK(plan_device_memory({false, true, false, true}, &reason) == DeviceMemoryWay::kRefused);
  CHECK(reason.find("ibv_reg_dmabuf_mr") != std::string::npos);
  CHECK(plan_device_memory({true, true, false, false}, &reason) == DeviceMemoryWay::kRefused);
}

void spans_are_found_by_offset() {
  RemoteRegion region;
  region.nbytes = 300;
  region.access = MC_ACCESS_REMOTE_READ;
  region.spans = {{0, 1000, 100, {}}, {200, 5000, 100, {}}};
  CHECK_EQ(region.at(0)->address, 1000U);
  CHECK_EQ(region.at(99)->address, 1000U);
  CHECK(region.at(100) == nullptr);
  CHECK_EQ(region.at(200)->address, 5000U);
  CHECK(region.at(300) == nullptr);
  CHECK(region.allows(MC_ACCESS_REMOTE_READ, 0, 300));
  CHECK(!region.allows(MC_ACCESS_REMOTE_READ, 1, 300));
  CHECK(!region.allows(MC_ACCESS_REMOTE_READ, UINT64_MAX, 1));
  CHECK(!region.allows(MC_ACCESS_REMOTE_WRITE, 0, 1));
}

void staging_gives_back_what_it_took() {
  const Adapters none;
  Staging staging(none);
  uint64_t first = 0, second = 0, third = 0;
  CHECK_EQ(staging.allocate(Staging::kBytes / 2, &first), MC_OK);
  CHECK_EQ(staging.allocate(Staging::kBytes / 2, &second), MC_OK);
  CHECK_EQ(staging.allocate(1, &third), MC_E_BACKPRESSURE);
  staging.free(first, Staging::kBytes / 2);
  CHECK_EQ(staging.allocate(1, &third), MC_OK);
  staging.free(second, Staging::kBytes / 2);
  staging.free(third, 1);
  CHECK_EQ(staging.allocate(Staging::kBytes, &first), MC_OK);  // all of it joined again
  staging.free(first, Staging::kBytes);
}

}  // namespace

int main() {
  addresses_are_ranked();
  pairs_of_addresses_fit();
  the_tables_of_two_cards_meet();
  rails_share_the_work();
  a_path_that_breaks_again_waits_longer_and_goes_down();
  large_ranges_are_cut_to_the_limit();
  words_name_the_limit_and_the_remedy();
  memory_of_a_gpu_is_refused_with_the_reason();
  spans_are_found_by_offset();
  staging_gives_back_what_it_took();
  return 0;
}
