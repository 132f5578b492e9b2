#include "master/key_index.h"

namespace mc {
namespace {

constexpr uint64_t kSlotsMin = 64;

}  // namespace

uint64_t KeyIndex::place(const KeyDigest& key) const {
  uint64_t at = home(key.low);
  while (slots_[at].state() != 0 && !slots_[at].is(key)) at = next(at);
  return at;
}

uint32_t KeyIndex::find(const KeyDigest& key) const {
  return slots_.empty() ? 0 : slots_[place(key)].state();
}

void KeyIndex::set(const KeyDigest& key, uint32_t state) {
  if ((count_ + 1) * 8 > slots_.size() * 7) grow();
  Slot& slot = slots_[place(key)];
  if (slot.state() == 0) ++count_;
  slot = {key.low, (key.high & ~uint64_t{3}) | state};
}

void KeyIndex::erase(const KeyDigest& key) {
  if (slots_.empty()) return;
  uint64_t hole = place(key);
  if (slots_[hole].state() == 0) return;
  --count_;
  for (uint64_t at = next(hole); slots_[at].state() != 0; at = next(at)) {
    const uint64_t wanted = home(slots_[at].low);
    const uint64_t size = slots_.size();
    // It may move up unless it would then lie before its home.
    if ((at + size - wanted) % size >= (at + size - hole) % size) {
      slots_[hole] = slots_[at];
      hole = at;
    }
  }
  slots_[hole] = {};
}

void KeyIndex::grow() {
  std::vector<Slot> larger(slots_.empty() ? kSlotsMin : slots_.size() + slots_.size() / 2);
  slots_.swap(larger);
  for (const Slot& slot : larger) {
    if (slot.state() != 0) slots_[place({slot.low, slot.high})] = slot;
  }
}

}  // namespace mc
