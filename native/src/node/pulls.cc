// The node's side of puts. Contract and layout of the messages: native/abi/pulls.h.
//
//   request --mac, expiry, overlap--> begin (headers unsealed) --engine or inline--> payload
//           --crc--> seal (headers complete) --> reply, one byte a row
//
// It stands on the C ABI of the engine and of the segment's table and adds no thread: whoever calls
// mc_pulls_serve works.

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/status.h"

namespace {

constexpr uint32_t kPullMaxMs = 600'000;  // a client's wish; its grant usually ends earlier
constexpr uint32_t kCodeUsage = -MC_E_USAGE, kCodeExpired = -MC_E_LEASE_EXPIRED;
constexpr uint32_t kCodeAccess = -MC_E_ACCESS, kCodeMemory = -MC_E_OUT_OF_SPACE;
constexpr uint32_t kCodeDraining = -MC_E_DRAINING;
constexpr uint64_t kMacBytes = sizeof(mc_pull_head{}.mac);
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

struct Mount {
  uint64_t segment_id = 0;
  uint8_t secret[16] = {};
  uint8_t name_secret[16] = {};
  bool names = false;
  uint64_t number = 0;  // counts the mounts
};

// The head of a name: mooncake_py/wire/names.py.
#pragma pack(push, 1)
struct NameHead {
  uint8_t version;
  uint8_t flags;
  uint16_t tenant_nbytes;
  uint64_t soft_pin_until_ms;
  uint64_t ttl_until_ms;
  uint64_t generation;
};
#pragma pack(pop)
static_assert(sizeof(NameHead) == 28);

// A request as it lies in its message.
struct Request {
  mc_pull_head head;
  const mc_extent_row* rows;
  const uint64_t* sources;
  const uint8_t* macs;  // of single rows, or null
  const uint8_t* values;
  uint64_t values_nbytes;
  const mc_pull_piece* pieces;
  uint64_t piece_count;  // 0: every value lies in one place

  bool scattered() const { return (head.flags & MC_PULL_PIECES) != 0; }
  mc_pull_names names;
  const uint64_t* key_ends;  // null: there are no names
  const uint8_t* tenant;
  const uint8_t* keys;
  uint64_t keys_nbytes;
};

// `at`: names_nbytes of names, aligned to 8 bytes.
bool parse_names(const uint8_t* at, Request* out) {
  out->key_ends = nullptr;
  const uint64_t nbytes = out->head.names_nbytes, count = out->head.row_count;
  if (nbytes == 0) return true;
  if (nbytes < sizeof out->names) return false;
  std::memcpy(&out->names, at, sizeof out->names);
  const uint64_t rest = nbytes - sizeof out->names;
  if (rest / sizeof(uint64_t) < count) return false;
  const uint64_t text_nbytes = rest - count * sizeof(uint64_t);
  if (text_nbytes < out->names.tenant_nbytes) return false;
  out->key_ends = reinterpret_cast<const uint64_t*>(at + sizeof out->names);
  out->tenant = at + sizeof out->names + count * sizeof(uint64_t);
  out->keys = out->tenant + out->names.tenant_nbytes;
  out->keys_nbytes = text_nbytes - out->names.tenant_nbytes;
  return true;
}

bool parse(const mc_message& message, Request* out) {
  if (message.nbytes < sizeof out->head) return false;
  std::memcpy(&out->head, message.data, sizeof out->head);
  const bool row_macs = (out->head.flags & MC_PULL_ROW_MACS) != 0;
  const uint64_t named = sizeof(mc_extent_row) + sizeof(uint64_t);
  const uint64_t per_row = named + (row_macs ? kMacBytes : 0);
  const uint64_t rest = message.nbytes - sizeof out->head;
  const uint64_t count = out->head.row_count;
  if (rest / per_row < count) return false;
  // A message comes from malloc and the head is a multiple of 8 bytes, so all of this is aligned.
  const uint8_t* at = message.data + sizeof out->head;
  out->rows = reinterpret_cast<const mc_extent_row*>(at);
  out->sources = reinterpret_cast<const uint64_t*>(at + count * sizeof(mc_extent_row));
  out->macs = row_macs ? at + count * named : nullptr;
  const uint64_t left = rest - count * per_row;
  const uint64_t names_nbytes = out->head.names_nbytes;
  if (left < names_nbytes || names_nbytes % sizeof(uint64_t) != 0) return false;
  if (!parse_names(at + count * per_row, out)) return false;
  out->values = at + count * per_row + names_nbytes;
  out->values_nbytes = left - names_nbytes;
  out->pieces = reinterpret_cast<const mc_pull_piece*>(out->values);
  const bool pieces = (out->head.flags & MC_PULL_PIECES) != 0;
  out->piece_count = pieces ? out->values_nbytes / sizeof(mc_pull_piece) : 0;
  return true;
}

bool same_mac(const uint8_t* one, const uint8_t* other) {
  uint8_t differ = 0;  // in constant time: a mac must not be guessed byte by byte
  for (uint64_t i = 0; i < kMacBytes; i++) differ |= one[i] ^ other[i];
  return differ == 0;
}

bool signed_by(const Mount& mount, const Request& request) {
  const uint64_t count = request.head.row_count;
  const uint64_t rows_at_once = request.macs == nullptr ? count : 1;
  std::vector<uint8_t> text(sizeof(uint64_t) + rows_at_once * sizeof(mc_extent_row));
  std::memcpy(text.data(), &request.head.segment_id, sizeof(uint64_t));
  const uint64_t end = text.size();
  uint8_t expected[kMacBytes];
  if (request.macs == nullptr) {
    if (count > 0) {
      std::memcpy(text.data() + sizeof(uint64_t), request.rows, count * sizeof(mc_extent_row));
    }
    mc_digest(text.data(), &end, 1, mount.secret, expected);
    return same_mac(expected, request.head.mac);
  }
  for (uint64_t i = 0; i < count; i++) {
    std::memcpy(text.data() + sizeof(uint64_t), request.rows + i, sizeof(mc_extent_row));
    mc_digest(text.data(), &end, 1, mount.secret, expected);
    if (!same_mac(expected, request.macs + i * kMacBytes)) return false;
  }
  return true;
}

void answer(std::vector<uint8_t>* reply, uint32_t code, const char* cause) {
  reply->resize(sizeof code + std::strlen(cause));
  std::memcpy(reply->data(), &code, sizeof code);
  std::memcpy(reply->data() + sizeof code, cause, std::strlen(cause));
}

}  // namespace

