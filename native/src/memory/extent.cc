// The seqlock of extents. Writer (one node process) and readers (any process, read-only mapping):
//
//   begin   state = writing | generation, digest, length ... | payload
//   seal    payload | crcs | state = sealed
//   read    header (acquire) | payload | header again, equal
//
// where each | orders what is before it against what is after it. A reader that copied a byte of a
// newer payload therefore finds, the second time, a state or a generation other than it began
// with. On x86 stores are seen in order except the streaming ones, hence the store fences beside
// the release order. Rows of hostile peers come here: nothing is touched before it was checked.

#include "memory/extent.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>

#include "memory/crc32c.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace mc::memory {
namespace {

static_assert(std::endian::native == std::endian::little);
static_assert(sizeof(mc_extent_row) == 64);

constexpr uint64_t kHeaderBytes = MC_EXTENT_HEADER_NBYTES;
constexpr size_t kWords = sizeof(Header) / 8;
constexpr size_t kStateWord = 0;
constexpr uint64_t kPrefetchRows = 4;

// All earlier stores, streaming ones too, before all later stores.
void store_fence() {
#if defined(__SANITIZE_THREAD__)
  // It knows no fences; release stores and its own payload copies (crc32c.cc) order things there.
#else
  std::atomic_thread_fence(std::memory_order_release);
#if defined(__x86_64__)
  _mm_sfence();
#endif
#endif
}

// All earlier loads before all later loads.
void load_fence() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

Header load_header(const uint64_t* words) {
  uint64_t image[kWords];
  image[kStateWord] = __atomic_load_n(words, __ATOMIC_ACQUIRE);
  for (size_t i = 1; i < kWords; i++) image[i] = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
  return std::bit_cast<Header>(image);
}

// Everything but the state, each word after what was stored before it.
void store_body(uint64_t* words, const Header& header) {
  const auto image = std::bit_cast<std::array<uint64_t, kWords>>(header);
  for (size_t i = 1; i < kWords; i++) __atomic_store_n(words + i, image[i], __ATOMIC_RELEASE);
}

void store_state(uint64_t* words, uint64_t state) {
  __atomic_store_n(words + kStateWord, state, __ATOMIC_RELEASE);
}

class Segment {
 public:
  Segment(uint64_t base, uint64_t nbytes) : base_(base), nbytes_(nbytes) {}

  bool valid() const { return base_ != 0 && base_ % kHeaderBytes == 0; }
  bool contains(const mc_extent_row& row) const {
    if (row.offset % kHeaderBytes != 0 || nbytes_ < kHeaderBytes) return false;
    if (row.offset > nbytes_ - kHeaderBytes) return false;
    return row.length <= nbytes_ - kHeaderBytes - row.offset;
  }
  uint64_t* words(const mc_extent_row& row) const {
    return reinterpret_cast<uint64_t*>(base_ + row.offset);
  }
  uint8_t* payload(const mc_extent_row& row) const {
    return reinterpret_cast<uint8_t*>(base_ + row.offset + kHeaderBytes);
  }
  void prefetch(const mc_extent_row& row) const {
    if (!contains(row)) return;
    __builtin_prefetch(words(row));
    __builtin_prefetch(payload(row));
  }

