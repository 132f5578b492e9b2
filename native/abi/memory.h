/* Memory, copies, checksums, digests, extents. Bare declarations: read by cffi and by
 * native/include/mooncake/mooncake.h. Conventions are written at the top of that header.
 * Everything here is thread-safe as long as two calls do not write the same memory. */

/* ---- segment memory ------------------------------------------------------------------------ */

/* Populated, close-on-exec memfd whose size cannot change, mapped read-write in this process.
 * name: visible in /proc/PID/fd, at most 200 bytes. nbytes is rounded up to the page size.
 * flags: MC_MEMORY_HUGE tries huge pages and falls back silently; MC_MEMORY_SOLE_WRITER: nobody
 * can map the file for writing after this call, whoever gets the descriptor (a peer's
 * MC_ACCESS_REMOTE_WRITE over shared memory is then impossible).
 * MC_E_OUT_OF_SPACE: too little memory left on this machine or in its control groups (checked
 * before the first touch, so that no SIGBUS can follow). */
int32_t mc_memory_open(const char *name, uint64_t nbytes, uint32_t flags, uint64_t *out_address,
                       uint64_t *out_nbytes, int32_t *out_fd);
/* Likewise, in a file (open for reading and writing, the caller's) of which the first nbytes, a
 * multiple of the page size, are mapped. What is there stays as it is; what the file lacks is
 * allocated, so that no later touch can fail for want of space (MC_E_OUT_OF_SPACE). */
int32_t mc_memory_open_file(int32_t fd, uint64_t nbytes, uint64_t *out_address);
void mc_memory_close(uint64_t address, uint64_t nbytes, int32_t fd);
/* Fresh memory that is about to be filled from end to end: may it come in huge pages, so that not
 * every 4 KiB of it cost a page fault. A hint, harmless for any memory of this process. */
void mc_memory_expect(uint64_t address, uint64_t nbytes);

/* ---- copies and checksums ------------------------------------------------------------------ */

uint32_t mc_crc32c(const void *data, uint64_t nbytes, uint32_t seed);
/* crc32c of two runs of bytes, one after the other, from those of each and the second's length. */
uint32_t mc_crc32c_join(uint32_t first, uint32_t second, uint64_t second_nbytes);
/* One pass: copy and crc32c. Non-temporal stores from 256 KiB up. */
uint32_t mc_copy_crc32c(uint64_t destination, uint64_t source, uint64_t nbytes);
void mc_copy(uint64_t destination, uint64_t source, uint64_t nbytes);

/* SipHash-2-4-128 of n keys that lie one after the other in `keys`; ends[i] is the end of key i.
 * secret: 16 bytes. out: 16 bytes a key. */
void mc_digest(const uint8_t *keys, const uint64_t *ends, uint64_t n, const uint8_t *secret,
               uint8_t *out);

/* ---- extents (format: design/extent.md) ----------------------------------------------------
 * All calls take rows and a status for each; rows whose statuses[i] is non-zero on entry are left
 * out. They return MC_E_USAGE, and have done nothing, when the call itself is wrong (null array,
 * base not a multiple of 64), else 0, whatever became of the rows. */

/* A row names one extent of one segment. 64 bytes, the same row travels in grants. */
typedef struct mc_extent_row {
    uint32_t key_index;
    uint32_t segment_index;
    uint64_t offset;      /* of the header in the segment, multiple of 64 */
    uint64_t length;      /* payload bytes; payload starts at offset + 64 */
    uint64_t generation;
    uint64_t expires_ms;  /* of the grant, on the master's clock; not looked at here */
    uint8_t digest[16];   /* reading: all zeros accepts any */
    uint64_t tag; /* in grants: the name of the group; not looked at here */
} mc_extent_row;

/* Node side of a put, first beat: mark headers as being written (unsealed, new generation).
 * statuses[i]: 0, or MC_E_USAGE (outside the segment, misaligned, generation 0), or
 * MC_E_LEASE_EXPIRED (the header there carries this or a younger generation already). Looks at
 * this offset only: that no live extent overlaps is for the caller's table to know. */
int32_t mc_extent_begin(uint64_t base, uint64_t segment_nbytes, const mc_extent_row *rows,
                        uint64_t n, int32_t *statuses);
/* Second beat: the payload is in place, with crcs[i]; seal the headers. The stores
 * of this thread, streaming ones too, are visible to a reader before the seal is. Refuses
 * (MC_E_LEASE_EXPIRED in statuses[i]) a header that is not the one begun, or unsealed since. */
int32_t mc_extent_seal(uint64_t base, uint64_t segment_nbytes, const mc_extent_row *rows,
                       uint64_t n, const uint32_t *crcs, int32_t *statuses);
/* Unseal, or end a put that was begun: after this no reader accepts the extent and no seal
 * succeeds. Only if the header still has the row's generation. Doing it twice is fine. */
int32_t mc_extent_unseal(uint64_t base, uint64_t segment_nbytes, const mc_extent_row *rows,
                         uint64_t n, int32_t *statuses);
/* Same-host read from a mapped segment: validate header, copy payload with crc32c into
 * destinations[i] (capacity capacities[i]), validate header again, compare crc. Nothing of a
 * mismatching object is reported as good (its destination may hold partial bytes).
 * statuses[i]: 0; MC_E_LEASE_EXPIRED (another generation or unsealed there); MC_E_CHECKSUM;
 * MC_E_USAGE (capacity below length, checked before any byte is written; outside the segment). */
int32_t mc_extent_read(uint64_t base, uint64_t segment_nbytes, const mc_extent_row *rows,
                       uint64_t n, const uint64_t *destinations, const uint64_t *capacities,
                       int32_t *statuses);
typedef struct mc_mapped {
    uint64_t base;    /* 0: this segment is not mapped here */
    uint64_t nbytes;
} mc_mapped;
typedef struct mc_range {
    uint64_t start;   /* in the payload */
    uint64_t nbytes;
} mc_range;

/* mc_extent_read over many segments and scattered destinations, in one call.
 * rows[i].segment_index names one of `segments`; ranges[i] (null: whole payloads) is what is wanted
 * of row i. It goes into destinations[j], capacities[j] for j in [piece_ends[i-1], piece_ends[i])
 * (null: destination i alone), one after the other; room beyond it stays as it is. The crc is
 * compared when a whole payload is read; a part has the two readings of the header only.
 * statuses[i]: as of mc_extent_read, and MC_E_PEER_UNREACHABLE for a segment that is not mapped,
 * MC_E_USAGE for a range outside the payload. Answers how many rows have a status other than 0, or MC_E_USAGE. */
int64_t mc_extent_read_mapped(const mc_mapped *segments, uint64_t segment_count,
                              const mc_extent_row *rows, uint64_t n,
                              const mc_range *ranges, const uint64_t *piece_ends,
                              const uint64_t *destinations, const uint64_t *capacities,
                              int32_t *statuses);
/* Judge reads that went through a transport: 64-byte header images fetched before and after the
 * payload, and the crc of what arrived. Same statuses as mc_extent_read. */
int32_t mc_extent_verify(const uint8_t *headers_before, const uint8_t *headers_after,
                         const mc_extent_row *rows, uint64_t n, const uint32_t *crcs,
                         int32_t *statuses);
