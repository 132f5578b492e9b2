/* mooncake_py's native core: memory, checksums, extents, and the transfer engine.
 *
 * Conventions of this ABI
 *
 *   Names      mc_<object>_<verb>. Whatever has _open has _close, which may be called on null.
 *   Handles    are opaque pointers; ids (regions, peers) are numbers that are never re-used within
 *              an engine.
 *   Statuses   every call that can fail returns int32_t: zero, or a negative MC_E_*; a few return
 *              a positive answer and say so. mc_last_error() has the words, for the calling thread.
 *   Outs       come last and are written only on success.
 *   Options    structs begin with their size.
 *   Memory     what the caller passes in stays the caller's. Memory of slices must stay valid until
 *              the batch is done, cancelled or closed, registered memory until it is deregistered.
 *              After those calls returned, no byte of it is written or sent.
 *   Waiting    everything that may wait takes timeout_ms and returns in time.
 *   Threads    all functions are thread-safe unless a sentence says otherwise. After fork() every
 *              call in the child on what was opened before fails with MC_E_USAGE.
 *   Strings    are UTF-8 and end with a zero.
 *
 * The declarations are bare, without any preprocessor line but the constants, so that cffi reads
 * the very same files. */
#ifndef MOONCAKE_MOONCAKE_H
#define MOONCAKE_MOONCAKE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "../../abi/constants.h"
#include "../../abi/memory.h"
#include "../../abi/segment.h"
#include "../../abi/engine.h"
#include "../../abi/pulls.h"
#include "../../abi/keys.h"
#include "../../abi/door.h"
#include "../../abi/puts.h"

#ifdef __cplusplus
}
#endif

#endif
