#include "memory/journal.h"

#include <cstring>
#include <iterator>
#include <map>
#include <utility>

namespace mc::memory {
namespace {

constexpr uint32_t kJournalMagic = 0x4e4a434d;

}  // namespace

void append_entry(std::string* to, const mc_extent_row& row, const std::string& name) {
  mc_journal_head head{kJournalMagic, static_cast<uint32_t>(name.size()), 0, 0};
  head.crc32c = mc_crc32c(name.data(), name.size(), mc_crc32c(&row, sizeof row, 0));
  to->reserve(to->size() + sizeof head + sizeof row + name.size());
  to->append(reinterpret_cast<const char*>(&head), sizeof head);
  to->append(reinterpret_cast<const char*>(&row), sizeof row);
  to->append(name);
}

std::vector<JournalEntry> survivors(const uint8_t* at, uint64_t left) {
  std::map<uint64_t, JournalEntry> alive;
  mc_journal_head head;
  while (left >= sizeof head + sizeof(mc_extent_row)) {
    std::memcpy(&head, at, sizeof head);
    const uint64_t nbytes = sizeof head + sizeof(mc_extent_row) + head.name_nbytes;
    if (head.magic != kJournalMagic || left < nbytes) break;
    const uint8_t* body = at + sizeof head;
    if (mc_crc32c(body, nbytes - sizeof head, 0) != head.crc32c) break;
    JournalEntry entry{};
    std::memcpy(&entry.row, body, sizeof entry.row);
    entry.name.assign(reinterpret_cast<const char*>(body + sizeof entry.row), head.name_nbytes);
    at += nbytes;
    left -= nbytes;
    const uint64_t offset = entry.row.offset;
    const uint64_t end = offset + extent_nbytes(entry.row.length);
    auto it = alive.upper_bound(offset);
    if (it != alive.begin()) {
      const auto before = std::prev(it);
      if (before->first + extent_nbytes(before->second.row.length) > offset) it = before;
    }
    while (it != alive.end() && it->first < end) it = alive.erase(it);
    alive.emplace(offset, std::move(entry));
  }
  std::vector<JournalEntry> found;
  found.reserve(alive.size());
  for (auto& [offset, entry] : alive) found.push_back(std::move(entry));
  return found;
}

}  // namespace mc::memory