 private:
  uint64_t base_;
  uint64_t nbytes_;
};

bool same(const Header& a, const Header& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// What the row says of the header, apart from its own crc. A digest of zeros asks for none.
bool names(const mc_extent_row& row, const Header& header) {
  static constexpr uint8_t kAny[16] = {};
  return header.state == kSealed && header.generation == row.generation &&
         header.length == row.length &&
         (std::memcmp(row.digest, kAny, 16) == 0 ||
          std::memcmp(row.digest, header.digest, 16) == 0);
}

int32_t begin(const Segment& segment, const mc_extent_row& row) {
  if (!segment.contains(row) || row.generation == 0) return MC_E_USAGE;
  uint64_t* const words = segment.words(row);
  const Header there = load_header(words);
  const bool is_header = there.state == kWriting || there.state == kGone ||
                         (there.state == kSealed && there.header_crc == header_crc(there));
  if (is_header && there.generation >= row.generation) return MC_E_LEASE_EXPIRED;
  Header header{};
  header.generation = row.generation;
  std::memcpy(header.digest, row.digest, sizeof header.digest);
  header.length = row.length;
  store_state(words, kWriting);
  store_body(words, header);
  return MC_OK;
}

int32_t seal(const Segment& segment, const mc_extent_row& row, uint32_t crc) {
  if (!segment.contains(row)) return MC_E_USAGE;
  uint64_t* const words = segment.words(row);
  Header header = load_header(words);
  if (header.state != kWriting || header.generation != row.generation ||
      header.length != row.length || std::memcmp(header.digest, row.digest, 16) != 0)
    return MC_E_LEASE_EXPIRED;
  header.crc = crc;
  header.state = kSealed;
  header.header_crc = header_crc(header);
  store_body(words, header);
  store_state(words, kSealed);
  return MC_OK;
}

int32_t unseal(const Segment& segment, const mc_extent_row& row) {
  if (!segment.contains(row)) return MC_E_USAGE;
  uint64_t* const words = segment.words(row);
  const Header header = load_header(words);
  const bool is_header =
      header.state == kWriting || header.state == kSealed || header.state == kGone;
  if (!is_header || header.generation != row.generation) return MC_E_LEASE_EXPIRED;
  store_state(words, kGone);
  return MC_OK;
}

// Where a read goes: one or several pieces, filled one after the other.
struct Pieces {
  const uint64_t* addresses;
  const uint64_t* sizes;
  uint64_t count;

  bool room_for(uint64_t nbytes) const {
    uint64_t left = nbytes;
    for (uint64_t i = 0; i < count && left > 0; i++) {
      if (addresses[i] == 0 && sizes[i] > 0) return false;
      left -= std::min(left, sizes[i]);
    }
    return left == 0;
  }
};

// Copies into the pieces and answers the crc32c of all of it.
uint32_t scatter(const Pieces& to, const uint8_t* from, uint64_t nbytes, bool stream) {
  if (to.count == 1) {
    return copy_crc(reinterpret_cast<uint8_t*>(to.addresses[0]), from, nbytes, stream);
  }
  uint32_t raw = ~0u;
  for (uint64_t i = 0; nbytes > 0; i++) {
    const uint64_t step = std::min(nbytes, to.sizes[i]);
    const auto copy = stream && step >= kStreamItemMinBytes ? kernel().stream : kernel().copy;
    raw = copy(raw, reinterpret_cast<uint8_t*>(to.addresses[i]), from, step);
    from += step;
    nbytes -= step;
  }
  return ~raw;
}

int32_t read(const Segment& segment, const mc_extent_row& row, const mc_range& range,
             const Pieces& to, uint64_t batch_nbytes) {
  if (!segment.contains(row) || range.start > row.length ||
      range.nbytes > row.length - range.start || !to.room_for(range.nbytes))
    return MC_E_USAGE;
  const uint64_t* const words = segment.words(row);
  const Header before = load_header(words);
  if (!names(row, before)) return MC_E_LEASE_EXPIRED;
  uint32_t crc = before.crc;
  const bool sound = before.header_crc == header_crc(before);
  if (sound)
    crc = scatter(to, segment.payload(row) + range.start, range.nbytes,
                  streams(range.nbytes, batch_nbytes));
  load_fence();
  // An unsound header that stays as it is has been damaged; one that changes was being written.
  if (!same(before, load_header(words))) return MC_E_LEASE_EXPIRED;
  const bool whole = range.nbytes == row.length;
  return sound && (!whole || crc == before.crc) ? MC_OK : MC_E_CHECKSUM;
}

int32_t verify(const Header& before, const Header& after, const mc_extent_row& row, uint32_t crc) {
  if (!names(row, before) || !same(before, after)) return MC_E_LEASE_EXPIRED;
  return before.header_crc == header_crc(before) && before.crc == crc ? MC_OK : MC_E_CHECKSUM;
}

// Of the rows that lie in the segment. Decides about speed only.
uint64_t payload_nbytes(const Segment& segment, const mc_extent_row* rows, uint64_t n) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < n; i++)
    if (segment.contains(rows[i])) sum += rows[i].length;
  return sum;
}

// Applies `one(i)` to the rows that have not failed before.
template <class One>
void each_row(uint64_t n, int32_t* statuses, One one) {
  for (uint64_t i = 0; i < n; i++)
    if (statuses[i] == MC_OK) statuses[i] = one(i);
}

}  // namespace

uint32_t header_crc(const Header& header) {
  return ~kernel().crc(~0u, reinterpret_cast<const uint8_t*>(&header),
                       offsetof(Header, header_crc));
}

}  // namespace mc::memory

using mc::memory::each_row;
using mc::memory::Segment;

