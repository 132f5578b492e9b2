// The C ABI of the key table: native/abi/keys.h.
#include <new>

#include "base/abi.h"
#include "base/status.h"
#include "master/keys.h"

namespace {

static_assert(sizeof(mc_text) == sizeof(mc::Text));

int32_t no_memory() { return mc::fail(MC_E_OUT_OF_SPACE, "no memory for the keys of objects"); }

}  // namespace

extern "C" {

int32_t mc_keys_open(uint64_t capacity, mc_keys** out) try {
  if (out == nullptr || capacity == 0 || capacity >= uint64_t{1} << 31) {
    return mc::fail(MC_E_USAGE, "out is null, or there are no slots or more than 2^31");
  }
  *out = new mc_keys{mc::KeyTable(capacity)};
  return MC_OK;
} catch (const std::bad_alloc&) {
  return no_memory();
}

void mc_keys_close(mc_keys* keys) { delete keys; }

int32_t mc_keys_name_tenant(mc_keys* keys, uint16_t tenant, const uint8_t* name,
                            uint64_t nbytes) try {
  keys->table.name_tenant(tenant, {reinterpret_cast<const char*>(name), nbytes});
  return MC_OK;
} catch (const std::bad_alloc&) {
  return no_memory();
}

void mc_keys_forget_tenant(mc_keys* keys, uint16_t tenant) { keys->table.forget_tenant(tenant); }

int32_t mc_keys_set(mc_keys* keys, uint32_t slot, uint16_t tenant, const uint8_t* key,
                    uint64_t nbytes) try {
  if (slot >= keys->table.capacity() || nbytes > mc::KeyText::kTextMax) {
    return mc::fail(MC_E_USAGE, "no such slot, or a key of %llu bytes",
                    static_cast<unsigned long long>(nbytes));
  }
  if (keys->table.text(slot) != nullptr) return mc::fail(MC_E_USAGE, "slot %u has a key", slot);
  keys->table.set(slot, tenant, {key, nbytes});
  return MC_OK;
} catch (const std::bad_alloc&) {
  return no_memory();
}

int32_t mc_keys_clear(mc_keys* keys, uint32_t slot) {
  if (slot >= keys->table.capacity() || keys->table.text(slot) == nullptr) return 0;
  keys->table.clear(slot);
  return 1;
}

int32_t mc_keys_enter(mc_keys* keys, uint32_t slot) try {
  if (slot >= keys->table.capacity() || keys->table.text(slot) == nullptr) {
    return mc::fail(MC_E_USAGE, "slot %u has no key", slot);
  }
  return keys->table.enter(slot) ? 1 : 0;
} catch (const std::bad_alloc&) {
  return no_memory();
}

int32_t mc_keys_leave(mc_keys* keys, uint32_t slot) {
  if (slot >= keys->table.capacity() || keys->table.text(slot) == nullptr) return 0;
  return keys->table.leave(slot) ? 1 : 0;
}

int32_t mc_keys_find(mc_keys* keys, uint16_t tenant, const uint8_t* key, uint64_t nbytes) {
  return keys->table.find(tenant, {key, nbytes});
}

void mc_keys_find_many(mc_keys* keys, uint16_t tenant, const mc_text* texts, uint64_t n,
                       int32_t* slots) {
  keys->table.find_many(tenant, reinterpret_cast<const mc::Text*>(texts), n, slots);
}

int32_t mc_keys_text(mc_keys* keys, uint32_t slot, const uint8_t** out) {
  const mc::KeyText::Record* record = nullptr;
  if (slot < keys->table.capacity()) record = keys->table.text(slot);
  if (record == nullptr) return -1;
  *out = record->text;
  return record->nbytes;
}

const uint32_t* mc_keys_names(mc_keys* keys) { return keys->table.names(); }

void mc_links_move(uint32_t* next, uint32_t* previous, const int64_t* slots, uint64_t n,
                   uint32_t head) {
  for (uint64_t i = 0; i < n; i++) {
    __builtin_prefetch(next + slots[i], 1);
    __builtin_prefetch(previous + slots[i], 1);
  }
  for (uint64_t i = 0; i < n; i++) {
    __builtin_prefetch(previous + next[slots[i]], 1);
    __builtin_prefetch(next + previous[slots[i]], 1);
  }
  for (uint64_t i = 0; i < n; i++) {
    const auto slot = static_cast<uint32_t>(slots[i]);
    const uint32_t after = next[slot], before = previous[slot];
    next[before] = after;
    previous[after] = before;
    const uint32_t last = previous[head];
    next[last] = slot;
    previous[slot] = last;
    next[slot] = head;
    previous[head] = slot;
  }
}

}  // extern "C"
