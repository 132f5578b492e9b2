#include "memory/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "memory/crc32c_poly.h"
#include "base/abi.h"

namespace mc::memory {
namespace {

constexpr auto kTables = byte_tables();

bool always() { return true; }

uint32_t portable_crc(uint32_t raw, const uint8_t* data, size_t nbytes) {
  while (nbytes >= 8) {
    // Byte by byte, so that it is right for either byte order.
    raw = kTables[7][(raw ^ data[0]) & 255] ^ kTables[6][((raw >> 8) ^ data[1]) & 255] ^
          kTables[5][((raw >> 16) ^ data[2]) & 255] ^ kTables[4][(raw >> 24) ^ data[3]] ^
          kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^ kTables[0][data[7]];
    data += 8;
    nbytes -= 8;
  }
  for (; nbytes > 0; nbytes--) raw = (raw >> 8) ^ kTables[0][(raw ^ *data++) & 255];
  return raw;
}

uint32_t portable_copy(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kBlock = 8192;
  for (size_t at = 0; at < nbytes; at += kBlock) {
    const size_t length = std::min(kBlock, nbytes - at);
    std::memcpy(to + at, from + at, length);
    // Of what arrived, not of what was there: the source may change meanwhile.
    raw = portable_crc(raw, to + at, length);
  }
  return raw;
}

constexpr const CrcKernel* kAll[] = {
    &kPortable,
#if defined(__x86_64__)
    &kSse42,
    &kAvx2,
    &kAvx512,
#endif
};

#if defined(__SANITIZE_THREAD__)

// The thread sanitizer sees every access of a reader that copies while a writer writes, which the
// extent protocol permits (and detects). Its build copies with atomic bytes, so that what it
// reports are mistakes in the protocol. Acquire loads also stand in for the reader's fence, which
// that sanitizer does not model.
uint32_t atomic_copy(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) {
    const uint8_t byte = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
    __atomic_store_n(to + i, byte, __ATOMIC_RELEASE);
    raw = portable_crc(raw, &byte, 1);
  }
  return raw;
}

constexpr CrcKernel kAtomic = {"atomic", always, portable_crc, atomic_copy, atomic_copy};

const CrcKernel& choose() { return kAtomic; }

#else

const CrcKernel& choose() {
  const CrcKernel* best = &kPortable;
  for (const CrcKernel* candidate : kAll)
    if (candidate->usable()) best = candidate;
  return *best;
}

#endif

}  // namespace

const CrcKernel kPortable = {"portable", always, portable_crc, portable_copy, portable_copy};

std::span<const CrcKernel* const> all_kernels() { return kAll; }

const CrcKernel& kernel() {
  static const CrcKernel& chosen = choose();
  return chosen;
}

uint32_t copy_crc(uint8_t* to, const uint8_t* from, size_t nbytes, bool stream) {
  const CrcKernel& chosen = kernel();
  return ~(stream ? chosen.stream : chosen.copy)(~0u, to, from, nbytes);
}

}  // namespace mc::memory

using mc::memory::kernel;
using mc::memory::kStreamMinBytes;

extern "C" {

uint32_t mc_crc32c(const void* data, uint64_t nbytes, uint32_t seed) {
  return ~kernel().crc(~seed, static_cast<const uint8_t*>(data), nbytes);
}

uint32_t mc_crc32c_join(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  static constexpr auto kZeroBytes = mc::memory::zero_bytes();
  thread_local uint64_t nbytes = 0;  // runs that are joined usually have one length
  thread_local uint32_t power = 0x80000000u;
  if (nbytes != second_nbytes) {
    nbytes = second_nbytes;
    power = 0x80000000u;
    for (size_t k = 0; second_nbytes >> k != 0 && k < 64; k++) {
      if ((second_nbytes >> k & 1) != 0) power = mc::memory::times(power, kZeroBytes[k]);
    }
  }
  return mc::memory::times(first, power) ^ second;
}

uint32_t mc_copy_crc32c(uint64_t destination, uint64_t source, uint64_t nbytes) {
  return mc::memory::copy_crc(reinterpret_cast<uint8_t*>(destination),
                              reinterpret_cast<const uint8_t*>(source), nbytes,
                              nbytes >= kStreamMinBytes);
}

void mc_copy(uint64_t destination, uint64_t source, uint64_t nbytes) {
  // With the folding kernels the checksum costs nothing beside the memory traffic, and their
  // streaming stores are the fastest copy there is: no second implementation is needed.
  if (nbytes >= kStreamMinBytes)
    mc_copy_crc32c(destination, source, nbytes);
  else
    std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
                nbytes);
}

}  // extern "C"
