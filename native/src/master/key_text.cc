#include "master/key_text.h"

#include <cstring>
#include <new>

namespace mc {
namespace {

constexpr uint32_t kHeadBytes = sizeof(KeyText::Record), kUnitBytes = 4;

uint16_t units_of(uint16_t nbytes) {
  return static_cast<uint16_t>((kHeadBytes + nbytes + kUnitBytes - 1) / kUnitBytes);
}

}  // namespace

KeyText::KeyText() : heads_(units_of(kTextMax) + 1, kNoPage) {}

uint32_t KeyText::add(uint16_t tenant, const uint8_t* text, uint16_t nbytes) {
  const uint16_t units = units_of(nbytes);
  const uint32_t number = page_with_room(units);
  Page& page = pages_[number];
  uint32_t offset = page.free;
  if (page.free != kNoRecord) {
    page.free = static_cast<uint16_t>(*words_at(number, offset));
  } else {
    offset = page.fresh;
    page.fresh = static_cast<uint16_t>(page.fresh + units);
  }
  page.live++;
  if (!has_room(page)) unlist(number);
  auto* const record = reinterpret_cast<Record*>(words_at(number, offset));
  record->nbytes = nbytes;
  record->tenant = tenant;
  std::memcpy(record->text, text, nbytes);
  return number << kOffsetBits | offset;
}

void KeyText::drop(uint32_t name) {
  const uint32_t number = name >> kOffsetBits;
  Page& page = pages_[number];
  const bool had_room = has_room(page);
  *words_at(number, name & kOffsetMask) = page.free;
  page.free = static_cast<uint16_t>(name & kOffsetMask);
  page.live--;
  if (!had_room) list(number);
  if (page.live != 0 || (page.next == kNoPage && page.previous == kNoPage)) return;
  free_.push_back(number);  // there is room for all pages
  unlist(number);
  page = {};
  regions_[number / kRegionPages].forget(number % kRegionPages * kPageBytes, kPageBytes);
}

uint32_t KeyText::page_with_room(uint16_t units) {
  if (heads_[units] != kNoPage) return heads_[units];
  uint32_t number = static_cast<uint32_t>(pages_.size());
  if (!free_.empty()) {
    number = free_.back();
    free_.pop_back();
  } else {
    if (number == kPagesMax) throw std::bad_alloc();
    free_.reserve(pages_.size() + 1);
    if (number / kRegionPages == regions_.size()) {
      regions_.emplace_back(kHugeBytes, regions_.empty() ? kHugeBytes : 0);
    }
    pages_.emplace_back();
  }
  Page& page = pages_[number];
  page = {};
  page.units = units;
  if (number == 0) page.fresh = units;  // so that no record's name is kNone
  list(number);
  return number;
}

void KeyText::list(uint32_t number) {
  Page& page = pages_[number];
  page.previous = kNoPage;
  page.next = heads_[page.units];
  if (page.next != kNoPage) pages_[page.next].previous = number;
  heads_[page.units] = number;
}

void KeyText::unlist(uint32_t number) {
  Page& page = pages_[number];
  if (page.previous != kNoPage) pages_[page.previous].next = page.next;
  else heads_[page.units] = page.next;
  if (page.next != kNoPage) pages_[page.next].previous = page.previous;
  page.next = page.previous = kNoPage;
}

}  // namespace mc
