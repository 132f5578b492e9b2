// Hints to the kernel about memory that is the caller's. Contract: native/abi/memory.h.
#include <sys/mman.h>

#include "base/abi.h"

extern "C" void mc_memory_expect(uint64_t address, uint64_t nbytes) {
  constexpr uint64_t huge = 2 << 20;  // less than one whole huge page gains nothing
  const uint64_t first = (address + huge - 1) / huge * huge;
  const uint64_t end = (address + nbytes) / huge * huge;
  if (end > first) (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}
