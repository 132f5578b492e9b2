// Copies from memory to memory, past the caches or through them as the memory turns out to be.
//
// Streaming stores are half as fast again where the destination is cold and half as fast where it is
// hot; which it is shows in the time that the first piece takes.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/abi.h"
#include "base/deadline.h"

namespace mc {

inline constexpr uint64_t kStreamMin = 256 << 10;  // below it the question is not worth asking
inline constexpr uint64_t kProbeBytes = 64 << 10;
inline constexpr int64_t kHotNs = 2'000;           // of the probe: more than any DRAM gives

inline void copy_bytes(uint64_t to, uint64_t from, uint64_t nbytes) {
  if (nbytes < kStreamMin) return mc_copy(to, from, nbytes);
  const auto plain = [](uint64_t a, uint64_t b, uint64_t n) {
    memcpy(reinterpret_cast<void*>(a), reinterpret_cast<const void*>(b), n);
  };
  const int64_t began_ns = now_ns();
  plain(to, from, kProbeBytes);
  const bool hot = now_ns() - began_ns <= kHotNs;
  if (hot) plain(to + kProbeBytes, from + kProbeBytes, nbytes - kProbeBytes);
  else mc_copy(to + kProbeBytes, from + kProbeBytes, nbytes - kProbeBytes);
}

}  // namespace mc
