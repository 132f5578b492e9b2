/* The owner's view of one segment: which extents live where, and the beats of a put. Bare
 * declarations: read by cffi and by native/include/mooncake/mooncake.h.
 *
 * Only the node that owns the memory opens a mc_segment over it; all functions are thread-safe.
 * The table of live extents is the authority on overlap: a new extent may cover older, complete
 * ones (they are unsealed first, so that no reader accepts them any more), never a younger one and
 * never one that is still being written. */

typedef struct mc_segment mc_segment;

typedef struct mc_segment_stats {
    uint64_t extent_count;   /* sealed */
    uint64_t extent_nbytes;  /* of their payloads */
    uint64_t writing_count;  /* begun, not sealed or aborted */
    uint64_t refused_count;  /* rows answered with anything but MC_OK, since open */
    uint64_t held_count;     /* extents held by readers */
} mc_segment_stats;

int32_t mc_segment_open(uint64_t base, uint64_t nbytes, mc_segment **out);
void mc_segment_close(mc_segment *segment); /* null is fine; the memory stays the caller's */

/* First beat of a put, per row (all-or-nothing within a row): statuses[i] becomes
 *   0                    the header is unsealed and carries the row's generation; write the payload
 *   MC_E_USAGE           outside the segment or misaligned
 *   MC_E_LEASE_EXPIRED   now_ms is past the row's expires_ms, or a same or younger extent is there
 *   MC_E_BACKPRESSURE    an older extent there is still being written, or held by a reader
 * Rows with a non-zero status on entry are left out. */
int32_t mc_segment_begin(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                         uint64_t now_ms, int32_t *statuses);
/* Between the beats, for values that lie in this process: copy row i's payload from
 * values + sources[i], with its crc32c into crcs[i]. Rows whose status is 0 only; a source range
 * outside `values` makes it MC_E_USAGE. */
int32_t mc_segment_fill(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                        const uint8_t *values, uint64_t values_nbytes, const uint64_t *sources,
                        uint32_t *crcs, int32_t *statuses);
/* Second beat, for rows that this caller's begin answered with 0, and no others (a second request
 * for the same grant must not end the first one's). statuses[i] 0: the payload is in place and
 * crcs[i] its crc32c; the extent is sealed, unless its grant has ended meanwhile
 * (MC_E_LEASE_EXPIRED). Not 0: the copy failed, the extent is given up. After this call nothing is
 * in writing for these rows. */
int32_t mc_segment_seal(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                        const uint32_t *crcs, uint64_t now_ms, int32_t *statuses);
/* No reader accepts these extents afterwards. Rows whose generation is not there any more are
 * left alone (status 0: the promise holds already). */
int32_t mc_segment_unseal(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                          int32_t *statuses);
/* Hold sealed extents for a reader that looks at them in place: until mc_segment_release (as often
 * as held) no new extent may cover them (begin answers MC_E_BACKPRESSURE). Unsealing a held extent
 * is possible and leaves its payload as it is. Rows need offset, length and generation.
 * statuses[i]: 0, or MC_E_LEASE_EXPIRED: no such sealed extent. */
int32_t mc_segment_hold(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                        int32_t *statuses);
int32_t mc_segment_release(mc_segment *segment, const mc_extent_row *rows, uint64_t n);
int32_t mc_segment_stat(mc_segment *segment, mc_segment_stats *out);
/* Sealed extents from `offset` on, ascending, at most n. Answers how many, or a status. */
int64_t mc_segment_inventory(mc_segment *segment, uint64_t offset, mc_extent_row *rows,
                             uint64_t n);
