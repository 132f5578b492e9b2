// Extents: headers and payloads in a segment. Format and protocol: design/extent.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/abi.h"

namespace mc::memory {

// The header as eight words; in a segment each is read and written as one atomic word.
struct Header {
  uint64_t state;  // magic, layout, phase
  uint64_t generation;
  uint8_t digest[16];
  uint64_t length;
  uint32_t crc;
  uint32_t reserved0;
  uint64_t reserved1;
  uint32_t reserved2;
  uint32_t header_crc;
};
static_assert(sizeof(Header) == MC_EXTENT_HEADER_NBYTES);
static_assert(offsetof(Header, header_crc) == 60);

inline constexpr uint64_t kWriting = 0x5458434d | uint64_t{1} << 32;
inline constexpr uint64_t kSealed = kWriting | uint64_t{1} << 48;
inline constexpr uint64_t kGone = kWriting | uint64_t{2} << 48;

uint32_t header_crc(const Header& header);

}  // namespace mc::memory
