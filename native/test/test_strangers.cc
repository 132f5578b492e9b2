// What daemons read from strangers: pulls at a node, quick calls at a master, the replies of both.
// Valid messages are mutated by a seed and sent; every one of them gets an answer or is handed out,
// nothing outside the segment changes, and the sanitizer builds look at the rest. The set of keys
// behind the quick answers is held against a plain one.
//
// FUZZ_COUNT (default 6000) messages a kind.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "base/random.h"
#include "check.h"
#include "master/call.h"
#include "master/key_index.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr uint32_t kMs = 20'000;
constexpr uint32_t kPull = 64, kExists = 2, kCommit = 5, kStop = 99;
constexpr uint64_t kSegmentBytes = 1 << 20, kGuardBytes = 64 << 10, kSegmentId = 7;
constexpr uint8_t kGuard = 0xC3;

uint64_t fuzz_count() {
  const char* text = std::getenv("FUZZ_COUNT");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 6000;
}

class Dice {
 public:
  explicit Dice(uint64_t seed) : seed_(seed) {}
  uint64_t below(uint64_t n) { return mc::seeded(seed_, next_++) % n; }

 private:
  uint64_t seed_, next_ = 0;
};

// The result lies in memory of exactly its size, so that one byte too far is seen.
Bytes mutated(const Bytes& from, Dice* dice) {
  Bytes out(from);
  for (uint64_t left = 1 + dice->below(4); left > 0; left--) {
    const uint64_t at = out.empty() ? 0 : dice->below(out.size());
    switch (dice->below(5)) {
      case 0:
        if (!out.empty()) out[at] = static_cast<uint8_t>(dice->below(256));
        break;
      case 1:
        if (!out.empty()) out[at] ^= static_cast<uint8_t>(1 << dice->below(8));
        break;
      case 2: out.resize(at); break;
      case 3: out.insert(out.begin() + static_cast<int64_t>(at), 1 + dice->below(9), 0xFF); break;
      default:
        if (out.size() >= 8 && at + 8 <= out.size()) {
          const uint64_t number = uint64_t{1} << dice->below(64);
          std::memcpy(out.data() + at, &number, sizeof number);
        }
    }
  }
  out.shrink_to_fit();
  return out;
}

void append(Bytes* to, const void* bytes, uint64_t nbytes) {
  const size_t before = to->size();
  to->resize(before + nbytes);
  if (nbytes > 0) std::memcpy(to->data() + before, bytes, nbytes);
}

mc_engine* open_engine() {
  mc_engine_options options{};
  options.struct_size = sizeof options;
  options.transports = MC_TRANSPORT_TCP;
  options.listen = "127.0.0.1:0";
  mc_engine* engine = nullptr;
  CHECK_EQ(mc_engine_open(&options, &engine), MC_OK);
  return engine;
}

uint64_t connect(mc_engine* engine, mc_engine* to) {
  char address[256];
  CHECK_EQ(mc_engine_address(to, address, sizeof address), MC_OK);
  uint64_t peer = 0;
  CHECK_EQ(mc_peer_open(engine, address, kMs, &peer), MC_OK);
  return peer;
}

// ---- the set of keys

