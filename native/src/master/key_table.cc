#include "master/key_table.h"

#include <algorithm>
#include <cstring>

#include "base/random.h"
#include "base/sip.h"

namespace mc {
namespace {

constexpr uint64_t kEntriesMin = 64;
constexpr uint64_t kTogether = 64;  // keys that wait for memory together

}  // namespace

KeyTable::KeyTable(uint64_t capacity)
    : capacity_(capacity), index_(kEntriesMin * sizeof(Entry)), names_(capacity * sizeof(uint32_t)),
      entries_(index_.as<Entry>()), size_(kEntriesMin) {
  const Token token = random_token();
  std::memcpy(secret_, token.data(), sizeof secret_);
}

void KeyTable::name_tenant(uint16_t number, std::string_view name) {
  if (tenant_names_.size() <= number) tenant_names_.resize(number + 1u);
  tenants_[std::string(name)] = number;
  tenant_names_[number] = name;
}

void KeyTable::forget_tenant(uint16_t number) {
  if (number < tenant_names_.size()) tenants_.erase(tenant_names_[number]);
}

int32_t KeyTable::tenant_of(std::string_view name) const {
  const auto found = tenants_.find(std::string(name));
  return found == tenants_.end() ? kMissing : found->second;
}

void KeyTable::set(uint32_t slot, uint16_t tenant, Text key) {
  names_.as<uint32_t>()[slot] = text_.add(tenant, key.data, static_cast<uint16_t>(key.nbytes));
  set_slot_ = slot;
  set_tag_ = tag_of(tenant, key);
}

void KeyTable::clear(uint32_t slot) {
  uint32_t& name = names_.as<uint32_t>()[slot];
  if (name != KeyText::kNone) text_.drop(name);
  name = KeyText::kNone;
}

bool KeyTable::enter(uint32_t slot) {
  if ((count_ + 1) * 8 > size_ * 7) grow();
  const KeyText::Record* const record = text(slot);
  const Text key{record->text, record->nbytes};
  const uint32_t tag = slot == set_slot_ ? set_tag_ : tag_of(record->tenant, key);
  Entry& entry = entries_[place(home(tag), tag, record->tenant, key)];
  const bool fresh = entry.slot_and_one == 0;
  count_ += fresh;
  entry = {tag, slot + 1};
  return fresh;
}

bool KeyTable::leave(uint32_t slot) {
  const KeyText::Record* const record = text(slot);
  const Text key{record->text, record->nbytes};
  const uint32_t tag = tag_of(record->tenant, key);
  uint64_t hole = place(home(tag), tag, record->tenant, key);
  if (entries_[hole].slot_and_one != slot + 1) return false;
  --count_;
  for (uint64_t at = next(hole); entries_[at].slot_and_one != 0; at = next(at)) {
    const uint64_t wanted = home(entries_[at].tag);
    // It may move up unless it would then lie before its home.
    if ((at + size_ - wanted) % size_ >= (at + size_ - hole) % size_) {
      entries_[hole] = entries_[at];
      hole = at;
    }
  }
  entries_[hole] = {};
  return true;
}

int32_t KeyTable::find(uint16_t tenant, Text key) const {
  const uint32_t tag = tag_of(tenant, key);
  // Empty: kMissing.
  return static_cast<int32_t>(entries_[place(home(tag), tag, tenant, key)].slot_and_one) - 1;
}

void KeyTable::find_many(uint16_t tenant, const Text* keys, uint64_t n, int32_t* slots) const {
  for (uint64_t done = 0; done < n; done += kTogether) {
    find_some(tenant, keys + done, std::min(kTogether, n - done), slots + done);
  }
}

void KeyTable::find_some(uint16_t tenant, const Text* keys, uint64_t n, int32_t* slots) const {
  uint32_t tags[kTogether];
  uint64_t at[kTogether];  // the first entry with this tag, or an empty one
  for (uint64_t i = 0; i < n; i++) {
    tags[i] = tag_of(tenant, keys[i]);
    __builtin_prefetch(&entries_[home(tags[i])]);
  }
  for (uint64_t i = 0; i < n; i++) {
    at[i] = home(tags[i]);
    while (entries_[at[i]].slot_and_one != 0 && entries_[at[i]].tag != tags[i]) at[i] = next(at[i]);
    const uint32_t slot = entries_[at[i]].slot_and_one;
    if (slot != 0) __builtin_prefetch(names() + slot - 1);
  }
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t slot = entries_[at[i]].slot_and_one;
    if (slot == 0) continue;
    const uint8_t* const record = reinterpret_cast<const uint8_t*>(text(slot - 1));
    for (uint64_t line = 0; line <= keys[i].nbytes; line += 64) __builtin_prefetch(record + line);
  }
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t found = place(at[i], tags[i], tenant, keys[i]);
    slots[i] = static_cast<int32_t>(entries_[found].slot_and_one) - 1;
  }
}

uint32_t KeyTable::tag_of(uint16_t tenant, Text key) const {
  SipState<1> state(secret_[0], secret_[1] ^ tenant);
  state.absorb(key.data, key.nbytes);
  state.v2 ^= 0xff;
  state.rounds(3);
  return static_cast<uint32_t>(state.folded() >> 32);
}

bool KeyTable::is(uint32_t slot, uint16_t tenant, Text key) const {
  const KeyText::Record* const record = text(slot);
  return record->nbytes == key.nbytes && record->tenant == tenant &&
         std::memcmp(record->text, key.data, key.nbytes) == 0;
}

uint64_t KeyTable::place(uint64_t from, uint32_t tag, uint16_t tenant, Text key) const {
  for (uint64_t at = from;; at = next(at)) {
    const Entry& entry = entries_[at];
    if (entry.slot_and_one == 0) return at;
    if (entry.tag == tag && is(entry.slot_and_one - 1, tenant, key)) return at;
  }
}

void KeyTable::grow() {
  const uint64_t size = size_ + size_ / 2;
  const uint64_t nbytes = size * sizeof(Entry);
  Spread larger(nbytes, nbytes < kHugeBytes ? kHugeBytes : 0);
  Spread former = std::move(index_);
  const Entry* const entries = entries_;
  const uint64_t count = size_;
  index_ = std::move(larger);
  entries_ = index_.as<Entry>();
  size_ = size;
  for (uint64_t i = 0; i < count; i++) {
    if (entries[i].slot_and_one == 0) continue;
    uint64_t at = home(entries[i].tag);
    while (entries_[at].slot_and_one != 0) at = next(at);
    entries_[at] = entries[i];
  }
}

}  // namespace mc
