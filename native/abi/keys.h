/* Keys of complete objects, packed: slot to key and back. Bare declarations: read by cffi and by
 * native/include/mooncake/mooncake.h. A pure data structure: nothing waits, nothing is decided.
 *
 * A slot (a row of the catalog's columns) has a text from mc_keys_set to mc_keys_clear, and is found
 * by it from mc_keys_enter to mc_keys_leave. One thread; nothing here is thread-safe. */

typedef struct mc_keys mc_keys;

typedef struct mc_text {
    const uint8_t *data;
    uint64_t nbytes;
} mc_text;

/* Slots are below `capacity`, at most 2^31 - 1; that costs address space only. */
int32_t mc_keys_open(uint64_t capacity, mc_keys **out);
void mc_keys_close(mc_keys *keys); /* null is fine; after what was opened upon it */
/* The tenant with this number has this name from now on; and: has none. */
int32_t mc_keys_name_tenant(mc_keys *keys, uint16_t tenant, const uint8_t *name, uint64_t nbytes);
void mc_keys_forget_tenant(mc_keys *keys, uint16_t tenant);
/* Give a slot without a text one of at most 8192 bytes. */
int32_t mc_keys_set(mc_keys *keys, uint32_t slot, uint16_t tenant, const uint8_t *key,
                    uint64_t nbytes);
/* 1: the slot has no text any more; 0: it had none. It is not entered. */
int32_t mc_keys_clear(mc_keys *keys, uint32_t slot);
/* 1: it is found by its text now; 0: instead of another one; else a status. */
int32_t mc_keys_enter(mc_keys *keys, uint32_t slot);
/* 1: it is not found any more; 0: it was not. */
int32_t mc_keys_leave(mc_keys *keys, uint32_t slot);
/* The slot of this key; -1: none. */
int32_t mc_keys_find(mc_keys *keys, uint16_t tenant, const uint8_t *key, uint64_t nbytes);
/* Of n keys of one tenant; faster than one by one. */
void mc_keys_find_many(mc_keys *keys, uint16_t tenant, const mc_text *texts, uint64_t n,
                       int32_t *slots);
/* How many bytes the slot's text has, and where it lies until the next call but find; -1: it has
 * none. */
int32_t mc_keys_text(mc_keys *keys, uint32_t slot, const uint8_t **out);
/* One number a slot, 0 where there is no text; for as long as `keys` is open. */
const uint32_t *mc_keys_names(mc_keys *keys);
/* Doubly linked lists in two columns: n slots, each in some list, leave where they are and become the
 * last ones of the list with this head, one after the other. */
void mc_links_move(uint32_t *next, uint32_t *previous, const int64_t *slots, uint64_t n,
                   uint32_t head);
