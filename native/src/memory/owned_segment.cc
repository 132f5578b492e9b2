// The owner's table of extents. Contract: native/abi/segment.h; format: design/extent.md.
//
// One ordered map from offset to extent, under one mutex that is never held while payload bytes
// move. Extents in the map never overlap, so whatever a new range covers is a run of neighbours,
// and a put costs O(log n) plus what it replaces. The map is the authority: header bytes found in
// memory may be part of some old payload, and are never believed here.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/abi.h"
#include "memory/extent.h"
#include "memory/journal.h"

using namespace mc::memory;

namespace {

constexpr uint64_t kJournalStep = 1 << 20;
constexpr uint64_t kLookMax = 16384;  // extents of one call that lists, while puts wait

struct Extent {
  mc_extent_row row;
  uint64_t end;
  bool writing;
  uint32_t mark;  // of the last reconciliation with a master that named it
  std::string name;
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

}  // namespace

struct mc_segment {
  int journal = -1;  // written under the mutex, so that it has the order of the table
  uint64_t base;
  uint64_t nbytes;
  std::mutex mutex;
  Table table;
  Holds holds;
  mc_segment_stats stats{};

  // All or nothing: what was written of a batch that did not fit is taken back.
  void write_down(const std::string& entries) {
    if (journal < 0 || entries.empty()) return;
    uint64_t done = 0;
    while (done < entries.size()) {
      const ssize_t n = pwrite(journal, entries.data() + done, entries.size() - done,
                               static_cast<off_t>(stats.journal_nbytes + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      done += static_cast<uint64_t>(n);
    }
    if (done == entries.size()) {
      stats.journal_nbytes += done;
    } else {
      stats.journal_failures += 1;
      (void)!ftruncate(journal, static_cast<off_t>(stats.journal_nbytes));
    }
  }

  bool fits(const mc_extent_row& row) const {
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

  int32_t hold(const mc_extent_row& row) {
    const auto it = table.find(row.offset);
    if (it == table.end() || it->second.writing || it->second.row.generation != row.generation ||
        it->second.row.length != row.length) {
      return MC_E_LEASE_EXPIRED;
    }
    holds.try_emplace(row.offset, Hold{it->second.end, row.generation, 0}).first->second.count += 1;
    return MC_OK;
  }

  void release(const mc_extent_row& row) {
    const auto it = holds.find(row.offset);
    if (it == holds.end() || it->second.generation != row.generation) return;
    if (--it->second.count == 0) holds.erase(it);
  }

  void forget(Table::iterator it) {
    const Extent& extent = it->second;
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
    auto* words = reinterpret_cast<uint64_t*>(base + offset);
    for (uint64_t i = 0; i < kAlign / sizeof *words; ++i) {
      __atomic_store_n(words + i, 0, __ATOMIC_RELEASE);
    }
  }

  int32_t begin(const mc_extent_row& row, uint64_t now_ms) {
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
    table.emplace(row.offset, Extent{row, end, true, 0, {}});
    stats.writing_count += 1;
    return MC_OK;
  }

  int32_t seal(const mc_extent_row& row, uint32_t crc, uint64_t now_ms, int32_t status) {
    const auto it = table.find(row.offset);
    const bool begun =
        it != table.end() && it->second.writing && it->second.row.generation == row.generation;
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

  // A put that still runs is ended: its seal will fail, and takes it out of the table.
  void unseal(const mc_extent_row& row) {
    const auto it = table.find(row.offset);
    if (it == table.end() || it->second.row.generation != row.generation) return;
    if (!it->second.writing) {
      forget(it);
      return;
    }
    int32_t status = MC_OK;
    mc_extent_unseal(base, nbytes, &it->second.row, 1, &status);
  }

  Extent* writing(const mc_extent_row& row) {
    const auto it = table.find(row.offset);
    const bool is =
        it != table.end() && it->second.writing && it->second.row.generation == row.generation;
    return is ? &it->second : nullptr;
  }

  int32_t adopt(const mc_extent_row& row, const std::string& name) {
    if (!fits(row) || row.generation == 0) return MC_E_USAGE;
    mc::memory::Header header;
    std::memcpy(&header, reinterpret_cast<const void*>(base + row.offset), sizeof header);
    if (header.state != mc::memory::kSealed || header.generation != row.generation ||
        header.length != row.length || std::memcmp(header.digest, row.digest, 16) != 0) {
      return MC_E_LEASE_EXPIRED;
    }
    if (header.header_crc != mc::memory::header_crc(header)) return MC_E_CHECKSUM;
    const auto* payload = reinterpret_cast<const void*>(base + row.offset + kAlign);
    if (mc_crc32c(payload, row.length, 0) != header.crc) return MC_E_CHECKSUM;
    const uint64_t end = row.offset + extent_nbytes(row.length);
    const std::lock_guard guard(mutex);
    const auto first = first_overlap(row.offset);
    if (first != table.end() && first->first < end) return MC_E_LEASE_EXPIRED;
    table.emplace(row.offset, Extent{row, end, false, 0, name});
    stats.extent_count += 1;
    stats.extent_nbytes += row.length;
    return MC_OK;
  }
};

namespace {

// What is called over the C ABI throws nothing: without memory, or a thread, it says so.
template <typename Use>
int32_t no_throw(Use use) {
  try {
    return use();
  } catch (const std::exception&) {
    return MC_E_OUT_OF_SPACE;
  }
}

bool in_ranges(uint64_t generation, const mc_generations* ranges, uint64_t count) {
  return std::any_of(ranges, ranges + count, [generation](const mc_generations& each) {
    return generation >= each.from && generation < each.below;
  });
}

}  // namespace

extern "C" {

int32_t mc_segment_open(uint64_t base, uint64_t nbytes, mc_segment** out) {
  if (base % kAlign != 0 || nbytes < kAlign) return MC_E_USAGE;
  auto* segment = new (std::nothrow) mc_segment;
  if (segment == nullptr) return MC_E_OUT_OF_SPACE;
  segment->base = base;
  segment->nbytes = nbytes;
  *out = segment;
  return MC_OK;
}

void mc_segment_close(mc_segment* segment) { delete segment; }

int32_t mc_segment_begin(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                         uint64_t now_ms, int32_t* statuses) {
  const std::lock_guard guard(segment->mutex);
  std::string entries;
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] != MC_OK) continue;
    try {
      statuses[i] = segment->begin(rows[i], now_ms);
      if (statuses[i] == MC_OK && segment->journal >= 0) append_entry(&entries, rows[i], {});
    } catch (const std::bad_alloc&) {  // not begun, or it would be in writing for ever
      if (segment->writing(rows[i]) != nullptr)
        segment->forget(segment->table.find(rows[i].offset));
      statuses[i] = MC_E_OUT_OF_SPACE;
    }
    if (statuses[i] != MC_OK) segment->stats.refused_count += 1;
  }
  segment->write_down(entries);
  return MC_OK;
}

int32_t mc_segment_fill(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                        const uint8_t* values, uint64_t values_nbytes, const uint64_t* sources,
                        uint32_t* crcs, int32_t* statuses) {
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] != MC_OK) continue;
    const mc_extent_row& row = rows[i];
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

int32_t mc_segment_seal(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                        const uint32_t* crcs, uint64_t now_ms, int32_t* statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    const int32_t before = statuses[i];
    statuses[i] = segment->seal(rows[i], crcs[i], now_ms, before);
    if (before == MC_OK && statuses[i] != MC_OK) segment->stats.refused_count += 1;
  }
  return MC_OK;
}

int32_t mc_segment_name(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                        const uint8_t* common, uint64_t common_nbytes, const uint8_t* keys,
                        uint64_t keys_nbytes, const uint64_t* ends, const uint8_t* secret,
                        int32_t* statuses) {
  uint64_t from = 0;
  const uint64_t none = 0;
  uint8_t any_key[16];
  std::string entries;
  if (secret != nullptr) mc_digest(keys, &none, 1, secret, any_key);
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t start = std::exchange(from, std::max(from, ends[i]));
    if (statuses[i] != MC_OK) continue;
    if (ends[i] < start || ends[i] > keys_nbytes) {
      statuses[i] = MC_E_USAGE;
      continue;
    }
    const uint64_t length = ends[i] - start;
    if (secret != nullptr) {
      uint8_t digest[16];
      mc_digest(keys + start, &length, 1, secret, digest);
      if (std::memcmp(digest, rows[i].digest, 16) != 0 &&
          std::memcmp(any_key, rows[i].digest, 16) != 0) {
        statuses[i] = MC_E_ACCESS;
        continue;
      }
    }
    std::string name;
    name.reserve(common_nbytes + length);
    name.append(reinterpret_cast<const char*>(common), common_nbytes);
    name.append(reinterpret_cast<const char*>(keys + start), length);
    const std::lock_guard guard(segment->mutex);
    Extent* extent = segment->writing(rows[i]);
    if (extent == nullptr) continue;
    if (segment->journal >= 0) append_entry(&entries, rows[i], name);
    extent->name = std::move(name);
  }
  const std::lock_guard guard(segment->mutex);
  segment->write_down(entries);
  return MC_OK;
}

