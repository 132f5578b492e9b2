/* Status codes: 0 or the negated code of mooncake_py/errors.py. Numbers are never re-used. */
#define MC_OK 0
#define MC_E_USAGE -1
#define MC_E_OUT_OF_SPACE -20
#define MC_E_BACKPRESSURE -22
#define MC_E_PEER_UNREACHABLE -30
#define MC_E_TIMEOUT -31
#define MC_E_CHECKSUM -32
#define MC_E_LEASE_EXPIRED -33
#define MC_E_ACCESS -34
#define MC_E_CANCELLED -35
#define MC_E_DRAINING -42
#define MC_E_VERSION -43
#define MC_E_INTERNAL -50
#define MC_E_SIGNAL -127 /* a signal's handler wants the wait to end: mc_on_signal */

#define MC_TRANSPORT_LOCAL 1
#define MC_TRANSPORT_SHM 2
#define MC_TRANSPORT_TCP 4
#define MC_TRANSPORT_RDMA 8
#define MC_TRANSPORT_FAKE 16
#define MC_TRANSPORT_MESSAGES 32 /* no bytes: messages to peers that have no way for bytes in common */

#define MC_ACCESS_REMOTE_READ 1
#define MC_ACCESS_REMOTE_WRITE 2
#define MC_ACCESS_GATHERED 4
#define MC_ACCESS_RAW 8

#define MC_OP_READ 1
#define MC_OP_WRITE 2

#define MC_SLICE_CRC 1
#define MC_SLICE_FENCE 2

#define MC_MEMORY_HUGE 1
#define MC_MEMORY_SOLE_WRITER 2

#define MC_PULL_ROW_MACS 1
#define MC_PULL_PIECES 2

/* Calls that a master's door may answer; what it knows of a key. */
#define MC_DOOR_EXISTS 1
#define MC_DOOR_COMMIT 2

#define MC_DOOR_ABSENT 0
#define MC_DOOR_COMPLETE 1
#define MC_DOOR_WRITING 2

#define MC_EXTENT_HEADER_NBYTES 64
