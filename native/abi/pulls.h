/* The node's side of puts: pull requests are taken from the engine, checked, copied, sealed and
 * answered in here. Bare declarations: read by cffi and by native/include/mooncake/mooncake.h.
 *
 * A request is mc_pull_head, then row_count rows, then one little-endian uint64_t a row (where its
 * value lies, in `region` of the sender or, when that is 0, in the inline bytes), then macs if the
 * flags say so, then names_nbytes of names, then the inline bytes. With MC_PULL_PIECES the values are
 * scattered: that number is the index of the value's first piece, mc_pull_pieces stand instead of
 * inline bytes, and a value is its pieces one after the other up to its length, which the last of
 * them must meet; all values together have no more pieces than the message. Names, unless there are none: mc_pull_names, one uint64_t a row (where its key
 * ends), the tenant, all keys one after the other, up to a multiple of 8 bytes. They are kept beside
 * the extents (mc_segment_name), laid out as mooncake_py/wire/names.py says.
 * A reply is a uint32_t code (of errors.py); with code 0 one byte a row follows, such a code too;
 * else the cause in words.
 *
 * Nothing of a request is believed but what the mac covers: the rows, and with them offsets,
 * lengths, generations and expiry, are the master's word. Where the bytes come from is the client's
 * word, which decides about the content of the client's own object only. A key is kept if its digest
 * is the one in its row. */

typedef struct mc_pull_head {
    uint64_t segment_id;
    uint8_t mac[16];      /* SipHash-2-4-128 of segment_id and all rows, under the grant secret */
    uint32_t row_count;
    uint32_t region;      /* of the sender's engine; 0: the values are inline */
    uint32_t timeout_ms;  /* how long the client will wait */
    uint32_t flags;       /* MC_PULL_ROW_MACS: the mac here is not looked at, each row has its own,
                             over segment_id and that row; they follow the places of the values.
                             MC_PULL_PIECES: see above */
    uint32_t names_nbytes; /* 0: the objects keep no names */
    uint32_t reserved;
} mc_pull_head;

typedef struct mc_pull_piece {
    uint64_t offset;
    uint64_t length;
    uint32_t region;      /* of the sender's engine */
    uint32_t reserved;
} mc_pull_piece;

typedef struct mc_pull_names {
    uint32_t soft_pin_ms;   /* of all objects of the request; 0: none */
    uint32_t ttl_ms;
    uint16_t tenant_nbytes;
    uint16_t flags;         /* 1: hard pin */
    uint32_t reserved;
} mc_pull_names;

typedef struct mc_pulls mc_pulls;

/* `segment` is the table over the memory at `base`; both, and the engine, outlive the handle. Pulls
 * are the messages of this `kind`. Until mc_pulls_mount they are answered NodeDraining. */
int32_t mc_pulls_open(mc_engine *engine, mc_segment *segment, uint64_t base, uint32_t kind,
                      mc_pulls **out);
void mc_pulls_close(mc_pulls *pulls); /* null is fine; after every mc_pulls_serve has returned */
/* From now on serve grants for this segment id, signed with this secret (16 bytes). 0: for none,
 * and what is being copied now is not sealed. name_secret (16 bytes): a tenant's keys are hashed
 * under the mc_digest of its name under this one; null: no names are kept. */
void mc_pulls_mount(mc_pulls *pulls, uint64_t segment_id, const uint8_t *secret,
                    const uint8_t *name_secret);
/* Answer new pulls NodeDraining; what runs may end. */
void mc_pulls_drain(mc_pulls *pulls);
/* The master's clock shows at most CLOCK_BOOTTIME + ahead_ms; INT64_MAX: unknown, no grant runs. */
void mc_pulls_set_time(mc_pulls *pulls, int64_t ahead_ms);
/* Serve pulls until another kind of message comes (it is handed out), the engine is woken
 * (MC_E_CANCELLED), or the time has passed (MC_E_TIMEOUT). Any number of threads may serve. */
int32_t mc_pulls_serve(mc_pulls *pulls, uint32_t timeout_ms, mc_message *out);
