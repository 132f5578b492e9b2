// Keys of complete objects: which slot of the catalog's columns has which key, and back.
//
//   index      open addressing, 8 bytes an entry: 32 bits of the key's SipHash, and the slot. Where an
//              entry belongs follows from those 32 bits alone, so growing reads no key: it is one pass
//              over the index (some 5 ms a million). What is erased leaves no mark.
//   names      a slot's record in KeyText: 4 bytes a slot
//   text       the key itself with its tenant's number, packed
//
// A slot has a text from `set` to `clear`, and is found by it from `enter` to `leave`. SipHash is
// keyed with random bytes, so nobody can choose keys that collide; the text decides in the end.
//
// *Several at once.* A lookup in a table that is larger than the processor's caches waits for memory
// three times: index, name, text. `find_many` takes each step for some dozens of keys and asks for
// what the next step will read, so that they wait together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/spread.h"
#include "master/key_text.h"
#include "master/text.h"

namespace mc {

class KeyTable {
 public:
  static constexpr int32_t kMissing = -1;

  // Slots are below `capacity` (below 2^31), which costs address space only. std::bad_alloc.
  explicit KeyTable(uint64_t capacity);

  // `number` is the tenant with this name from now on, and no other one.
  void name_tenant(uint16_t number, std::string_view name);
  void forget_tenant(uint16_t number);
  int32_t tenant_of(std::string_view name) const;  // or kMissing

  // The slot has no text; std::bad_alloc, and then nothing has changed.
  void set(uint32_t slot, uint16_t tenant, Text key);
  void clear(uint32_t slot);  // likewise when it has none
  // Null: the slot has no text.
  const KeyText::Record* text(uint32_t slot) const {
    const uint32_t name = names()[slot];
    return name == KeyText::kNone ? nullptr : text_.at(name);
  }
  // The slot is found by its text; one with the same text is not any more. Was there none?
  // std::bad_alloc, and then nothing has changed.
  bool enter(uint32_t slot);
  // Was it to be found?
  bool leave(uint32_t slot);
  int32_t find(uint16_t tenant, Text key) const;
  void find_many(uint16_t tenant, const Text* keys, uint64_t n, int32_t* slots) const;

  const uint32_t* names() const { return names_.as<uint32_t>(); }
  uint64_t capacity() const { return capacity_; }
  uint64_t size() const { return count_; }

 private:
  struct Entry {
    uint32_t tag, slot_and_one;  // 0: empty
  };

  uint32_t tag_of(uint16_t tenant, Text key) const;
  uint64_t home(uint32_t tag) const { return tag * size_ >> 32; }
  uint64_t next(uint64_t at) const { return at + 1 == size_ ? 0 : at + 1; }
  bool is(uint32_t slot, uint16_t tenant, Text key) const;
  // Where this key's entry is, or the empty one where it would be. `from`: home, or beyond it.
  uint64_t place(uint64_t from, uint32_t tag, uint16_t tenant, Text key) const;
  void find_some(uint16_t tenant, const Text* keys, uint64_t n, int32_t* slots) const;
  void grow();

  uint64_t capacity_;
  uint64_t secret_[2];
  Spread index_, names_;
  Entry* entries_;
  uint64_t size_;  // of the index: below 2^32
  uint64_t count_ = 0;
  uint32_t set_slot_ = 0, set_tag_ = 0;  // of the last `set`: it is mostly entered next
  KeyText text_;
  std::unordered_map<std::string, uint16_t> tenants_;
  std::vector<std::string> tenant_names_;
};

}  // namespace mc
