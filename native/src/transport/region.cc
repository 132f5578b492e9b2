#include "transport/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/status.h"
#include "transport/raw.h"

namespace mc {
namespace {

std::vector<uint64_t> starts_of(const std::vector<mc_piece>& pieces) {
  std::vector<uint64_t> starts;
  uint64_t at = 0;
  for (const mc_piece& piece : pieces) {
    starts.push_back(at);
    at += piece.nbytes;
  }
  return starts;
}

uint64_t sum_of(const std::vector<mc_piece>& pieces) {
  uint64_t sum = 0;
  for (const mc_piece& piece : pieces) sum += piece.nbytes;
  return sum;
}

}  // namespace

Region::Region(uint32_t id, std::vector<mc_piece> pieces, uint32_t access, Fd fd)
    : id_(id),
      pieces_(std::move(pieces)),
      starts_(starts_of(pieces_)),
      nbytes_(sum_of(pieces_)),
      access_(access),
      fd_(std::move(fd)) {}

bool Region::allows(uint32_t access, uint64_t offset, uint64_t length) const {
  if ((access_ & access) != access || offset > nbytes_ || length > nbytes_ - offset) return false;
  return (access_ & MC_ACCESS_RAW) == 0 || all_mapped(offset, length);
}

bool is_mapped(uint64_t address, uint64_t nbytes) {
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = address / page * page;
  return msync(reinterpret_cast<void*>(first), address + nbytes - first, MS_ASYNC) == 0;
}

// Nobody holds raw memory for us.
bool Region::all_mapped(uint64_t offset, uint64_t length) const {
  std::vector<iovec> pieces;
  slice(offset, length, &pieces);
  return std::all_of(pieces.begin(), pieces.end(), [](const iovec& piece) {
    return is_mapped(reinterpret_cast<uint64_t>(piece.iov_base), piece.iov_len);
  });
}

void Region::slice(uint64_t offset, uint64_t length, std::vector<iovec>* out) const {
  each_piece(offset, length, [out](const iovec& piece) { out->push_back(piece); });
}

int32_t Region::crc(const std::vector<iovec>& pieces, uint64_t nbytes, uint32_t* crc) const {
  for (const iovec& piece : pieces) {
    const uint64_t n = std::min<uint64_t>(nbytes, piece.iov_len);
    if (!is_raw()) *crc = mc_crc32c(piece.iov_base, n, *crc);
    else if (!crc_raw(reinterpret_cast<uint64_t>(piece.iov_base), n, crc)) return MC_E_ACCESS;
    nbytes -= n;
  }
  return MC_OK;
}

bool Region::pin() {
  if ((state_.fetch_add(1, std::memory_order_acq_rel) & kRevoked) == 0) return true;
  unpin();
  return false;
}

void Region::unpin() { state_.fetch_sub(1, std::memory_order_acq_rel); }

bool Region::add_writer(std::shared_ptr<OutsideWriter> writer) {
  const std::lock_guard lock(writers_mutex_);
  std::erase_if(writers_, [](const auto& old) { return old->withdrawn() && old->quiet(); });
  writers_.push_back(std::move(writer));  // also a late one: it may have begun
  if (alive()) return true;
  writers_.back()->withdraw();
  return false;
}

void Region::revoke() {
  const std::lock_guard lock(writers_mutex_);
  state_.fetch_or(kRevoked, std::memory_order_acq_rel);
  for (const auto& writer : writers_) writer->withdraw();
}

bool Region::quiet() const {
  if ((state_.load(std::memory_order_acquire) & ~kRevoked) != 0) return false;
  const std::lock_guard lock(writers_mutex_);
  return std::all_of(writers_.begin(), writers_.end(),
                     [](const auto& writer) { return writer->quiet(); });
}

bool Region::wait_quiet(Deadline deadline) const {
  const timespec pause{0, 20'000};  // pins span one copy; nobody pays for a wake-up on each unpin
  while (!quiet()) {
    if (deadline.passed()) return false;
    nanosleep(&pause, nullptr);
  }
  return true;
}

int32_t RegionTable::check_overlap(const std::vector<mc_piece>& pieces, uint32_t access) const {
  for (const auto& [id, entry] : entries_) {
    const uint32_t other = entry.region->access();
    const bool harmless = ((access | other) & MC_ACCESS_REMOTE_WRITE) == 0;
    if (harmless && ((access | other) & MC_ACCESS_GATHERED) != 0) continue;
    for (const mc_piece& old : entry.region->pieces()) {
      for (const mc_piece& piece : pieces) {
        if (piece.address < old.address + old.nbytes && old.address < piece.address + piece.nbytes) {
          return fail(MC_E_USAGE,
                      "memory [%#lx, +%lu) overlaps [%#lx, +%lu) of region %u",
                      piece.address, piece.nbytes, old.address, old.nbytes, id);
        }
      }
    }
  }
  return MC_OK;
}

int32_t RegionTable::add(const mc_piece* pieces, uint64_t n, uint32_t access, int fd,
                         uint32_t* out_id) {
  if (n == 0 || pieces == nullptr) return fail(MC_E_USAGE, "a region needs at least one piece");
  const uint32_t offered = access & (MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE);
  if (offered == 0 || (access & ~(offered | MC_ACCESS_GATHERED | MC_ACCESS_RAW)) != 0) {
    return fail(MC_E_USAGE, "access %#x is not a mask of MC_ACCESS_*", access);
  }
  uint64_t total = 0;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t end = 0;
    if (pieces[i].address == 0 || pieces[i].nbytes == 0 ||
        __builtin_add_overflow(pieces[i].address, pieces[i].nbytes, &end) ||
        __builtin_add_overflow(total, pieces[i].nbytes, &total)) {
      return fail(MC_E_USAGE, "piece %lu: [%#lx, +%lu) is no range of memory", i,
                  pieces[i].address, pieces[i].nbytes);
    }
  }
  Fd own;
  if (fd >= 0 && n == 1) {
    own.reset(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!own) return fail_errno(MC_E_USAGE, "fd %d of the region", fd);
  }
  const std::lock_guard lock(mutex_);
  if (n == 1) {
    for (auto& [id, entry] : entries_) {
      const Region& old = *entry.region;
      if (old.pieces().size() == 1 && old.pieces()[0].address == pieces[0].address &&
          old.nbytes() == total && old.access() == access) {
        ++entry.count;
        *out_id = id;
        return MC_OK;
      }
    }
  }
  std::vector<mc_piece> copy(pieces, pieces + n);
  if (const int32_t status = check_overlap(copy, access); status != MC_OK) return status;
  const uint32_t id = next_id_++;
  entries_[id].region = std::make_shared<Region>(id, std::move(copy), access, std::move(own));
  *out_id = id;
  return MC_OK;
}

int32_t RegionTable::drop(uint32_t id, std::shared_ptr<Region>* out_last) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return fail(MC_E_ACCESS, "no region %u is registered", id);
  if (--found->second.count > 0) return MC_OK;
  *out_last = std::move(found->second.region);
  entries_.erase(found);
  return MC_OK;
}

std::shared_ptr<Region> RegionTable::find(uint32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : found->second.region;
}

std::vector<std::shared_ptr<Region>> RegionTable::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Region>> out;
  for (const auto& [id, entry] : entries_) out.push_back(entry.region);
  return out;
}

}  // namespace mc
