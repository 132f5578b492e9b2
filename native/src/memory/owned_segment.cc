// The owner's table of extents. Contract: native/abi/segment.h; format: design/extent.md.
//
// One ordered map from offset to extent, under one mutex that is never held while payload bytes
// move. Extents in the map never overlap, so whatever a new range covers is a run of neighbours,
// and a put costs O(log n) plus what it replaces. The map is the authority: header bytes found in
// memory may be part of some old payload, and are never believed here.

#include <iterator>
#include <map>
#include <mutex>
#include <new>

#include "base/abi.h"

namespace {

constexpr uint64_t kAlign = MC_EXTENT_HEADER_NBYTES;

struct Extent {
  mc_extent_row row;
  uint64_t end;
  bool writing;
};

using Table = std::map<uint64_t, Extent>;

// What readers look at in place. Kept apart from the table: an extent that was unsealed or replaced
// in the table while it was held is held still.
struct Hold {
  uint64_t end;
  uint64_t generation;
  uint64_t count;
};
using Holds = std::map<uint64_t, Hold>;  // they never overlap: sealed extents do not

// Header and payload, aligned. Callers have checked that length is at most a segment's size.
uint64_t extent_nbytes(uint64_t length) { return (length + 2 * kAlign - 1) / kAlign * kAlign; }

}  // namespace

struct mc_segment {
  uint64_t base;
  uint64_t nbytes;
  std::mutex mutex;
  Table table;
  Holds holds;
  mc_segment_stats stats{};

  bool fits(const mc_extent_row &row) const {
    return row.offset % kAlign == 0 && row.offset < nbytes && row.length <= nbytes &&
       extent_nbytes(row.length) <= nbytes - row.offset;
  }

  Table::iterator first_overlap(uint64_t offset) {
    auto it = table.upper_bound(offset);
    if (it != table.begin()) {
      auto before = std::prev(it);
      if (before->second.end > offset) return before;
    }
    return it;
  }

  bool held(uint64_t offset, uint64_t end) const {
    auto it = holds.lower_bound(end);  // the first one behind
    return it != holds.begin() && std::prev(it)->second.end > offset;
  }

  int32_t hold(const mc_extent_row &row) {
    const auto it = table.find(row.offset);
    if (it == table.end() || it->second.writing ||
      it->second.row.generation != row.generation || it->second.row.length != row.length) {
      return MC_E_LEASE_EXPIRED;
    }
    holds.try_emplace(row.offset, Hold{it->second.end, row.generation, 0}).first->second.count += 1;
    return MC_OK;
  }

  void release(const mc_extent_row &row) {
    const auto it = holds.find(row.offset);
    if (it == holds.end() || it->second.generation != row.generation) return;
    if (--it->second.count == 0) holds.erase(it);
  }

  void forget(Table::iterator it) {
    const Extent &extent = it->second;
    if (extent.writing) {
      stats.writing_count -= 1;
    } else {
      int32_t status = MC_OK;
      stats.extent_count -= 1;
      stats.extent_nbytes -= extent.row.length;
      mc_extent_unseal(base, nbytes, &extent.row, 1, &status);
    }
    table.erase(it);
  }

  void wipe(uint64_t offset) {
    auto *words = reinterpret_cast<uint64_t *>(base + offset);
    for (uint64_t i = 0; i < kAlign / sizeof *words; ++i) {
      __atomic_store_n(words + i, 0, __ATOMIC_RELEASE);
    }
  }

  int32_t begin(const mc_extent_row &row, uint64_t now_ms) {
    if (!fits(row)) return MC_E_USAGE;
    if (now_ms > row.expires_ms) return MC_E_LEASE_EXPIRED;
    const uint64_t end = row.offset + extent_nbytes(row.length);
    const auto first = first_overlap(row.offset);
    for (auto it = first; it != table.end() && it->first < end; ++it) {
      if (it->second.row.generation >= row.generation) return MC_E_LEASE_EXPIRED;
      if (it->second.writing) return MC_E_BACKPRESSURE;
    }
    if (held(row.offset, end)) return MC_E_BACKPRESSURE;
    for (auto it = first; it != table.end() && it->first < end;) forget(it++);
    // What lies at the header's place may be anybody's old payload and look like a header.
    wipe(row.offset);
    int32_t status = MC_OK;
    mc_extent_begin(base, nbytes, &row, 1, &status);
    if (status != MC_OK) return status;
    table.emplace(row.offset, Extent{row, end, true});
    stats.writing_count += 1;
    return MC_OK;
  }

