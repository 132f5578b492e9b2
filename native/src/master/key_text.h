// Texts of keys, packed: each with its length and its tenant, in units of four bytes.
//
// Pages of 64 KiB hold records of one size each; a free record names the next free one of its page.
// Pages of one size with free records are a list. A page whose last record went, while others of its
// size have room, serves any size again, and its memory goes back to the system. A record never moves.
#pragma once

#include <cstdint>
#include <vector>

#include "base/spread.h"

namespace mc {

class KeyText {
 public:
  static constexpr uint32_t kNone = 0;  // names no record
  static constexpr uint16_t kTextMax = 8192;

  struct Record {
    uint16_t nbytes, tenant;
    uint8_t text[];
  };

  KeyText();
  // The name of the record with this text of at most kTextMax bytes. std::bad_alloc, and then nothing
  // has changed.
  uint32_t add(uint16_t tenant, const uint8_t* text, uint16_t nbytes);
  void drop(uint32_t name);
  const Record* at(uint32_t name) const {
    return reinterpret_cast<const Record*>(words_at(name >> kOffsetBits, name & kOffsetMask));
  }
  uint64_t page_count() const { return pages_.size() - free_.size(); }

 private:
  static constexpr uint32_t kPageBytes = 64 << 10, kOffsetBits = 14;  // 64 KiB are 2^14 units
  static constexpr uint32_t kPageUnits = 1 << kOffsetBits, kOffsetMask = kPageUnits - 1;
  static constexpr uint32_t kPagesMax = 1 << (32 - kOffsetBits);  // 16 GiB of keys
  static constexpr uint32_t kRegionPages = kHugeBytes / kPageBytes;
  static constexpr uint32_t kNoPage = ~uint32_t{0};
  static constexpr uint16_t kNoRecord = 0xFFFF;

  struct Page {
    uint16_t units = 0;  // of a record; 0: it serves no size
    uint16_t live = 0;
    uint16_t fresh = 0;  // where the records begin that were never used
    uint16_t free = kNoRecord;
    uint32_t next = kNoPage, previous = kNoPage;  // among those of its size with room
  };

  uint32_t* words_at(uint32_t page, uint32_t offset) const {
    return regions_[page / kRegionPages].as<uint32_t>() + page % kRegionPages * kPageUnits + offset;
  }
  bool has_room(const Page& page) const {
    return page.free != kNoRecord || page.fresh + page.units <= kPageUnits;
  }
  uint32_t page_with_room(uint16_t units);
  void list(uint32_t number);
  void unlist(uint32_t number);

  std::vector<Spread> regions_;
  std::vector<Page> pages_;
  std::vector<uint32_t> free_;   // pages that serve no size
  std::vector<uint32_t> heads_;  // by size in units: the first page with room
};

}  // namespace mc
