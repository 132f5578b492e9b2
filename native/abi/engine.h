/* The transfer engine. Bare declarations: read by cffi and by native/include/mooncake/mooncake.h.
 * All functions are thread-safe unless a sentence says otherwise; all that may wait take
 * timeout_ms and return in time, whatever the peer does. */

typedef struct mc_engine mc_engine;
typedef struct mc_batch mc_batch;

typedef struct mc_engine_options {
    uint32_t struct_size;
    uint32_t transports;         /* bit mask of MC_TRANSPORT_* that may be used */
    const char *listen;          /* "host:port", "[v6]:port"; port 0 = any; "" = do not listen */
    const char *advertise;       /* host peers should use; "" = the listening one */
    uint32_t tcp_lanes;          /* connections a peer for large slices; 0 = one within a host, else two */
    uint32_t message_max_bytes;  /* largest message accepted from a peer */
    uint64_t queue_max_bytes;    /* received, not yet taken messages; beyond it peers wait */
    const char *rdma_devices;    /* "name" or "name:port", with commas between; "" = all active */
    int32_t rdma_gid_index;      /* of the ports' tables; -1 = chosen */
    int32_t rdma_traffic_class;  /* 0 to 255; -1 = 0 */
    uint64_t rdma_region_max_bytes; /* registered at once; 0 = what the devices say */
    uint32_t rdma_rails_max;     /* queue pairs made at a time; idle ones are evicted beyond it */
    uint32_t silence_max_ms;     /* a TCP peer that is not heard so long is given up; 0 = 10 s */
    const char *interfaces;      /* of this host, the best first, with commas between: where several
                                    have an address in a peer's network, it is called from the first.
                                    The one that `listen` names goes before them. */
    uint64_t fault_seed;         /* `fake` transport: seed of its faults */
    uint32_t fault_loss_ppm;     /* `fake`: slices and messages that vanish, per million */
    uint32_t fault_corrupt_ppm;  /* `fake`: slices with a flipped bit, per million */
    uint32_t fault_cut_ppm;      /* `fake`: operations that cut the connection, per million */
    uint32_t fault_delay_us;     /* `fake`: longest delay of an operation */
} mc_engine_options;

int32_t mc_engine_open(const mc_engine_options *options, mc_engine **out);
/* Cuts what is in flight (its batches end as MC_E_CANCELLED), wakes every waiter, joins threads,
 * closes sockets. Later calls on the engine fail with MC_E_CANCELLED. Twice is fine. */
void mc_engine_shutdown(mc_engine *engine);
/* Shut down and free. Null is fine. No other call on the engine may start after it. Mappings of
 * mc_peer_map stay, and batch handles must still be closed. */
void mc_engine_close(mc_engine *engine);
/* "host:port" that peers should open. Truncated to capacity, always terminated. */
int32_t mc_engine_address(mc_engine *engine, char *out, uint64_t capacity);
/* JSON: address, incarnation, peers with transport, reason, bytes, errors; regions; queues. */
int32_t mc_engine_describe(mc_engine *engine, char *out, uint64_t capacity, uint64_t *out_needed);
/* Called on the process's main thread, with no lock held, when a signal interrupts it in a wait of
 * mc_message_request, mc_put_reserved or mc_batch_wait; not 0 ends that as MC_E_SIGNAL, as late as a
 * deadline would. Null: signals interrupt nothing. */
void mc_on_signal(int32_t (*ask)(void));
const char *mc_last_error(void); /* this thread's last failure in words; never null */

/* ---- regions --------------------------------------------------------------------------------- */

/* One or more pieces of memory under one id, addressed as if they lay one after the other.
 * fd: memfd whose byte 0 is at pieces[0].address when there is exactly one piece, else -1: a
 * peer on this host may then map it (read-only unless access has MC_ACCESS_REMOTE_WRITE and the
 * peer's process may trace this one: design/remote-write.md).
 * The id is never re-used within an engine. Exactly the same single range again: same id, and
 * one more deregister needed. Any other overlap is MC_E_USAGE with both ranges in the words.
 * access is MC_ACCESS_REMOTE_READ, with or without MC_ACCESS_REMOTE_WRITE, and
 *   MC_ACCESS_GATHERED  values to be fetched from wherever they lie: such a region may overlap
 *                       others when all of them are read only
 *   MC_ACCESS_RAW       nobody keeps the memory mapped for us: looked at before each use, and where
 *                       the mapping has gone the slice fails with MC_E_ACCESS */
typedef struct mc_piece {
    uint64_t address;
    uint64_t nbytes;
} mc_piece;
int32_t mc_region_register(mc_engine *engine, const mc_piece *pieces, uint64_t n, uint32_t access,
                           int32_t fd, uint32_t *out_region);
/* After it returned, nothing is written into the memory through this engine any more, and
 * every later remote access is refused. Waits for or cuts what is in flight. MC_E_TIMEOUT: a copy
 * into it has not ended (a peer's on this host that gets no time to run): the memory must be kept,
 * and the call may be made again, also after the engine was shut down. */