  int32_t seal(const mc_extent_row &row, uint32_t crc, uint64_t now_ms, int32_t status) {
    const auto it = table.find(row.offset);
    const bool begun = it != table.end() && it->second.writing &&
             it->second.row.generation == row.generation;
    if (!begun) return status != MC_OK ? status : MC_E_LEASE_EXPIRED;
    if (status == MC_OK && now_ms > row.expires_ms) status = MC_E_LEASE_EXPIRED;
    if (status == MC_OK) mc_extent_seal(base, nbytes, &row, 1, &crc, &status);
    if (status != MC_OK) {
      forget(it);
      return status;
    }
    it->second.writing = false;
    stats.writing_count -= 1;
    stats.extent_count += 1;
    stats.extent_nbytes += row.length;
    return MC_OK;
  }

  void unseal(const mc_extent_row &row) {
    const auto it = table.find(row.offset);
    if (it != table.end() && !it->second.writing &&
      it->second.row.generation == row.generation) {
      forget(it);
    }
  }
};

extern "C" {

int32_t mc_segment_open(uint64_t base, uint64_t nbytes, mc_segment **out) {
  if (base % kAlign != 0 || nbytes < kAlign) return MC_E_USAGE;
  auto *segment = new (std::nothrow) mc_segment;
  if (segment == nullptr) return MC_E_OUT_OF_SPACE;
  segment->base = base;
  segment->nbytes = nbytes;
    *out = segment;
  return MC_OK;
}

void mc_segment_close(mc_segment *segment) { delete segment; }

int32_t mc_segment_begin(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
            uint64_t now_ms, int32_t *statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] != MC_OK) continue;
    statuses[i] = segment->begin(rows[i], now_ms);
    if (statuses[i] != MC_OK) segment->stats.refused_count += 1;
  }
  return MC_OK;
}

int32_t mc_segment_fill(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
            const uint8_t *values, uint64_t values_nbytes, const uint64_t *sources,
            uint32_t *crcs, int32_t *statuses) {
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] != MC_OK) continue;
    const mc_extent_row &row = rows[i];
    if (sources[i] > values_nbytes || row.length > values_nbytes - sources[i] ||
      !segment->fits(row)) {
      statuses[i] = MC_E_USAGE;
      continue;
    }
    crcs[i] = mc_copy_crc32c(segment->base + row.offset + MC_EXTENT_HEADER_NBYTES,
                reinterpret_cast<uint64_t>(values + sources[i]), row.length);
  }
  return MC_OK;
}

int32_t mc_segment_seal(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
            const uint32_t *crcs, uint64_t now_ms, int32_t *statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    const int32_t before = statuses[i];
    statuses[i] = segment->seal(rows[i], crcs[i], now_ms, before);
    if (before == MC_OK && statuses[i] != MC_OK) segment->stats.refused_count += 1;
  }
  return MC_OK;
}

int32_t mc_segment_unseal(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
             int32_t *statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    segment->unseal(rows[i]);
    statuses[i] = MC_OK;
  }
  return MC_OK;
}

int32_t mc_segment_hold(mc_segment *segment, const mc_extent_row *rows, uint64_t n,
            int32_t *statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] == MC_OK) statuses[i] = segment->hold(rows[i]);
  }
  return MC_OK;
}

int32_t mc_segment_release(mc_segment *segment, const mc_extent_row *rows, uint64_t n) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) segment->release(rows[i]);
  return MC_OK;
}

int32_t mc_segment_stat(mc_segment *segment, mc_segment_stats *out) {
  const std::lock_guard guard(segment->mutex);
    *out = segment->stats;
  out->held_count = segment->holds.size();
  return MC_OK;
}

int64_t mc_segment_inventory(mc_segment *segment, uint64_t offset, mc_extent_row *rows,
              uint64_t n) {
  const std::lock_guard guard(segment->mutex);
  uint64_t count = 0;
  for (auto it = segment->table.lower_bound(offset); it != segment->table.end() && count < n;
    ++it) {
    if (!it->second.writing) rows[count++] = it->second.row;
  }
  return static_cast<int64_t>(count);
}

}  // extern "C"