void check_key_index() {
  mc::KeyIndex index;
  std::map<uint64_t, uint32_t> model;
  Dice dice(1);
  for (int step = 0; step < 200'000; step++) {
    // Few homes, at both ends: runs are long and go round the end.
    const uint64_t number = dice.below(step < 100'000 ? 300 : 3000);
    const uint64_t low = (number % 5 == 0 ? ~uint64_t{0} - number : number << 52);
    const mc::KeyDigest key{low, number << 2};
    if (dice.below(3) == 0) {
      index.erase(key);
      model.erase(number);
    } else {
      const auto state = static_cast<uint32_t>(1 + dice.below(3));
      index.set(key, state);
      model[number] = state;
    }
    const uint64_t other = dice.below(3000);
    const uint64_t other_low = (other % 5 == 0 ? ~uint64_t{0} - other : other << 52);
    const auto found = model.find(other);
    CHECK_EQ(index.find({other_low, other << 2}), found == model.end() ? 0 : found->second);
    CHECK_EQ(index.size(), model.size());
  }
}

// ---- quick calls

Bytes exists_request() {
  Bytes out{0x0A, 1, 't'};
  for (char key = 'a'; key < 'f'; key++) {
    append(&out, "\x12\x03", 2);
    append(&out, std::string(3, key).data(), 3);
  }
  append(&out, "\x18\x01", 2);
  return out;
}

Bytes commit_request() {
  Bytes out{0x0A, 1, 't', 0x12, 1, 'a', 0x12, 1, 'b', 0x1A, 4, 0x81, 0x80, 1, 2, 0x28, 1};
  return out;
}

void check_plain_calls() {
  const mc::CallLimits limits{8, 16, 4};
  mc::PlainCall exists, commit;
  const Bytes one = exists_request(), two = commit_request();
  CHECK(mc::read_exists(one.data(), one.size(), limits, &exists));
  CHECK_EQ(exists.keys.size(), 5u);
  CHECK(exists.flag);
  CHECK(mc::read_put_end(two.data(), two.size(), limits, &commit));
  CHECK_EQ(commit.generations[0], 16385u);
  CHECK_EQ(commit.generations[1], 2u);
  Dice dice(2);
  for (uint64_t i = 0; i < 20 * fuzz_count(); i++) {
    const Bytes strange = mutated(i % 2 == 0 ? one : two, &dice);
    mc::PlainCall call;
    const bool good = i % 2 == 0 ? mc::read_exists(strange.data(), strange.size(), limits, &call)
                                 : mc::read_put_end(strange.data(), strange.size(), limits, &call);
    if (!good) continue;
    CHECK(call.keys.size() <= limits.keys_max);
    for (const mc::Text& key : call.keys) {
      CHECK(key.nbytes > 0 && key.nbytes <= limits.key_max_bytes);
      CHECK(key.data >= strange.data() && key.data + key.nbytes <= strange.data() + strange.size());
    }
  }
}

// Serves until a message of kind kStop comes; what is handed out is answered with nothing.
void serve_door(mc_engine* engine, mc_door* door) {
  for (;;) {
    mc_message message{};
    const uint32_t may = MC_DOOR_EXISTS | MC_DOOR_COMMIT;
    const int32_t status = mc_door_serve(door, 3, 1'000, may, 1, kMs, &message);
    mc_door_clear(door);
    if (status == MC_E_TIMEOUT) continue;
    CHECK_EQ(status, MC_OK);
    const bool last = message.kind == kStop;
    if (message.correlation != 0) (void)mc_message_reply(engine, &message, "", 0);
    mc_message_free(&message);
    if (last) return;
  }
}

void check_door() {
  mc_engine* const server = open_engine();
  mc_engine* const client = open_engine();
  const mc_door_kinds kinds{kExists, kCommit, 8, 16, 4, 0};
  const uint8_t secret[16] = {1};
  const auto* tenant = reinterpret_cast<const uint8_t*>("t");
  mc_keys* keys = nullptr;  // aaa is complete, bbb is being written
  CHECK_EQ(mc_keys_open(16, &keys), MC_OK);
  CHECK_EQ(mc_keys_name_tenant(keys, 0, tenant, 1), MC_OK);
  CHECK_EQ(mc_keys_set(keys, 0, 0, reinterpret_cast<const uint8_t*>("aaa"), 3), MC_OK);
  CHECK(mc_keys_enter(keys, 0) >= 0);
  mc_door* door = nullptr;
  CHECK_EQ(mc_door_open(server, keys, &kinds, secret, &door), MC_OK);
  const uint64_t end = 3;
  const uint8_t state = MC_DOOR_WRITING;
  CHECK_EQ(mc_door_set(door, tenant, 1, reinterpret_cast<const uint8_t*>("bbb"), &end, 1, &state),
           MC_OK);
  std::vector<uint64_t> generations, expires;
  for (uint64_t i = 0; i < 300; i++) {
    generations.push_back(i);
    expires.push_back(1'000'000);
  }
  CHECK_EQ(mc_door_reserve(door, tenant, 1, generations.data(), expires.data(), 300), MC_OK);
  std::thread thread([&] { serve_door(server, door); });
  const uint64_t peer = connect(client, server);
  Dice dice(3);
  for (uint64_t i = 0; i < fuzz_count(); i++) {
    const Bytes good = i % 2 == 0 ? exists_request() : commit_request();
    const Bytes bytes = i < 2 ? good : mutated(good, &dice);
    mc_message reply{};
    CHECK_EQ(mc_message_request(client, peer, i % 2 == 0 ? kExists : kCommit, bytes.data(),
                                static_cast<uint32_t>(bytes.size()), kMs, &reply),
             MC_OK);
    if (i == 0) CHECK_EQ(reply.nbytes, 4 + 2 + 2u);  // term 3; 1 for aaa, 0 for bbb and no further
    mc_message_free(&reply);
  }
  CHECK_EQ(mc_message_send(client, peer, kStop, "", 0, kMs), MC_OK);
  thread.join();
  mc_door_counts counts{};
  mc_door_count(door, &counts);
  CHECK(counts.exists_calls > 0);
  mc_door_close(door);
  mc_keys_close(keys);
  mc_engine_close(client);
  mc_engine_close(server);
}

// ---- pulls

struct PullParts {
  std::vector<mc_extent_row> rows;
  std::vector<uint64_t> sources;
  bool row_macs = false, pieces = false;
};

Bytes pull_request(const PullParts& parts, const uint8_t* secret, uint32_t region) {
  mc_pull_head head{};
  head.segment_id = kSegmentId;
  head.row_count = static_cast<uint32_t>(parts.rows.size());
  head.region = region;
  head.timeout_ms = 200;
  head.flags = (parts.row_macs ? MC_PULL_ROW_MACS : 0) | (parts.pieces ? MC_PULL_PIECES : 0);
  Bytes text, macs;
  append(&text, &kSegmentId, sizeof kSegmentId);
  for (const mc_extent_row& row : parts.rows) {
    append(&text, &row, sizeof row);
    Bytes one;
    append(&one, &kSegmentId, sizeof kSegmentId);
    append(&one, &row, sizeof row);
    uint8_t mac[16];
    const uint64_t end = one.size();
    mc_digest(one.data(), &end, 1, secret, mac);
    append(&macs, mac, sizeof mac);
  }
  const uint64_t end = text.size();
  mc_digest(text.data(), &end, 1, secret, head.mac);
  mc_pull_names names{0, 0, 1, 0, 0};
  Bytes named;
  append(&named, &names, sizeof names);
  for (uint64_t i = 1; i <= parts.rows.size(); i++) append(&named, &i, sizeof i);
  append(&named, "t", 1);
  named.resize(named.size() + parts.rows.size(), 'k');
  named.resize((named.size() + 7) / 8 * 8);
  head.names_nbytes = static_cast<uint32_t>(named.size());
  Bytes out;
  append(&out, &head, sizeof head);
  append(&out, parts.rows.data(), parts.rows.size() * sizeof(mc_extent_row));
  append(&out, parts.sources.data(), parts.sources.size() * sizeof(uint64_t));
  if (parts.row_macs) append(&out, macs.data(), macs.size());
  append(&out, named.data(), named.size());
  if (parts.pieces) {
    for (uint32_t i = 0; i < 4; i++) {
      const mc_pull_piece piece{i * 100, 50, region, 0};
      append(&out, &piece, sizeof piece);
    }
  } else if (region == 0) {
    out.resize(out.size() + 400, 0x5A);
  }
  return out;
}

void serve_pulls(mc_engine* engine, mc_pulls* pulls) {
  for (;;) {
    mc_message message{};
    const int32_t status = mc_pulls_serve(pulls, kMs, &message);
    if (status == MC_E_TIMEOUT) continue;
    if (status == MC_E_CANCELLED) return;
    CHECK_EQ(status, MC_OK);
    if (message.correlation != 0) (void)mc_message_reply(engine, &message, "", 0);
    mc_message_free(&message);
  }
}

// All rows name the same pieces: few bytes of message must not become many slices at the node.
void check_shared_pieces(mc_engine* client, uint64_t peer, const uint8_t* secret, uint32_t region) {
  PullParts parts;
  parts.pieces = true;
  for (uint64_t i = 0; i < 200; i++) {
    mc_extent_row row{};
    row.offset = i * 4096;
    row.length = 200;  // the four pieces
    row.generation = i + 1;
    row.expires_ms = ~uint64_t{0} >> 2;
    parts.rows.push_back(row);
    parts.sources.push_back(0);
  }
  const Bytes bytes = pull_request(parts, secret, region);
  mc_message reply{};
  CHECK_EQ(mc_message_request(client, peer, kPull, bytes.data(),
                              static_cast<uint32_t>(bytes.size()), kMs, &reply),
           MC_OK);
  CHECK_EQ(reply.nbytes, 4 + 200u);
  CHECK_EQ(reply.data[4], 0);  // the first one has them
  for (uint32_t i = 1; i < 200; i++) CHECK_EQ(reply.data[4 + i], -MC_E_USAGE);
  mc_message_free(&reply);
}

void check_pulls() {
  mc_engine* const server = open_engine();
  mc_engine* const client = open_engine();
  Bytes memory(kSegmentBytes + 2 * kGuardBytes + 64, kGuard);
  const uint64_t base =
      (reinterpret_cast<uint64_t>(memory.data()) + kGuardBytes + 63) / 64 * 64;
  std::memset(reinterpret_cast<void*>(base), 0, kSegmentBytes);
  mc_segment* segment = nullptr;
  CHECK_EQ(mc_segment_open(base, kSegmentBytes, &segment), MC_OK);
  mc_pulls* pulls = nullptr;
  CHECK_EQ(mc_pulls_open(server, segment, base, kPull, &pulls), MC_OK);
  const uint8_t secret[16] = {9}, name_secret[16] = {8};
  mc_pulls_mount(pulls, kSegmentId, secret, name_secret);
  mc_pulls_set_time(pulls, 0);
  std::thread one([&] { serve_pulls(server, pulls); });
  std::thread two([&] { serve_pulls(server, pulls); });
  const uint64_t peer = connect(client, server);
  Bytes values(4096, 0x77);
  const mc_piece piece{reinterpret_cast<uint64_t>(values.data()), values.size()};
  uint32_t region = 0;
  CHECK_EQ(mc_region_register(client, &piece, 1, MC_ACCESS_REMOTE_READ, -1, &region), MC_OK);
  check_shared_pieces(client, peer, secret, region);
  Dice dice(4);
  uint64_t generation = 1'000, sealed = 0;
  for (uint64_t i = 0; i < fuzz_count(); i++) {
    PullParts parts;
    parts.row_macs = dice.below(2) == 0;
    parts.pieces = dice.below(3) == 0;
    for (uint64_t row = 0, count = 1 + dice.below(3); row < count; row++) {
      mc_extent_row extent{};
      // Signed rows that no master would sign, too.
      extent.offset = dice.below(8) == 0 ? dice.below(2 * kSegmentBytes)
                                         : dice.below(kSegmentBytes / 4096) * 4096;
      extent.length = dice.below(8) == 0 ? dice.below(2 * kSegmentBytes) : 100;
      extent.generation = generation++;
      extent.expires_ms = dice.below(16) == 0 ? 1 : ~uint64_t{0} >> 2;
      parts.rows.push_back(extent);
      parts.sources.push_back(parts.pieces ? 2 * (row % 2) : row * 100);
    }
    const bool inline_values = !parts.pieces && dice.below(2) == 0;
    const Bytes good = pull_request(parts, secret, inline_values ? 0 : region);
    // What follows the mac can be changed by anybody; so can the rest, which is refused then.
    const Bytes bytes = dice.below(3) == 0 ? good : mutated(good, &dice);
    mc_message reply{};
    CHECK_EQ(mc_message_request(client, peer, kPull, bytes.data(),
                                static_cast<uint32_t>(bytes.size()), kMs, &reply),
             MC_OK);
    CHECK(reply.nbytes >= sizeof(uint32_t));
    uint32_t code = 1;
    std::memcpy(&code, reply.data, sizeof code);
    for (uint32_t at = sizeof code; code == 0 && at < reply.nbytes; at++) sealed += reply.data[at] == 0;
    mc_message_free(&reply);
  }
  CHECK(sealed > fuzz_count() / 10);
  mc_segment_stats stats{};
  CHECK_EQ(mc_segment_stat(segment, &stats), MC_OK);
  CHECK_EQ(stats.writing_count, 0u);  // nothing that was begun stays begun
  mc_engine_shutdown(server);
  one.join();
  two.join();
  for (uint64_t i = 0; i < kGuardBytes; i++) {
    CHECK_EQ(*(reinterpret_cast<const uint8_t*>(base) - 1 - i), kGuard);
    CHECK_EQ(*(reinterpret_cast<const uint8_t*>(base) + kSegmentBytes + i), kGuard);
  }
  mc_pulls_close(pulls);
  mc_segment_close(segment);
  mc_engine_close(client);
  mc_engine_close(server);
}

}  // namespace

int main() {
  check_key_index();
  check_plain_calls();
  check_door();
  check_pulls();
  return 0;
}
