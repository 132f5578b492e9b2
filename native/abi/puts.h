/* The client's side of a put whose extents are reserved: pull and commit in one call. Bare
 * declarations: read by cffi and by native/include/mooncake/mooncake.h. */

typedef struct mc_put_message {
    uint64_t peer;
    const uint8_t *data;
    uint32_t nbytes;
    uint32_t kind;
} mc_put_message;

/* Send `pull` to a node and, if all of it was sealed (its reply is a zero for each row and
 * nothing else, pulls.h),
 * `commit` to the master. The replies must be freed with mc_message_free; one that did not come has
 * no data. Returns the status of what was sent last: with an out_pulled that has data it is about
 * the commit, or MC_OK when that was not sent because something was not sealed. */
int32_t mc_put_reserved(mc_engine *engine, const mc_put_message *pull,
                        const mc_put_message *commit, uint32_t timeout_ms, mc_message *out_pulled,
                        mc_message *out_committed);
