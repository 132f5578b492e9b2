// The journal of a segment: which extents were begun and named, in order. Layout: native/abi/segment.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/abi.h"

namespace mc::memory {

inline constexpr uint64_t kAlign = MC_EXTENT_HEADER_NBYTES;

// Header and payload, aligned. Callers have checked that length is at most a segment's size.
inline uint64_t extent_nbytes(uint64_t length) {
  return (length + 2 * kAlign - 1) / kAlign * kAlign;
}

struct JournalEntry {
  mc_extent_row row;
  std::string name;
};

// A whole entry or, without memory for it (std::bad_alloc), none.
void append_entry(std::string* to, const mc_extent_row& row, const std::string& name);

// Of a journal's entries those that no later one overlaps.
std::vector<JournalEntry> survivors(const uint8_t* at, uint64_t left);

}  // namespace mc::memory
