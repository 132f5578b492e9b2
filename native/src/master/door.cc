// The master's quick answers. Contract: native/abi/door.h; what is known: keys.h, and of what
// is not complete in the catalog key_index.h; the messages: call.h.
//
//   message --of the two, and plain--> keys of the catalog, and mirror --> reply
//                                                 └ commit: log, for the owner of the catalog
//
// It stands on the C ABI of the engine and adds no thread: whoever calls mc_door_serve works.

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <unordered_map>
#include <vector>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/status.h"
#include "master/call.h"
#include "master/key_index.h"
#include "master/keys.h"

namespace {

constexpr uint64_t kLogCommits = 1024;  // then the owner takes them
constexpr uint64_t kLogTextBytes = 256 << 10;

struct Secret {
  uint8_t bytes[16];
};

struct Reservation {
  Secret tenant;
  uint64_t expires_ms;
};

Secret secret_of(const Secret& parent, const uint8_t* name, uint64_t nbytes) {
  Secret secret;
  mc_digest(name, &nbytes, 1, parent.bytes, secret.bytes);
  return secret;
}

mc::KeyDigest digest_of(const Secret& tenant, const uint8_t* key, uint64_t nbytes) {
  uint8_t digest[16];
  mc_digest(key, &nbytes, 1, tenant.bytes, digest);
  mc::KeyDigest out;
  std::memcpy(&out.low, digest, sizeof out.low);
  std::memcpy(&out.high, digest + sizeof out.low, sizeof out.high);
  out.high &= ~uint64_t{3};
  return out;
}

// For so many more, so that adding them cannot fail.
template <typename T>
void make_room(std::vector<T>* rows, uint64_t count) {
  const uint64_t wanted = rows->size() + count;
  if (wanted > rows->capacity()) rows->reserve(std::max<uint64_t>(wanted, 2 * rows->capacity()));
}

}  // namespace

struct mc_door {
  mc_engine* engine = nullptr;
  mc_door_kinds kinds{};
  Secret secret{};
  const mc::KeyTable* complete = nullptr;
  mc::KeyIndex index;  // being written, or promised: what `complete` does not know
  std::unordered_map<uint64_t, Reservation> reservations;  // by generation
  std::vector<mc_door_commit> log;
  std::vector<uint8_t> text;
  uint64_t log_at_ms = 0;
  uint64_t term = 0;
  int64_t clock_ns = 0;  // CLOCK_MONOTONIC at `clock_ms`
  uint64_t clock_ms = 0;
  mc_door_counts counts{};

  mc::CallLimits limits() const { return {kinds.keys_max, kinds.key_max_bytes, kinds.tenant_max_bytes}; }

  uint64_t now_ms() const {
    return clock_ms + static_cast<uint64_t>((mc::now_ns() - clock_ns) / 1'000'000);
  }

  std::vector<mc::KeyDigest> digests(const mc::PlainCall& call, const Secret& tenant) const {
    std::vector<mc::KeyDigest> found;
    found.reserve(call.keys.size());
    for (const mc::Text& key : call.keys) {
      found.push_back(digest_of(tenant, key.data, key.nbytes));
      index.prefetch(found.back());
    }
    return found;
  }

