// The part of libibverbs that we use, declared by ourselves, and the library found at run time.
//
// One build runs everywhere: no header of rdma-core is needed to compile and no library to start.
// What stands here is the library's binary interface: structures whose layout rdma-core keeps for
// all programs linked against libibverbs.so.1 (symbol versions IBVERBS_1.0 and 1.1), on 64-bit Linux.
// Calls on the data path are no functions of the library but entries of a table in the context of
// a device; that table's layout belongs to the same interface. The assertions below hold our
// declarations to it, native/test/test_rdma_plan.cc compares them with the real header where there
// is one, and library() refuses to go on when a context does not look as declared.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace mc::verbs {

struct Context;
struct Device;  // opaque
struct Srq;
struct Ah;

struct alignas(8) Gid {
  uint8_t raw[16];
};

struct DeviceAttr {
  char firmware[64];
  uint64_t node_guid, image_guid, max_mr_size, page_sizes;
  uint32_t vendor, part, hardware;
  int32_t max_qp, max_qp_wr;
  uint32_t flags;
  int32_t max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom,
      max_res_rd_atom, max_qp_init_rd_atom, unused[16];
  uint16_t max_pkeys;
  uint8_t ack_delay, port_count;
};
static_assert(sizeof(DeviceAttr) == 232 && offsetof(DeviceAttr, port_count) == 227);

struct PortAttr {
  uint32_t state, max_mtu, active_mtu;
  int32_t gid_count;
  uint32_t flags, max_message, bad_pkeys, bad_qkeys;
  uint16_t pkey_count, lid, sm_lid;
  uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_reply, active_width, active_speed, physical,
      link_layer, more_flags;
  uint16_t room[9];  // newer libraries know more; the call we use writes no more than the above
};
static_assert(offsetof(PortAttr, lid) == 34 && offsetof(PortAttr, link_layer) == 46);

struct Pd {
  Context* context;
  uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* address;
  size_t length;
  uint32_t handle, lkey, rkey;
};
static_assert(offsetof(Mr, lkey) == 36 && offsetof(Mr, rkey) == 40);

struct Channel {
  Context* context;
  int fd, references;
};

struct Cq {
  Context* context;
  Channel* channel;
  void* user;
  uint32_t handle;
  int size;
};

struct Qp {
  Context* context;
  void* user;
  Pd* pd;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  uint32_t handle, number;
};
static_assert(offsetof(Qp, number) == 52);

struct QpCap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline;
};

struct QpInit {
  void* user;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  QpCap cap;
  uint32_t type;
  int32_t signal_all;
};
static_assert(sizeof(QpInit) == 64);

struct Route {
  Gid destination;
  uint32_t flow_label;
  uint8_t source_index, hop_limit, traffic_class;
};

struct AddressVector {
  Route route;
  uint16_t lid;
  uint8_t service_level, path_bits, rate, is_global, port;
};
static_assert(sizeof(Route) == 24 && sizeof(AddressVector) == 32);

struct QpAttr {
  uint32_t state, current_state, path_mtu, migration, qkey, receive_psn, send_psn, peer_number,
      access;
  QpCap cap;
  AddressVector address, other_address;
  uint16_t pkey_index, other_pkey_index;
  uint8_t notify_drained, draining, max_rd_atomic, max_peer_rd_atomic, min_rnr_timer, port, timeout,
      retry_count, rnr_retry, other_port, other_timeout;
  uint32_t rate_limit;
};
static_assert(sizeof(QpAttr) == 144 && offsetof(QpAttr, address) == 56);

struct Sge {
  uint64_t address;
  uint32_t length, lkey;
};

struct SendWr {
  uint64_t id;
  SendWr* next;
  Sge* sges;
  int32_t sge_count;
  uint32_t opcode, flags, immediate;
  uint64_t remote;
  uint32_t rkey;
  uint32_t room[19];  // of operations that we do not use
};
static_assert(sizeof(SendWr) == 128 && offsetof(SendWr, remote) == 40);

struct Wc {
  uint64_t id;
  uint32_t status, opcode, vendor_error, nbytes, immediate, qp_number, source_qp, flags;
  uint16_t pkey_index, lid;
  uint8_t service_level, path_bits;
};
static_assert(sizeof(Wc) == 48 && offsetof(Wc, qp_number) == 28);