struct mc_pulls {
  mc_engine* engine;
  mc_segment* segment;
  uint64_t base;
  uint32_t kind;
  std::atomic<int64_t> ahead_ms{kForever};
  std::atomic<bool> draining{false};
  std::mutex mutex;
  Mount mount;  // under mutex

  Mount mounted() {
    const std::lock_guard guard(mutex);
    return mount;
  }

  // Never behind the master's clock.
  uint64_t latest_ms() const {
    const int64_t ahead = ahead_ms.load(std::memory_order_acquire);
    if (ahead == kForever) return kForever;
    timespec now{};
    clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<uint64_t>(ahead + int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000);
  }

  void handle(const mc_message& message) {
    if (message.correlation == 0) return;  // nobody waits for it
    std::vector<uint8_t> reply;
    try {
      serve(message, &reply);
    } catch (const std::bad_alloc&) {
      answer(&reply, kCodeMemory, "");  // fits what a vector holds after any serve
    }
    (void)mc_message_reply(engine, &message, reply.data(), static_cast<uint32_t>(reply.size()));
  }

  void serve(const mc_message& message, std::vector<uint8_t>* reply) {
    reply->reserve(256);
    Request request;
    if (!parse(message, &request)) return answer(reply, kCodeUsage, "this is no pull request");
    const Mount now = mounted();
    if (now.segment_id == 0 || draining.load(std::memory_order_acquire)) {
      return answer(reply, kCodeDraining, "this node takes no new objects");
    }
    if (request.head.segment_id != now.segment_id) {
      return answer(reply, kCodeExpired, "the grant is for a segment this node does not have");
    }
    if (!signed_by(now, request)) {
      return answer(reply, kCodeAccess, "the grant was not signed by this node's master");
    }
    const uint32_t count = request.head.row_count;
    std::vector<int32_t> statuses(count, MC_OK);
    mc_segment_begin(segment, request.rows, count, latest_ms(), statuses.data());
    name(now, request, statuses);
    pull(message.peer, request, now.number, &statuses);
    reply->assign(sizeof(uint32_t) + count, 0);
    for (uint32_t i = 0; i < count; i++) {
      (*reply)[sizeof(uint32_t) + i] = static_cast<uint8_t>(-statuses[i]);
    }
  }