  // False: it is not answered, and nothing has changed.
  bool handle(const mc_message& message, uint32_t may) {
    if (message.correlation == 0) return false;
    try {
      std::vector<uint8_t> reply;
      if (message.kind == kinds.exists && (may & MC_DOOR_EXISTS) != 0) {
        if (!exists(message, &reply)) return false;
        counts.exists_calls++;
      } else if (message.kind == kinds.commit && (may & MC_DOOR_COMMIT) != 0) {
        if (!commit(message, &reply)) return false;
        counts.commit_calls++;
      } else {
        return false;
      }
      counts.received_bytes += message.nbytes;
      counts.sent_bytes += reply.size();
      const auto nbytes = static_cast<uint32_t>(reply.size());
      (void)mc_message_reply(engine, &message, reply.data(), nbytes);  // or its sender is gone
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  bool exists(const mc_message& message, std::vector<uint8_t>* reply) {
    mc::PlainCall call;
    if (!mc::read_exists(message.data, message.nbytes, limits(), &call)) return false;
    std::vector<uint8_t> present = stored(call);
    for (uint64_t i = 0; call.flag && i < present.size(); i++) {
      if (present[i] == 0) present.resize(i + 1);
    }
    mc::write_reply(term, present, reply);
    return true;
  }

  // One byte a key: is it complete, or promised?
  std::vector<uint8_t> stored(const mc::PlainCall& call) const {
    const uint64_t count = call.keys.size();
    std::vector<uint8_t> present(count);
    const auto* const name = reinterpret_cast<const char*>(call.tenant.data);
    const int32_t number = complete->tenant_of({name, call.tenant.nbytes});
    if (number != mc::KeyTable::kMissing) {
      std::vector<int32_t> slots(count);
      complete->find_many(static_cast<uint16_t>(number), call.keys.data(), count, slots.data());
      for (uint64_t i = 0; i < count; i++) present[i] = slots[i] != mc::KeyTable::kMissing;
    }
    if (log.empty()) return present;  // nothing is promised
    const Secret tenant = secret_of(secret, call.tenant.data, call.tenant.nbytes);
    const std::vector<mc::KeyDigest> keys = digests(call, tenant);
    for (uint64_t i = 0; i < count; i++) present[i] |= index.find(keys[i]) == MC_DOOR_COMPLETE;
    return present;
  }

  bool commit(const mc_message& message, std::vector<uint8_t>* reply) {
    mc::PlainCall call;
    if (!mc::read_put_end(message.data, message.nbytes, limits(), &call)) return false;
    const Secret tenant = secret_of(secret, call.tenant.data, call.tenant.nbytes);
    const uint64_t count = call.keys.size(), now = now_ms();
    const std::vector<mc::KeyDigest> keys = digests(call, tenant);
    const std::vector<uint8_t> present = stored(call);
    uint64_t text_nbytes = 0;
    for (uint64_t i = 0; i < count; i++) {
      const auto found = reservations.find(call.generations[i]);
      if (found == reservations.end() || found->second.expires_ms <= now) return false;
      const Secret& owner = found->second.tenant;
      if (std::memcmp(owner.bytes, tenant.bytes, sizeof owner.bytes) != 0) return false;
      if (present[i] != 0 || index.find(keys[i]) != MC_DOOR_ABSENT) return false;
      text_nbytes += call.tenant.nbytes + call.keys[i].nbytes;
    }
    mc::write_reply(term, std::vector<uint8_t>(count, 0), reply);
    make_room(&log, count);
    make_room(&text, text_nbytes);
    if (!take(call, keys)) return false;
    if (log.empty()) log_at_ms = now;
    for (uint64_t i = 0; i < count; i++) {
      const mc::Text& key = call.keys[i];
      log.push_back({call.generations[i], text.size(), static_cast<uint32_t>(call.tenant.nbytes),
                     static_cast<uint32_t>(key.nbytes)});
      text.insert(text.end(), call.tenant.data, call.tenant.data + call.tenant.nbytes);
      text.insert(text.end(), key.data, key.data + key.nbytes);
      reservations.erase(call.generations[i]);
    }
    return true;
  }

  // Enter the keys, all or none. None: one of them, or a generation, is there twice.
  bool take(const mc::PlainCall& call, const std::vector<mc::KeyDigest>& keys) {
    std::vector<uint64_t> sorted(call.generations);
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return false;
    uint64_t done = 0;
    bool good = true;
    try {
      for (; good && done < keys.size(); done += good) {
        good = index.find(keys[done]) == MC_DOOR_ABSENT;
        if (good) index.set(keys[done], MC_DOOR_COMPLETE);
      }
    } catch (const std::bad_alloc&) {
      good = false;
    }
    for (; !good && done > 0; done--) index.erase(keys[done - 1]);
    return good;
  }

  bool full() const { return log.size() >= kLogCommits || text.size() >= kLogTextBytes; }
};

extern "C" {

int32_t mc_door_open(mc_engine* engine, mc_keys* keys, const mc_door_kinds* kinds,
                     const uint8_t* secret, mc_door** out) {
  if (engine == nullptr || keys == nullptr || kinds == nullptr || secret == nullptr || out == nullptr) {
    return mc::fail(MC_E_USAGE, "engine, keys, kinds, secret or out is null");
  }
  auto* door = new (std::nothrow) mc_door;
  if (door == nullptr) return mc::fail(MC_E_OUT_OF_SPACE, "no memory");
  door->engine = engine;
  door->complete = &keys->table;
  door->kinds = *kinds;
  std::memcpy(door->secret.bytes, secret, sizeof door->secret.bytes);
  *out = door;
  return MC_OK;
}

void mc_door_close(mc_door* door) { delete door; }

int32_t mc_door_set(mc_door* door, const uint8_t* tenant, uint64_t tenant_nbytes,
                    const uint8_t* keys, const uint64_t* ends, uint64_t n, const uint8_t* states) try {
  const Secret secret = secret_of(door->secret, tenant, tenant_nbytes);
  uint64_t start = 0;
  for (uint64_t i = 0; i < n; start = ends[i++]) {
    const mc::KeyDigest key = digest_of(secret, keys + start, ends[i] - start);
    if (states[i] == MC_DOOR_ABSENT) door->index.erase(key);
    else door->index.set(key, states[i]);
  }
  return MC_OK;
} catch (const std::bad_alloc&) {
  return mc::fail(MC_E_OUT_OF_SPACE, "no memory for the mirror of keys");
}

int32_t mc_door_reserve(mc_door* door, const uint8_t* tenant, uint64_t tenant_nbytes,
                        const uint64_t* generations, const uint64_t* expires_ms, uint64_t n) try {
  const Secret secret = secret_of(door->secret, tenant, tenant_nbytes);
  for (uint64_t i = 0; i < n; i++) {
    if (expires_ms[i] == 0) door->reservations.erase(generations[i]);
    else door->reservations[generations[i]] = {secret, expires_ms[i]};
  }
  return MC_OK;
} catch (const std::bad_alloc&) {
  return mc::fail(MC_E_OUT_OF_SPACE, "no memory for the mirror of reservations");
}

int32_t mc_door_serve(mc_door* door, uint64_t term, uint64_t now_ms, uint32_t may,
                      uint32_t linger_ms, uint32_t timeout_ms, mc_message* out) {
  door->term = term;
  door->clock_ns = mc::now_ns();
  door->clock_ms = now_ms;
  const mc::Deadline all = mc::Deadline::in_ms(timeout_ms);
  mc::Deadline deadline = all;
  bool lingering = false;
  for (;;) {
    mc_message message{};
    const auto left_ms = static_cast<uint32_t>(deadline.left_ms());
    const int32_t status = mc_message_receive(door->engine, left_ms, &message);
    if (status != MC_OK) return status;
    if (!door->handle(message, may)) {
      *out = message;
      return MC_OK;
    }
    mc_message_free(&message);
    if (!lingering && !door->log.empty()) {
      lingering = true;
      deadline = std::min(all, mc::Deadline::in_ms(linger_ms));
    }
    if (door->full() || deadline.passed()) return MC_E_TIMEOUT;
  }
}

int32_t mc_door_log(mc_door* door, const mc_door_commit** out_commits, uint64_t* out_n,
                    const uint8_t** out_text, uint64_t* out_text_nbytes, uint64_t* out_at_ms) {
  *out_commits = door->log.data();
  *out_n = door->log.size();
  *out_text = door->text.data();
  *out_text_nbytes = door->text.size();
  *out_at_ms = door->log_at_ms;
  return MC_OK;
}

void mc_door_clear(mc_door* door) {
  door->log.clear();
  door->text.clear();
}

void mc_door_count(mc_door* door, mc_door_counts* out) {
  *out = door->counts;
  out->keys = door->index.size();
  out->reservations = door->reservations.size();
}

}  // extern "C"
