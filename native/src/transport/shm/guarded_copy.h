// A copy into memory that its owner may take back: never one byte after it was taken back.
//
// A thread that is stopped in the middle of a copy (SIGSTOP, a debugger, no time on a processor)
// would go on where it was, whenever that is. This copy does not: it runs as a restartable sequence
// (rseq), which the kernel ends when the thread leaves the processor or gets a signal. The thread
// goes on behind the sequence instead, and the copy begins anew by looking at the permission.
//
// So an owner that withdrew the permission needs to wait only for copies that really run at that
// moment; a writer that is seen standing still will not write any more (design/remote-write.md).
#pragma once

#include <atomic>
#include <cstdint>

namespace mc {

// False: this kernel, C library or processor has no such sequences.
bool can_copy_guarded();

enum class Guarded { kDone, kWithdrawn, kGaveUp };
// Copy while *permission == expected. kWithdrawn: it is not, and how much was copied before is not
// known. kGaveUp: disturbed over and over, as under a debugger that steps through it.
Guarded copy_guarded(const std::atomic<uint32_t>& permission, uint32_t expected, void* to,
                     const void* from, uint64_t nbytes);

}  // namespace mc
