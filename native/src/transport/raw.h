// Raw memory, registered as (address, bytes), which its program may unmap at any moment: touched
// through the kernel only, so that a hole is a failed slice and not the end of the process.
#pragma once

#include <cstdint>

namespace mc {

// Copy between two places of this process. False: one of them is not mapped (any more).
bool copy_raw(uint64_t to, uint64_t from, uint64_t nbytes);
// The crc32c of raw memory, continuing *crc.
bool crc_raw(uint64_t from, uint64_t nbytes, uint32_t* crc);

}  // namespace mc
