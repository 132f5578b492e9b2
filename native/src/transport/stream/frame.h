// The framed protocol on TCP and unix stream sockets. Little-endian, written before its code.
//
// A connection begins with one Hello from each side (see hello.h). Then frames: a 32-byte head and
// `nbytes` of body. Every length is checked against its cap before anything is allocated; a frame
// that breaks a rule ends the connection.
//
//   type         tag          a        b        c         body (cap)
//   message      correlation  kind     -        -         bytes (message_max_bytes)
//   reply        correlation  -        -        -         bytes (message_max_bytes)
//   read         -            count    -        -         count x ReadEntry (kEntriesMax)
//   data         part         status   crc      -         bytes asked for, or none (kPartMax)
//   write        part         region   flags    offset    bytes (kPartMax)
//   pull         -            count    -        -         count x PullEntry (kEntriesMax)
//   done         part         status   crc      -         -
//   query        correlation  region   -        -         -
//   region       correlation  status   flags    -         RegionInfo, pieces (kRegionBodyMax)
//   revoked      -            region   -        -         -
//   revoked_ack  -            region   -        -         -
//   credit       -            -        -        bytes     -
//   cancel       -            count    -        -         count x tag (kEntriesMax)
//   gate         -            -        -        -         -
//   rail_offer   attempt      -        -        -         RailOffer (rdma, rdma/rail.h)
//   rail_answer  attempt      status   -        -         RailAnswer
//   rail_close   attempt      answer   -        -         -
//   rail_closed  attempt      -        -        -         -
//
// read asks for parts; each is answered by one data frame, in any order, straight from memory.
// write carries a part; it is answered by done. pull asks the owner to fetch a part by itself
// (shm); answered by done. query / region: what a region of the peer looks like; flag 1 of region:
// its memfd came along; flag 2: it may be written through that, by the rules of shm/gate.h, in the
// slot whose number is in the flags from bit 8 on. gate: the memfd of that page comes along, once
// and before the first such region. revoked: that knowledge is void; the ack says that nobody uses it now.
//
// credit: messages are sent while those on their way, or received and not yet taken by the
// program, sum up to less than the receiver's window (told in its Hello; each counts message_cost).
// credit says how many bytes were taken. Nothing else ever waits for that. cancel: nobody
// waits for the parts with these tags. Those to be read need not be answered; those to be pulled need
// not be fetched, but are answered, so that the writer knows from when on they cannot land any more.
// rail_close: the queue pair of that attempt goes; rail_closed, where an answer is wanted, says that
// nothing that was written through it lands any more.
#pragma once

#include <cstdint>

namespace mc {

enum class FrameType : uint16_t {
  kMessage = 1, kReply, kRead, kData, kWrite, kPull, kDone, kQuery, kRegion, kRevoked, kRevokedAck,
  kCredit, kCancel, kGate, kRailOffer, kRailAnswer, kRailClose, kRailClosed,
};

struct FrameHead {
  uint32_t nbytes = 0;
  FrameType type{};
  uint16_t reserved = 0;
  uint64_t tag = 0;
  uint32_t a = 0, b = 0;
  uint64_t c = 0;
};
static_assert(sizeof(FrameHead) == 32);

struct ReadEntry {
  uint64_t tag;
  uint32_t region, reserved;
  uint64_t offset, length;
};
static_assert(sizeof(ReadEntry) == 32);

struct PullEntry {
  uint64_t tag;
  uint32_t region, flags;
  uint64_t offset, source, length;
};
static_assert(sizeof(PullEntry) == 40);

struct RegionInfo {  // followed by piece_count mc_pieces
  uint64_t nbytes;
  uint32_t access, piece_count;
};
static_assert(sizeof(RegionInfo) == 16);

// What a message counts in windows and queues: its bytes and what it takes to keep them.
constexpr uint64_t message_cost(uint32_t nbytes) { return uint64_t{nbytes} + 64; }

inline constexpr uint32_t kRailBodyMax = 1 << 10;
inline constexpr uint32_t kWriteCrc = 1, kRegionHasFd = 1, kRegionWritable = 2,
                          kRegionSlotShift = 8;

inline constexpr uint32_t kPartMax = 1 << 20;        // a stream part: bounds what a cut leaves over
inline constexpr uint64_t kPullMax = 8 << 20;        // a part the owner pulls
inline constexpr uint32_t kEntriesMax = 1024;        // in one read or pull frame
inline constexpr uint32_t kRegionBodyMax = 16 << 20; // a million pieces
inline constexpr uint64_t kCreditMax = 1ULL << 40;   // in one credit frame
inline constexpr uint64_t kWindow = 4096;            // parts one side keeps in flight on a connection
inline constexpr uint64_t kBacklogMax = 2 * kWindow; // unanswered parts after which it is not read

}  // namespace mc
