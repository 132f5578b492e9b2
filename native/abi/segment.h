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
    uint64_t journal_nbytes;
    uint64_t journal_failures;
} mc_segment_stats;

int32_t mc_segment_open(uint64_t base, uint64_t nbytes, mc_segment **out);
void mc_segment_close(mc_segment *segment); /* null is fine; the memory stays the caller's */

/* First beat of a put, per row (all-or-nothing within a row): statuses[i] becomes
 *   0                    the header is unsealed and carries the row's generation; write the payload
 *   MC_E_USAGE           outside the segment or misaligned
 *   MC_E_LEASE_EXPIRED   now_ms is past the row's expires_ms, or a same or younger extent is there
 *   MC_E_BACKPRESSURE    an older extent there is still being written, or held by a reader
 *   MC_E_OUT_OF_SPACE    no memory for the table
 * Rows with a non-zero status on entry are left out. */
int32_t mc_segment_begin(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                         uint64_t now_ms, int32_t *statuses);
/* Between the beats, for values that lie in this process: copy row i's payload from
 * values + sources[i], with its crc32c into crcs[i]. Rows whose status is 0 only; a source range
 * outside `values` makes it MC_E_USAGE. */
int32_t mc_segment_fill(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                        const uint8_t *values, uint64_t values_nbytes, const uint64_t *sources,
                        uint32_t *crcs, int32_t *statuses);
/* Between the beats: keep what a row's object is called. The name of row i is
 * common[0, common_nbytes) followed by keys[ends[i-1], ends[i]). Rows whose status is 0 only. With a
 * secret (16 bytes, else null) the row's digest must be mc_digest of the key, or of no bytes, which
 * is how a master signs a row for any key: what it signed is what the node remembers. Otherwise, or when the ends do not rise within keys_nbytes, the row
 * becomes MC_E_ACCESS or MC_E_USAGE and keeps no name. */
int32_t mc_segment_name(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
                        const uint8_t *common, uint64_t common_nbytes, const uint8_t *keys,
                        uint64_t keys_nbytes, const uint64_t *ends, const uint8_t *secret,
                        int32_t *statuses);
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

typedef struct mc_generations {
    uint64_t from;
    uint64_t below;
} mc_generations;
typedef struct mc_replica {
    uint64_t offset;
    uint64_t generation;
} mc_replica;

/* What a master is told of sealed extents: those from `offset` on whose generation lies in one of
 * the ranges and that do not carry `mark` (0: all), with their names; at most n, as many names as
 * fit names_nbytes (name i ends at name_ends[i]), and after looking at a bounded number of extents.
 * *next: where to go on, UINT64_MAX at the end. Answers how many, or MC_E_USAGE: the first one's
 * name is longer than names_nbytes. */
int64_t mc_segment_named(mc_segment *segment, uint64_t offset, const mc_generations *ranges,
                         uint64_t range_count, uint32_t mark, mc_extent_row *rows, uint64_t n,
                         uint8_t *names, uint64_t names_nbytes, uint64_t *name_ends,
                         uint64_t *next);
/* The master believes in these: mark the sealed ones (mark is not 0). absent[i] becomes 1 where
 * there is no such sealed extent, else 0. */
int32_t mc_segment_mark(mc_segment *segment, const mc_replica *replicas, uint64_t n,
                        uint32_t mark, uint8_t *absent);
/* Keep a journal of this segment in `fd` (opened for writing, the caller's, which must outlive the
 * segment), beginning with all extents in the table: from now on every begun extent is written down
 * before its payload, with its name as soon as it is known, in the order of their beginnings. Where
 * the memory is a file, journal and headers tell a later owner what was there (mc_segment_adopt).
 * Entry: mc_journal_head, the row, the name. A write that fails costs later owners the extents it was
 * about, and is counted (stats.journal_failures). */
typedef struct mc_journal_head {
    uint32_t magic;        /* "MCJN" */
    uint32_t name_nbytes;
    uint32_t crc32c;       /* of row and name */
    uint32_t reserved;
} mc_journal_head;
int32_t mc_segment_journal(mc_segment *segment, int32_t fd);
/* Take over what a former owner of this memory left, by its journal: entries in their order, a later
 * one ending those it overlaps; the first that is not whole ends it. An extent enters the table as
 * sealed if its header is whole, sealed and that of the entry, and its payload fits its crc32c. Reads
 * every payload byte, with two threads. Call it before anything else happens to the segment.
 * MC_E_OUT_OF_SPACE: memory ran out; what was adopted by then stays. */
typedef struct mc_adopted {
    uint64_t count;
    uint64_t torn;           /* begun and not sealed, unsealed, or overwritten */
    uint64_t damaged;        /* sealed, and the bytes do not fit */
} mc_adopted;
int32_t mc_segment_adopt(mc_segment *segment, const uint8_t *journal, uint64_t nbytes,
                         mc_adopted *out);
