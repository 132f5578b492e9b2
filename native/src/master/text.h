// Somebody else's bytes.
#pragma once

#include <cstdint>

namespace mc {

struct Text {
  const uint8_t* data = nullptr;
  uint64_t nbytes = 0;
};

}  // namespace mc