  // A name that is not the one the master signed, or for which there is no memory, is not kept:
  // that object cannot be told to a master who has lost it, and nothing else.
  void name(const Mount& now, const Request& request, const std::vector<int32_t>& statuses) {
    if (request.key_ends == nullptr || !now.names) return;
    try {
      const uint64_t time_ms = latest_ms();
      const mc_pull_names& names = request.names;
      const NameHead head{1, static_cast<uint8_t>(names.flags & 1), names.tenant_nbytes,
                          names.soft_pin_ms != 0 ? time_ms + names.soft_pin_ms : 0,
                          names.ttl_ms != 0 ? time_ms + names.ttl_ms : 0, 0};
      std::string common(reinterpret_cast<const char*>(&head), sizeof head);
      common.append(reinterpret_cast<const char*>(request.tenant), names.tenant_nbytes);
      uint8_t secret[16];
      const uint64_t tenant_end = names.tenant_nbytes;
      mc_digest(request.tenant, &tenant_end, 1, now.name_secret, secret);
      std::vector<int32_t> outcome(statuses);
      mc_segment_name(segment, request.rows, statuses.size(),
                      reinterpret_cast<const uint8_t*>(common.data()), common.size(), request.keys,
                      request.keys_nbytes, request.key_ends, secret, outcome.data());
    } catch (const std::bad_alloc&) {
    }
  }

  // Only what was begun here is sealed here: the same grant may be in work in another thread.
  // What was begun is sealed or given up, whatever happens.
  void pull(uint64_t peer, const Request& request, uint64_t mount_number,
            std::vector<int32_t>* statuses) {
    std::vector<uint32_t> begun;
    std::vector<mc_extent_row> rows;
    std::vector<uint64_t> sources;
    std::vector<uint32_t> crcs;
    std::vector<int32_t> outcome;
    std::vector<mc_slice> slices;
    bool memory = true;
    try {
      for (uint32_t i = 0; i < statuses->size(); i++) {
        if ((*statuses)[i] == MC_OK) begun.push_back(i);
      }
      rows.reserve(begun.size());
      sources.reserve(begun.size());
      for (const uint32_t i : begun) {
        rows.push_back(request.rows[i]);
        sources.push_back(request.sources[i]);
      }
      crcs.resize(begun.size());
      outcome.resize(begun.size(), MC_OK);
      if (request.scattered()) scattered(request, rows, sources, &slices, &outcome);
      else if (request.head.region != 0) in_one_place(request.head, rows, sources, &slices);
    } catch (const std::bad_alloc&) {
      memory = false;
    }
    if (!memory) {
      for (uint32_t i = 0; i < statuses->size(); i++) {
        if ((*statuses)[i] == MC_OK) give_up(request.rows[i], &(*statuses)[i]);
      }
      return;
    }
    const uint64_t n = begun.size();
    if (request.head.region == 0 && !request.scattered()) {
      mc_segment_fill(segment, rows.data(), n, request.values, request.values_nbytes,
                      sources.data(), crcs.data(), outcome.data());
    } else {
      fetch(peer, request.head, rows, &slices, &crcs, &outcome);
    }
    {
      const std::lock_guard guard(mutex);  // who mounts anew drops what was sealed before, all of it
      if (mount.number != mount_number) std::fill(outcome.begin(), outcome.end(), MC_E_LEASE_EXPIRED);
      mc_segment_seal(segment, rows.data(), n, crcs.data(), latest_ms(), outcome.data());
    }
    for (uint64_t i = 0; i < n; i++) (*statuses)[begun[i]] = outcome[i];
  }

  void give_up(const mc_extent_row& row, int32_t* status) {
    const uint32_t crc = 0;
    *status = MC_E_OUT_OF_SPACE;
    mc_segment_seal(segment, &row, 1, &crc, latest_ms(), status);
  }

  mc_slice slice_of(uint32_t region, uint64_t offset, uint64_t local, uint64_t length) {
    mc_slice slice{};
    slice.op = MC_OP_READ;
    slice.region = region;
    slice.remote_offset = offset;
    slice.local = local;
    slice.length = length;
    slice.flags = MC_SLICE_CRC;
    return slice;
  }

  uint64_t payload_of(const mc_extent_row& row) const {
    return base + row.offset + MC_EXTENT_HEADER_NBYTES;
  }

  void in_one_place(const mc_pull_head& head, const std::vector<mc_extent_row>& rows,
                    const std::vector<uint64_t>& sources, std::vector<mc_slice>* slices) {
    slices->reserve(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
      slices->push_back(slice_of(head.region, sources[i], payload_of(rows[i]), rows[i].length));
    }
  }

