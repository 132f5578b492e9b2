// The key table against a map, the packed texts, and the lists in columns.
#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/abi.h"
#include "check.h"
#include "master/key_table.h"

namespace {

mc::Text view(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Keys of all lengths come and go under two tenants; the same text may stand in several slots, of
// which the one that was entered last is found.
void check_table_against_a_map() {
  constexpr uint32_t kSlots = 4096;
  mc::KeyTable table(kSlots);
  std::map<std::pair<uint16_t, std::string>, uint32_t> entered;
  std::map<uint32_t, std::pair<uint16_t, std::string>> texts;
  std::mt19937 dice(7);
  for (int step = 0; step < 300'000; step++) {
    const uint32_t slot = dice() % (step < 150'000 ? kSlots : 512);
    const auto tenant = static_cast<uint16_t>(dice() % 2);
    const std::string key = std::to_string(dice() % 1500) + std::string(dice() % 7 * 31, 'x');
    const auto there = texts.find(slot);
    if (there == texts.end()) {
      table.set(slot, tenant, view(key));
      texts[slot] = {tenant, key};
      if (dice() % 8 != 0) {
        CHECK_EQ(table.enter(slot), entered.count({tenant, key}) == 0);
        entered[{tenant, key}] = slot;
      }
    } else {
      const auto found = entered.find(there->second);
      const bool was = found != entered.end() && found->second == slot;
      CHECK_EQ(table.leave(slot), was);
      if (was) entered.erase(found);
      table.clear(slot);
      CHECK(table.text(slot) == nullptr);
      texts.erase(there);
    }
    CHECK_EQ(table.size(), entered.size());
    const auto found = entered.find({tenant, key});
    CHECK_EQ(table.find(tenant, view(key)), found == entered.end() ? -1 : static_cast<int32_t>(found->second));
  }
  std::vector<std::string> all;
  for (int i = 0; i < 1500; i++) {
    for (int tail = 0; tail < 7; tail++) all.push_back(std::to_string(i) + std::string(tail * 31, 'x'));
  }
  std::vector<mc::Text> views;
  for (const std::string& each : all) views.push_back(view(each));
  std::vector<int32_t> slots(all.size());
  for (const uint16_t tenant : {0, 1}) {
    table.find_many(tenant, views.data(), views.size(), slots.data());
    for (size_t i = 0; i < all.size(); i++) CHECK_EQ(slots[i], table.find(tenant, views[i]));
  }
  for (const auto& [slot, named] : texts) {
    const mc::KeyText::Record* const record = table.text(slot);
    CHECK_EQ(record->tenant, named.first);
    CHECK_EQ(std::string(reinterpret_cast<const char*>(record->text), record->nbytes) == named.second, true);
  }
}

// What keys of one length left serves those of another one.
void check_texts_are_given_back() {
  mc::KeyText text;
  const std::string shorter(60, 's'), longer(4000, 'l');
  uint64_t most = 0;
  for (int round = 0; round < 6; round++) {
    const std::string& key = round % 2 == 0 ? shorter : longer;
    std::vector<uint32_t> names;
    for (int i = 0; i < (round % 2 == 0 ? 60'000 : 1'000); i++) {
      names.push_back(text.add(3, view(key).data, static_cast<uint16_t>(key.size())));
      CHECK(names.back() != mc::KeyText::kNone);
    }
    for (const uint32_t name : names) CHECK_EQ(text.at(name)->text[key.size() - 1], key[0]);
    if (round < 2) most = std::max(most, text.page_count());
    CHECK(text.page_count() <= most + 1);
    for (const uint32_t name : names) text.drop(name);
    CHECK(text.page_count() <= 2);
  }
}

void check_tenants() {
  mc::KeyTable table(64);
  CHECK_EQ(table.tenant_of("t"), -1);
  table.name_tenant(5, "t");
  table.name_tenant(0, "");
  CHECK_EQ(table.tenant_of("t"), 5);
  CHECK_EQ(table.tenant_of(""), 0);
  table.forget_tenant(5);
  table.name_tenant(5, "u");
  CHECK_EQ(table.tenant_of("t"), -1);
  CHECK_EQ(table.tenant_of("u"), 5);
}

void check_abi_refuses() {
  mc_keys* keys = nullptr;
  CHECK_EQ(mc_keys_open(0, &keys), MC_E_USAGE);
  CHECK_EQ(mc_keys_open(8, &keys), MC_OK);
  const uint8_t key[] = "key";
  const std::vector<uint8_t> huge(8193);
  CHECK_EQ(mc_keys_set(keys, 8, 0, key, 3), MC_E_USAGE);
  CHECK_EQ(mc_keys_set(keys, 7, 0, huge.data(), huge.size()), MC_E_USAGE);
  CHECK_EQ(mc_keys_enter(keys, 7), MC_E_USAGE);
  CHECK_EQ(mc_keys_set(keys, 7, 0, key, 3), MC_OK);
  CHECK_EQ(mc_keys_set(keys, 7, 0, key, 3), MC_E_USAGE);
  CHECK_EQ(mc_keys_leave(keys, 7), 0);
  CHECK_EQ(mc_keys_enter(keys, 7), 1);
  CHECK_EQ(mc_keys_enter(keys, 7), 0);
  const uint8_t* text = nullptr;
  CHECK_EQ(mc_keys_text(keys, 7, &text), 3);
  CHECK_EQ(text[2], 'y');
  CHECK_EQ(mc_keys_text(keys, 1, &text), -1);
  CHECK_EQ(mc_keys_text(keys, 99, &text), -1);
  CHECK(mc_keys_names(keys)[7] != 0 && mc_keys_names(keys)[1] == 0);
  mc_keys_close(keys);
  mc_keys_close(nullptr);
}

void check_links() {
  constexpr uint32_t kSlots = 50, kHead = kSlots;
  std::vector<uint32_t> next(kSlots + 1), previous(kSlots + 1);
  std::list<uint32_t> model;
  next[kHead] = previous[kHead] = kHead;
  for (uint32_t slot = 0; slot < kSlots; slot++) {
    next[previous[kHead]] = slot;
    previous[slot] = previous[kHead];
    next[slot] = kHead;
    previous[kHead] = slot;
    model.push_back(slot);
  }
  std::mt19937 dice(3);
  for (int step = 0; step < 2'000; step++) {
    std::vector<int64_t> some;
    for (uint32_t slot = 0; slot < kSlots; slot++) {
      for (int times = dice() % 5 == 0; times > 0; times = dice() % 7 == 0) {
        some.insert(some.begin() + dice() % (some.size() + 1), slot);
      }
    }
    mc_links_move(next.data(), previous.data(), some.data(), some.size(), kHead);
    for (const int64_t slot : some) {
      model.remove(static_cast<uint32_t>(slot));
      model.push_back(static_cast<uint32_t>(slot));
    }
    uint32_t at = kHead;
    for (const uint32_t slot : model) {
      CHECK_EQ(previous[next[at]], at);
      at = next[at];
      CHECK_EQ(at, slot);
    }
    CHECK_EQ(next[at], kHead);
  }
}

}  // namespace

int main() {
  check_table_against_a_map();
  check_texts_are_given_back();
  check_tenants();
  check_abi_refuses();
  check_links();
  return 0;
}