extern "C" {

int32_t mc_extent_begin(uint64_t base, uint64_t segment_nbytes, const mc_extent_row* rows,
                        uint64_t n, int32_t* statuses) {
  const Segment segment(base, segment_nbytes);
  if (!segment.valid() || (n > 0 && (rows == nullptr || statuses == nullptr))) return MC_E_USAGE;
  each_row(n, statuses, [&](uint64_t i) { return mc::memory::begin(segment, rows[i]); });
  mc::memory::store_fence();  // before any payload
  return MC_OK;
}

int32_t mc_extent_seal(uint64_t base, uint64_t segment_nbytes, const mc_extent_row* rows,
                       uint64_t n, const uint32_t* crcs, int32_t* statuses) {
  const Segment segment(base, segment_nbytes);
  if (!segment.valid()) return MC_E_USAGE;
  if (n > 0 && (rows == nullptr || crcs == nullptr || statuses == nullptr)) return MC_E_USAGE;
  mc::memory::store_fence();  // after every payload
  each_row(n, statuses, [&](uint64_t i) { return mc::memory::seal(segment, rows[i], crcs[i]); });
  return MC_OK;
}

int32_t mc_extent_unseal(uint64_t base, uint64_t segment_nbytes, const mc_extent_row* rows,
                         uint64_t n, int32_t* statuses) {
  const Segment segment(base, segment_nbytes);
  if (!segment.valid() || (n > 0 && (rows == nullptr || statuses == nullptr))) return MC_E_USAGE;
  each_row(n, statuses, [&](uint64_t i) { return mc::memory::unseal(segment, rows[i]); });
  mc::memory::store_fence();  // before whatever is done with the space
  return MC_OK;
}

int32_t mc_extent_read(uint64_t base, uint64_t segment_nbytes, const mc_extent_row* rows,
                       uint64_t n, const uint64_t* destinations, const uint64_t* capacities,
                       int32_t* statuses) {
  const Segment segment(base, segment_nbytes);
  if (!segment.valid()) return MC_E_USAGE;
  if (n > 0 &&
      (rows == nullptr || destinations == nullptr || capacities == nullptr || statuses == nullptr))
    return MC_E_USAGE;
  const uint64_t batch_nbytes = mc::memory::payload_nbytes(segment, rows, n);
  each_row(n, statuses, [&](uint64_t i) {
    if (i + mc::memory::kPrefetchRows < n) segment.prefetch(rows[i + mc::memory::kPrefetchRows]);
    const mc::memory::Pieces to{destinations + i, capacities + i, 1};
    return mc::memory::read(segment, rows[i], {0, rows[i].length}, to, batch_nbytes);
  });
  return MC_OK;
}

int64_t mc_extent_read_mapped(const mc_mapped* segments, uint64_t segment_count,
                              const mc_extent_row* rows, uint64_t n,
                              const mc_range* ranges, const uint64_t* piece_ends,
                              const uint64_t* destinations, const uint64_t* capacities,
                              int32_t* statuses) {
  if (segment_count > 0 && segments == nullptr) return MC_E_USAGE;
  if (n > 0 &&
      (rows == nullptr || destinations == nullptr || capacities == nullptr || statuses == nullptr))
    return MC_E_USAGE;
  uint64_t batch_nbytes = 0;  // decides about speed only
  for (uint64_t i = 0; i < n; i++) batch_nbytes += ranges ? ranges[i].nbytes : rows[i].length;
  const auto segment_of = [&](uint64_t i) {
    const uint32_t index = rows[i].segment_index;
    const bool mapped = index < segment_count && segments[index].base != 0;
    return mapped ? Segment(segments[index].base, segments[index].nbytes) : Segment(0, 0);
  };
  each_row(n, statuses, [&](uint64_t i) -> int32_t {
    const uint64_t ahead = i + mc::memory::kPrefetchRows;
    if (ahead < n) segment_of(ahead).prefetch(rows[ahead]);
    const mc_extent_row& row = rows[i];
    const Segment segment = segment_of(i);
    if (!segment.valid()) return MC_E_PEER_UNREACHABLE;
    const uint64_t first = piece_ends == nullptr ? i : i == 0 ? 0 : piece_ends[i - 1];
    const uint64_t last = piece_ends == nullptr ? i + 1 : piece_ends[i];
    const mc::memory::Pieces to{destinations + first, capacities + first, last - first};
    const mc_range range = ranges ? ranges[i] : mc_range{0, row.length};
    return mc::memory::read(segment, row, range, to, batch_nbytes);
  });
  return std::count_if(statuses, statuses + n, [](int32_t status) { return status != MC_OK; });
}

int32_t mc_extent_verify(const uint8_t* headers_before, const uint8_t* headers_after,
                         const mc_extent_row* rows, uint64_t n, const uint32_t* crcs,
                         int32_t* statuses) {
  if (n > 0 && (headers_before == nullptr || headers_after == nullptr || rows == nullptr ||
                crcs == nullptr || statuses == nullptr))
    return MC_E_USAGE;
  each_row(n, statuses, [&](uint64_t i) {
    mc::memory::Header before;
    mc::memory::Header after;
    std::memcpy(&before, headers_before + i * sizeof before, sizeof before);
    std::memcpy(&after, headers_after + i * sizeof after, sizeof after);
    return mc::memory::verify(before, after, rows[i], crcs[i]);
  });
  return MC_OK;
}

}  // extern "C"
