// A set of keys by their digests, each with a state: 16 bytes a slot, no key is kept.
//
// Linear probing in digest order; what is erased leaves no mark (the run behind it moves up). The
// digests are SipHash under a secret, so nobody can choose keys that collide, and 126 bits of them
// are kept, so that two keys of a cluster are never taken for one another.
#pragma once

#include <cstdint>
#include <vector>

namespace mc {

struct KeyDigest {
  uint64_t low, high;
};

class KeyIndex {
 public:
  // 0: it is not there.
  uint32_t find(const KeyDigest& key) const;
  // state 1 to 3; std::bad_alloc, and then nothing has changed.
  void set(const KeyDigest& key, uint32_t state);
  void erase(const KeyDigest& key);
  uint64_t size() const { return count_; }
  void prefetch(const KeyDigest& key) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[home(key.low)]);
  }

 private:
  struct Slot {
    uint64_t low = 0, high = 0;  // the low two bits of `high` are the state; 0: empty
    uint32_t state() const { return high & 3; }
    bool is(const KeyDigest& key) const { return low == key.low && (high ^ key.high) < 4; }
  };

  uint64_t home(uint64_t low) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(low) * slots_.size()) >> 64);
  }
  uint64_t next(uint64_t at) const { return at + 1 == slots_.size() ? 0 : at + 1; }
  // Where the key is, or the empty slot where it would be. There are slots, and one is empty.
  uint64_t place(const KeyDigest& key) const;
  void grow();

  std::vector<Slot> slots_;
  uint64_t count_ = 0;
};

}  // namespace mc
