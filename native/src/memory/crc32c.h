// crc32c (Castagnoli, reflected), alone and while copying.
//
// Several kernels, one of them chosen once by what the processor can do. A kernel takes and returns
// the *raw* register; `mc_crc32c` and `mc_copy_crc32c` add the usual inversions, so that the
// crc32c of "123456789" is 0xe3069283.
//
//   portable   eight table look-ups per eight bytes; copies a block, then reads it again from cache
//   sse42      the crc instruction on three lanes of a block (crc32c_sse42.cc)
//   avx2       carry-less folding of one stream, 256 bytes a step (crc32c_fold.h)
//   avx512     the same with wider registers; streaming stores stay with avx2
//
// Non-temporal ("streaming") stores spare the read of the destination's old content. They win when
// the destination is not in cache and lose when it is: see `streams`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mc::memory {

struct CrcKernel {
  const char* name;
  bool (*usable)();  // on this processor
  uint32_t (*crc)(uint32_t raw, const uint8_t* data, size_t nbytes);
  uint32_t (*copy)(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes);
  // The same with streaming stores, which are complete (fenced) on return.
  uint32_t (*stream)(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes);
};

inline constexpr size_t kStreamMinBytes = 256 * 1024;
inline constexpr size_t kStreamBatchMinBytes = 4 << 20;
inline constexpr size_t kStreamItemMinBytes = 16 * 1024;

// Whether to stream a copy of `nbytes` that is one of a batch of `batch_nbytes`. A batch of 128 x
// 64 KiB is a fifth to a third faster for it unless all of it lies in cache already.
inline bool streams(uint64_t nbytes, uint64_t batch_nbytes) {
  return nbytes >= kStreamMinBytes ||
         (nbytes >= kStreamItemMinBytes && batch_nbytes >= kStreamBatchMinBytes);
}

// Every kernel built in, slowest first; the last usable one is used. For tests and benchmarks.
std::span<const CrcKernel* const> all_kernels();
const CrcKernel& kernel();

// Copy and return the crc32c; `stream` only says what would be faster.
uint32_t copy_crc(uint8_t* to, const uint8_t* from, size_t nbytes, bool stream);

extern const CrcKernel kPortable;
#if defined(__x86_64__)
extern const CrcKernel kSse42;
extern const CrcKernel kAvx2;
extern const CrcKernel kAvx512;
#endif

}  // namespace mc::memory