int32_t mc_segment_unseal(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                          int32_t* statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    segment->unseal(rows[i]);
    statuses[i] = MC_OK;
  }
  return MC_OK;
}

int32_t mc_segment_hold(mc_segment* segment, const mc_extent_row* rows, uint64_t n,
                        int32_t* statuses) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    if (statuses[i] == MC_OK) statuses[i] = no_throw([&] { return segment->hold(rows[i]); });
  }
  return MC_OK;
}

int32_t mc_segment_release(mc_segment* segment, const mc_extent_row* rows, uint64_t n) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) segment->release(rows[i]);
  return MC_OK;
}

int32_t mc_segment_stat(mc_segment* segment, mc_segment_stats* out) {
  const std::lock_guard guard(segment->mutex);
  *out = segment->stats;
  out->held_count = segment->holds.size();
  return MC_OK;
}

int64_t mc_segment_inventory(mc_segment* segment, uint64_t offset, mc_extent_row* rows,
                             uint64_t n) {
  const std::lock_guard guard(segment->mutex);
  uint64_t count = 0;
  for (auto it = segment->table.lower_bound(offset); it != segment->table.end() && count < n;
       ++it) {
    if (!it->second.writing) rows[count++] = it->second.row;
  }
  return static_cast<int64_t>(count);
}