struct AsyncEvent {
  union {
    void* object;
    int port;
  } element;
  uint32_t type;
};
static_assert(sizeof(AsyncEvent) == 16);

using Unused = void (*)();

struct Operations {
  Unused before_poll[11];
  int (*poll_cq)(Cq*, int, Wc*);
  int (*request_notice)(Cq*, int);
  Unused before_send[12];
  int (*post_send)(Qp*, SendWr*, SendWr**);
  Unused after_send[6];
};
static_assert(sizeof(Operations) == 256 && offsetof(Operations, poll_cq) == 88 &&
              offsetof(Operations, request_notice) == 96 && offsetof(Operations, post_send) == 200);

struct Context {
  Device* device;
  Operations operations;
  int command_fd, async_fd, vector_count;
  pthread_mutex_t mutex;
  void* compatible;
};
static_assert(offsetof(Context, async_fd) == 268 && sizeof(Context) == 328);

inline constexpr uint32_t kQpRc = 2;
inline constexpr uint32_t kInit = 1, kReadyToReceive = 2, kReadyToSend = 3, kError = 6;
inline constexpr uint32_t kAttrState = 1 << 0, kAttrAccess = 1 << 3, kAttrPkey = 1 << 4,
                          kAttrPort = 1 << 5, kAttrAddress = 1 << 7, kAttrMtu = 1 << 8,
                          kAttrTimeout = 1 << 9, kAttrRetries = 1 << 10, kAttrRnrRetries = 1 << 11,
                          kAttrReceivePsn = 1 << 12, kAttrRdAtomic = 1 << 13,
                          kAttrRnrTimer = 1 << 15, kAttrSendPsn = 1 << 16,
                          kAttrPeerRdAtomic = 1 << 17, kAttrPeerNumber = 1 << 20;
inline constexpr int kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4;
inline constexpr uint32_t kOpWrite = 0, kOpRead = 4;
inline constexpr uint32_t kSendSignaled = 2, kSendInline = 8;
inline constexpr uint32_t kWcSuccess = 0, kWcLocalProtection = 4, kWcFlushed = 5,
                          kWcRemoteInvalid = 9, kWcRemoteAccess = 10, kWcRemoteOperation = 11,
                          kWcRetriesExceeded = 12;
inline constexpr uint32_t kEventDeviceFatal = 8, kEventPortActive = 9, kEventPortError = 10,
                          kEventGidChange = 18;
inline constexpr uint32_t kPortActive = 4;
inline constexpr uint8_t kLinkInfiniBand = 1, kLinkEthernet = 2;

// The library's functions. All are thread-safe.
struct Library {
  Device** (*get_device_list)(int*);
  void (*free_device_list)(Device**);
  const char* (*get_device_name)(Device*);
  Context* (*open_device)(Device*);
  int (*close_device)(Context*);
  int (*query_device)(Context*, DeviceAttr*);
  int (*query_port)(Context*, uint8_t, PortAttr*);
  int (*query_gid)(Context*, uint8_t, int, Gid*);
  Pd* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Pd*);
  Mr* (*reg_mr)(Pd*, void*, size_t, int);
  int (*dereg_mr)(Mr*);
  Channel* (*create_comp_channel)(Context*);
  int (*destroy_comp_channel)(Channel*);
  Cq* (*create_cq)(Context*, int, void*, Channel*, int);
  int (*destroy_cq)(Cq*);
  int (*get_cq_event)(Channel*, Cq**, void**);
  void (*ack_cq_events)(Cq*, unsigned);
  Qp* (*create_qp)(Pd*, QpInit*);
  int (*modify_qp)(Qp*, QpAttr*, int);
  int (*destroy_qp)(Qp*);
  int (*get_async_event)(Context*, AsyncEvent*);
  void (*ack_async_event)(AsyncEvent*);
  const char* (*wc_status_str)(uint32_t);
  Mr* (*reg_dmabuf_mr)(Pd*, uint64_t, size_t, uint64_t, int, int);  // null in older libraries
};

// Null: there is none here, and *why says what to install. Loaded once in a process; any thread.
const Library* library(std::string* why);

// What a context must look like for our declarations to hold: its table has the entries we call,
// and its descriptors are open.
bool looks_right(const Context& context);

}  // namespace mc::verbs
