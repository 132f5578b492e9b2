/* The master's quick answers: calls that need no decision of the catalog are answered here, on the
 * owner's thread, without waking Python. Bare declarations: read by cffi and by
 * native/include/mooncake/mooncake.h.
 *
 * Two calls are: Exists, and the PutEnd of reservations whose keys are free. What is known for that
 * are the catalog's own keys (keys.h), and a mirror, told by the owner of the catalog before it
 * serves: which keys are being written, which reservations run. Whatever is not plain (an unknown
 * field, a key that is not free, a reservation that is not known) is handed out, as is every other
 * message.
 *
 * A commit that was answered here is a promise: the owner takes it from the log and applies it
 * before it does anything else. One thread serves, drains and tells; nothing here is thread-safe. */

typedef struct mc_door mc_door;

typedef struct mc_door_kinds {
    uint32_t exists;      /* message kinds of the two calls */
    uint32_t commit;
    uint32_t keys_max;    /* of one call; larger ones are handed out */
    uint32_t key_max_bytes;
    uint32_t tenant_max_bytes;
    uint32_t reserved;
} mc_door_kinds;

/* A commit that was answered. Its tenant and key lie in the log's text. */
typedef struct mc_door_commit {
    uint64_t generation;
    uint64_t text;         /* offset of the tenant; the key follows */
    uint32_t tenant_nbytes;
    uint32_t key_nbytes;
} mc_door_commit;

typedef struct mc_door_counts {
    uint64_t exists_calls;
    uint64_t commit_calls;
    uint64_t received_bytes;
    uint64_t sent_bytes;
    uint64_t keys;          /* in the mirror */
    uint64_t reservations;
} mc_door_counts;

/* `keys`: of the catalog, for as long as the door is open. `secret`: 16 random bytes under which keys
 * are hashed; the mirror has 16 bytes a key. */
int32_t mc_door_open(mc_engine *engine, mc_keys *keys, const mc_door_kinds *kinds,
                     const uint8_t *secret, mc_door **out);
void mc_door_close(mc_door *door); /* null is fine */
/* n keys of a tenant, one after the other in `keys` with their ends: each is MC_DOOR_WRITING or
 * MC_DOOR_ABSENT (complete, perhaps).
 * MC_E_OUT_OF_SPACE: the mirror is not right any more; close the door. */
int32_t mc_door_set(mc_door *door, const uint8_t *tenant, uint64_t tenant_nbytes,
                    const uint8_t *keys, const uint64_t *ends, uint64_t n, const uint8_t *states);
/* Reservations of a tenant and when they end; 0: they have. */
int32_t mc_door_reserve(mc_door *door, const uint8_t *tenant, uint64_t tenant_nbytes,
                        const uint64_t *generations, const uint64_t *expires_ms, uint64_t n);
/* As mc_message_receive, for what cannot be answered here. `may`: MC_DOOR_* bits. Returns earlier,
 * as MC_E_TIMEOUT, when commits have waited in the log for linger_ms, or fill it. term: in every
 * reply. now_ms: on the clock of the reservations' ends. */
int32_t mc_door_serve(mc_door *door, uint64_t term, uint64_t now_ms, uint32_t may,
                      uint32_t linger_ms, uint32_t timeout_ms, mc_message *out);
/* What was answered since the last mc_door_clear, in order; valid until then. out_at_ms: when the
 * first one was. */
int32_t mc_door_log(mc_door *door, const mc_door_commit **out_commits, uint64_t *out_n,
                    const uint8_t **out_text, uint64_t *out_text_nbytes, uint64_t *out_at_ms);
void mc_door_clear(mc_door *door);
void mc_door_count(mc_door *door, mc_door_counts *out);