int64_t mc_segment_named(mc_segment* segment, uint64_t offset, const mc_generations* ranges,
                         uint64_t range_count, uint32_t mark, mc_extent_row* rows, uint64_t n,
                         uint8_t* names, uint64_t names_nbytes, uint64_t* name_ends,
                         uint64_t* next) {
  const std::lock_guard guard(segment->mutex);
  uint64_t count = 0, looked = 0, used = 0;
  auto it = segment->table.lower_bound(offset);
  for (; it != segment->table.end() && count < n && looked < kLookMax; ++it, ++looked) {
    const Extent& extent = it->second;
    if (extent.writing || (mark != 0 && extent.mark == mark)) continue;
    if (!in_ranges(extent.row.generation, ranges, range_count)) continue;
    if (extent.name.size() > names_nbytes - used) {
      if (count == 0) return MC_E_USAGE;
      break;
    }
    std::memcpy(names + used, extent.name.data(), extent.name.size());
    used += extent.name.size();
    name_ends[count] = used;
    rows[count++] = extent.row;
  }
  *next = it == segment->table.end() ? std::numeric_limits<uint64_t>::max() : it->first;
  return static_cast<int64_t>(count);
}

int32_t mc_segment_mark(mc_segment* segment, const mc_replica* replicas, uint64_t n, uint32_t mark,
                        uint8_t* absent) {
  const std::lock_guard guard(segment->mutex);
  for (uint64_t i = 0; i < n; ++i) {
    const auto it = segment->table.find(replicas[i].offset);
    const bool there = it != segment->table.end() && !it->second.writing &&
                       it->second.row.generation == replicas[i].generation;
    absent[i] = there ? 0 : 1;
    if (there) it->second.mark = mark;
  }
  return MC_OK;
}

int32_t mc_segment_journal(mc_segment* segment, int32_t fd) {
  if (fd < 0) return MC_E_USAGE;
  const std::lock_guard guard(segment->mutex);
  const uint64_t failures = segment->stats.journal_failures;
  const int former = std::exchange(segment->journal, fd);
  const uint64_t former_nbytes = std::exchange(segment->stats.journal_nbytes, 0);
  const int32_t written = no_throw([&] {
    std::string entries;
    for (const auto& [offset, extent] : segment->table) {
      append_entry(&entries, extent.row, extent.name);
      if (entries.size() < kJournalStep) continue;
      segment->write_down(entries);
      entries.clear();
    }
    segment->write_down(entries);
    return MC_OK;
  });
  if (written == MC_OK && segment->stats.journal_failures == failures) return MC_OK;
  segment->journal = former;
  segment->stats.journal_nbytes = former_nbytes;
  return MC_E_OUT_OF_SPACE;
}

int32_t mc_segment_adopt(mc_segment* segment, const uint8_t* journal, uint64_t nbytes,
                         mc_adopted* out) {
  std::vector<JournalEntry> entries;
  const int32_t read = no_throw([&] {
    entries = survivors(journal, nbytes);
    return MC_OK;
  });
  if (read != MC_OK) return read;
  mc_adopted halves[2]{};
  bool short_of_memory[2]{};
  const auto adopt_half = [&](size_t half) {
    for (size_t i = half; i < entries.size(); i += 2) {
      const int32_t status =
          no_throw([&] { return segment->adopt(entries[i].row, entries[i].name); });
      halves[half].count += status == MC_OK;
      halves[half].damaged += status == MC_E_CHECKSUM;
      halves[half].torn += status != MC_OK && status != MC_E_CHECKSUM;
      short_of_memory[half] |= status == MC_E_OUT_OF_SPACE;
    }
  };
  std::thread helper;
  const int32_t started = no_throw([&] {
    helper = std::thread(adopt_half, 1);
    return MC_OK;
  });
  adopt_half(0);
  if (started == MC_OK) helper.join();
  else adopt_half(1);
  *out = {halves[0].count + halves[1].count, halves[0].torn + halves[1].torn,
          halves[0].damaged + halves[1].damaged};
  return short_of_memory[0] || short_of_memory[1] ? MC_E_OUT_OF_SPACE : MC_OK;
}

}  // extern "C"