  // A value whose pieces do not make up its length is refused by itself. So is one that would need
  // more slices than the message has pieces: honest values share none, and memory is bounded by that.
  void scattered(const Request& request, const std::vector<mc_extent_row>& rows,
                 const std::vector<uint64_t>& sources, std::vector<mc_slice>* slices,
                 std::vector<int32_t>* outcome) {
    slices->reserve(request.piece_count);
    for (size_t i = 0; i < rows.size(); i++) {
      const size_t before = slices->size();
      uint64_t left = rows[i].length;
      uint64_t at = payload_of(rows[i]);
      for (uint64_t p = sources[i];
           left > 0 && p < request.piece_count && slices->size() < request.piece_count; p++) {
        const mc_pull_piece& piece = request.pieces[p];
        if (piece.length == 0 || piece.length > left) break;
        slices->push_back(slice_of(piece.region, piece.offset, at, piece.length));
        left -= piece.length;
        at += piece.length;
      }
      if (left == 0) continue;
      slices->resize(before);
      (*outcome)[i] = MC_E_USAGE;
    }
  }

  // From the client's memory; crcs and outcome have one entry a row, slices one or several, in the
  // order of the rows.
  void fetch(uint64_t peer, const mc_pull_head& head, const std::vector<mc_extent_row>& rows,
             std::vector<mc_slice>* slices, std::vector<uint32_t>* crcs,
             std::vector<int32_t>* outcome) {
    if (slices->empty()) return;
    const uint32_t timeout_ms = std::clamp<uint32_t>(head.timeout_ms, 1, kPullMaxMs);
    const int32_t status =
        mc_transfer(engine, peer, slices->data(), slices->size(), timeout_ms);
    bool any = false;
    for (const mc_slice& slice : *slices) any |= slice.status != MC_OK;
    size_t next = 0;
    for (size_t i = 0; i < rows.size(); i++) {
      if ((*outcome)[i] != MC_OK) continue;
      uint64_t left = rows[i].length;
      if (left == 0 && (head.flags & MC_PULL_PIECES) != 0) continue;  // no bytes, no pieces, crc 0
      bool first = true;
      do {
        const mc_slice& slice = (*slices)[next++];
        left -= slice.length;
        // Slices of a batch that never started have no status of their own.
        const int32_t mine = any || status == MC_OK ? slice.status : status;
        if (mine != MC_OK) (*outcome)[i] = mine;
        (*crcs)[i] = first ? slice.crc : mc_crc32c_join((*crcs)[i], slice.crc, slice.length);
        first = false;
      } while (left > 0);
    }
  }
};

extern "C" {

int32_t mc_pulls_open(mc_engine* engine, mc_segment* segment, uint64_t base, uint32_t kind,
                      mc_pulls** out) {
  if (engine == nullptr || segment == nullptr || out == nullptr) {
    return mc::fail(MC_E_USAGE, "engine, segment or out is null");
  }
  auto* pulls = new (std::nothrow) mc_pulls;
  if (pulls == nullptr) return mc::fail(MC_E_OUT_OF_SPACE, "no memory");
  pulls->engine = engine;
  pulls->segment = segment;
  pulls->base = base;
  pulls->kind = kind;
  *out = pulls;
  return MC_OK;
}

void mc_pulls_close(mc_pulls* pulls) { delete pulls; }

void mc_pulls_mount(mc_pulls* pulls, uint64_t segment_id, const uint8_t* secret,
                    const uint8_t* name_secret) {
  const std::lock_guard guard(pulls->mutex);
  pulls->mount.segment_id = segment_id;
  std::memset(pulls->mount.secret, 0, sizeof pulls->mount.secret);
  if (secret != nullptr) std::memcpy(pulls->mount.secret, secret, sizeof pulls->mount.secret);
  pulls->mount.names = name_secret != nullptr;
  if (name_secret != nullptr) {
    std::memcpy(pulls->mount.name_secret, name_secret, sizeof pulls->mount.name_secret);
  }
  pulls->mount.number += 1;
}

void mc_pulls_drain(mc_pulls* pulls) { pulls->draining.store(true, std::memory_order_release); }

void mc_pulls_set_time(mc_pulls* pulls, int64_t ahead_ms) {
  pulls->ahead_ms.store(ahead_ms, std::memory_order_release);
}

int32_t mc_pulls_serve(mc_pulls* pulls, uint32_t timeout_ms, mc_message* out) {
  const mc::Deadline deadline = mc::Deadline::in_ms(timeout_ms);
  for (;;) {
    mc_message message{};
    const int32_t status =
        mc_message_receive(pulls->engine, static_cast<uint32_t>(deadline.left_ms()), &message);
    if (status != MC_OK) return status;
    if (message.kind != pulls->kind) {
      *out = message;
      return MC_OK;
    }
    pulls->handle(message);
    mc_message_free(&message);
    if (deadline.passed()) return MC_E_TIMEOUT;
  }
}

}  // extern "C"