int32_t mc_region_deregister(mc_engine *engine, uint32_t region, uint32_t timeout_ms);

/* ---- peers ------------------------------------------------------------------------------------ */

/* Connect (or find the live connection to) the engine at "host:port"; handshake with protocol
 * version and incarnation, choice of transport by proof. Both sides may use the peer afterwards. */
int32_t mc_peer_open(mc_engine *engine, const char *address, uint32_t timeout_ms,
                     uint64_t *out_peer);
int32_t mc_peer_close(mc_engine *engine, uint64_t peer);
/* MC_TRANSPORT_* in use, or MC_E_PEER_UNREACHABLE once the peer is gone. */
int32_t mc_peer_transport(mc_engine *engine, uint64_t peer);
/* Map a peer's region read-only into this process, populated. Valid until mc_peer_unmap, even
 * when the peer or the engine is gone. MC_E_ACCESS when this peer's region cannot be mapped (other host,
 * no memfd). */
int32_t mc_peer_map(mc_engine *engine, uint64_t peer, uint32_t region, uint32_t timeout_ms,
                    uint64_t *out_address, uint64_t *out_nbytes);
void mc_peer_unmap(uint64_t address, uint64_t nbytes);

/* ---- transfers --------------------------------------------------------------------------------- */

typedef struct mc_slice {
    uint32_t op;             /* MC_OP_READ: remote to local, MC_OP_WRITE: local to remote */
    uint32_t region;         /* the peer's region id */
    uint64_t remote_offset;  /* in that region */
    uint64_t local;          /* address in this process */
    uint64_t length;
    uint32_t flags;          /* MC_SLICE_CRC: compute crc; MC_SLICE_FENCE: begin only after every
                                earlier slice of the batch has completed,
                                and no later slice begins before it */
    uint32_t crc;            /* out, crc32c of the bytes moved, with MC_SLICE_CRC */
    int32_t status;          /* out; valid once the batch is done */
    uint32_t reserved;
} mc_slice;

/* Start n slices with one peer. `slices` stays the caller's, at the same address, until the batch
 * is done or closed; results are written into it. Success of a slice means its bytes are in the
 * destination. Local memory needs no registration, but stays valid until done/closed. */
int32_t mc_batch_submit(mc_engine *engine, uint64_t peer, mc_slice *slices, uint64_t n,
                        uint32_t timeout_ms, mc_batch **out);
/* 0 when all slices succeeded, the first failing slice's status, or MC_E_TIMEOUT: not yet done
 * (it goes on until its own deadline). */
int32_t mc_batch_wait(mc_batch *batch, uint32_t timeout_ms);
/* 1 when done, else 0. Does not wait. */
int32_t mc_batch_done(mc_batch *batch);
/* Ends what has not completed as MC_E_CANCELLED; afterwards no byte is written locally. */
void mc_batch_cancel(mc_batch *batch);
/* eventfd that becomes readable once the batch is done; owned by the batch. Or a status. */
int32_t mc_batch_fd(mc_batch *batch);
/* Cancels if needed, frees. Null is fine. */
void mc_batch_close(mc_batch *batch);
/* Submit, wait, close in one call: what a blocking caller uses. */
int32_t mc_transfer(mc_engine *engine, uint64_t peer, mc_slice *slices, uint64_t n,
                    uint32_t timeout_ms);

/* The same for what is done in a few microseconds: a small copy within this host, in the calling
 * thread, which waits for nobody. 1: this is none; nothing has been done. */
int32_t mc_transfer_now(mc_engine *engine, uint64_t peer, mc_slice *slices, uint64_t n);

/* ---- messages ------------------------------------------------------------------------------------ */

typedef struct mc_message {
    uint64_t peer;         /* who sent it; 0: posted by this process */
    uint64_t correlation;  /* 0: nobody waits for a reply */
    uint32_t kind;         /* the caller's own numbers */
    uint32_t nbytes;
    const uint8_t *data;   /* valid until mc_message_free */
    void *owner;
} mc_message;

/* One-way message. Ordered after every earlier message to this peer, and after the data of
 * batches that completed before the call. */
int32_t mc_message_send(mc_engine *engine, uint64_t peer, uint32_t kind, const void *data,
                        uint32_t nbytes, uint32_t timeout_ms);
/* Send and wait for the reply; the reply must be freed with mc_message_free. */
int32_t mc_message_request(mc_engine *engine, uint64_t peer, uint32_t kind, const void *data,
                           uint32_t nbytes, uint32_t timeout_ms, mc_message *out_reply);
/* Next received message, oldest first. MC_E_TIMEOUT: none came. MC_E_CANCELLED: woken by
 * mc_engine_wake or closing. Several threads may wait. */
int32_t mc_message_receive(mc_engine *engine, uint32_t timeout_ms, mc_message *out);
int32_t mc_message_reply(mc_engine *engine, const mc_message *request, const void *data,
                         uint32_t nbytes);
void mc_message_free(mc_message *message);
/* Make one mc_message_receive (a waiting or the next one) return MC_E_CANCELLED. */
void mc_engine_wake(mc_engine *engine);
