// crc32c of two neighbours from their own crcs, so that parts may arrive in any order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mc {

// crc of A followed by B, from crc(A), crc(B) and the length of B.
uint32_t crc32c_concat(uint32_t first, uint32_t second, uint64_t second_nbytes);

}  // namespace mc
