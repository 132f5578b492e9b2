#include "transport/rdma/memory_book.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "base/status.h"

namespace mc::rdma {
namespace {

uint64_t pinned_bytes() {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    uint64_t kib = 0;
    if (word == "VmPin:" && file >> kib) return kib * 1024;
  }
  return 0;
}

int node_of(uint64_t address) {
  void* page = reinterpret_cast<void*>(address & ~uint64_t{4095});
  int node = -1;
  const long asked = syscall(SYS_move_pages, 0, 1UL, &page, nullptr, &node, 0);
  return asked == 0 && node >= 0 ? node : -1;
}

int32_t refused(const Adapter& adapter, Range range, int error) {
  const std::string what = adapter.name() + " does not register " + std::to_string(range.nbytes) +
                           " bytes: ";
  if (error != ENOMEM && error != EAGAIN) {
    return fail(MC_E_OUT_OF_SPACE, "%s%s", what.c_str(), errno_text(error).c_str());
  }
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const uint64_t pinned = pinned_bytes();
  if (limit.rlim_cur == RLIM_INFINITY || pinned + range.nbytes <= limit.rlim_cur) {
    return fail(MC_E_OUT_OF_SPACE, "%s%s (the device's or the system's limit)", what.c_str(),
                errno_text(error).c_str());
  }
  return fail(MC_E_OUT_OF_SPACE, "%s%s", what.c_str(),
              locked_memory_words(range.nbytes, limit.rlim_cur, pinned).c_str());
}

}  // namespace

// ---- Registration ------------------------------------------------------------------------------

int32_t Registration::begin(uint32_t access) {
  int flags = verbs::kLocalWrite;
  if ((access & MC_ACCESS_REMOTE_READ) != 0) flags |= verbs::kRemoteRead;
  if ((access & MC_ACCESS_REMOTE_WRITE) != 0) flags |= verbs::kRemoteWrite;
  for (const auto& adapter : adapters_) {
    verbs::Mr* mr = adapter->register_memory(range_.address, range_.nbytes, flags);
    if (mr == nullptr && (flags & verbs::kRemoteWrite) == 0 && errno != ENOMEM) {
      // Memory that is mapped read-only can be read by peers all the same.
      flags &= ~verbs::kLocalWrite;
      mr = adapter->register_memory(range_.address, range_.nbytes, flags);
    }
    if (mr == nullptr) {
      const int32_t status = refused(*adapter, range_, errno);
      end();
      return status;
    }
    keys_[mrs_.size()] = {mr->lkey, mr->rkey};
    mrs_.push_back(mr);
  }
  writable_ = (flags & verbs::kLocalWrite) != 0;
  readable_by_peers_ = (flags & verbs::kRemoteRead) != 0;
  numa_node_ = node_of(range_.address);
  return MC_OK;
}

void Registration::end() {
  ended_ = true;
  for (size_t i = 0; i < mrs_.size(); ++i) adapters_[i]->deregister_memory(mrs_[i]);
  mrs_.clear();
}

// ---- MemoryBook --------------------------------------------------------------------------------

int32_t MemoryBook::register_range(Range range, const Region& region, Registrations* out) {
  // Raw memory is for our own work requests: no peer is told its keys, and none would be good.
  const uint32_t access = region.is_raw() ? 0 : region.access();
  const int64_t begun = now_ns();
  Registrations made;
  for (const Range& cut : split_range(range, limit_bytes_)) {
    auto registration = std::make_shared<Registration>(adapters_, cut, region.is_raw());
    if (const int32_t status = registration->begin(access); status != MC_OK) {
      const std::lock_guard lock(mutex_);
      ++numbers_.refused;
      numbers_.refusal = last_error();
      return status;
    }
    made.push_back(std::move(registration));
  }
  const std::lock_guard lock(mutex_);
  numbers_.total += made.size();
  numbers_.total_ns += static_cast<uint64_t>(now_ns() - begun);
  out->insert(out->end(), made.begin(), made.end());
  return MC_OK;
}

int32_t MemoryBook::add(const Region& region) {
  if ((region.access() & MC_ACCESS_GATHERED) != 0) return MC_OK;
  {
    const std::lock_guard lock(mutex_);
    if (by_region_.contains(region.id())) return MC_OK;  // one more user of the same range
  }
  Registrations made;
  for (const mc_piece& piece : region.pieces()) {
    const int32_t status = register_range({piece.address, piece.nbytes}, region, &made);
    if (status != MC_OK) return status;
  }
  const std::lock_guard lock(mutex_);
  for (const auto& one : made) by_address_[one->address()] = one;
  by_region_[region.id()] = std::move(made);
  return MC_OK;
}

void MemoryBook::end_all(Registrations registrations, Deadline deadline) {
  const timespec pause{0, 50'000};
  for (auto& one : registrations) {
    // Transfers that use it as local memory end soon; those that do not are cut off.
    while (one.use_count() > 1 && !deadline.passed()) nanosleep(&pause, nullptr);
    one->end();
  }
}

void MemoryBook::drop(uint32_t region, Deadline deadline) {
  Registrations mine;
  {
    const std::lock_guard lock(mutex_);
    const auto found = by_region_.find(region);
    if (found == by_region_.end()) return;
    for (const auto& one : found->second) {
      const auto at = by_address_.find(one->address());
      if (at != by_address_.end() && at->second == one) by_address_.erase(at);
    }
    mine = std::move(found->second);
    by_region_.erase(found);
    gathered_.erase(region);
  }
  end_all(std::move(mine), deadline);
}

void MemoryBook::drop_all() {
  std::unordered_map<uint32_t, Registrations> all;
  {
    const std::lock_guard lock(mutex_);
    by_address_.clear();
    gathered_.clear();
    all.swap(by_region_);
  }
  for (auto& [id, registrations] : all) end_all(std::move(registrations), Deadline::in_ms(0));
}

std::shared_ptr<Registration> MemoryBook::covering_locked(uint64_t address) const {
  auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  const auto& one = std::prev(after)->second;
  return address - one->address() < one->nbytes() ? one : nullptr;
}

std::shared_ptr<Registration> MemoryBook::find(uint64_t address, Use use) {
  const std::lock_guard lock(mutex_);
  auto found = covering_locked(address);
  if (!found) return nullptr;
  switch (use) {
    case Use::kTarget: return found->writable() ? found : nullptr;
    case Use::kReadByPeers: return found->readable_by_peers() ? found : nullptr;
    default: return found;
  }
}

Span MemoryBook::span_of(const Registration& one, uint64_t offset, Range range) const {
  Span span{offset, range.address, range.nbytes, {}};
  for (size_t i = 0; i < adapters_.size(); ++i) span.rkeys[i] = one.rkey(i);
  return span;
}

std::vector<Span> MemoryBook::spans(const Region& region) {
  if ((region.access() & MC_ACCESS_GATHERED) != 0) {
    {
      const std::lock_guard lock(mutex_);
      const auto known = gathered_.find(region.id());
      if (known != gathered_.end()) return known->second;
    }
    return gathered_spans(region);
  }
  std::vector<Span> out;
  const std::lock_guard lock(mutex_);
  const auto found = by_region_.find(region.id());
  if (found == by_region_.end()) return out;
  uint64_t offset = 0;
  for (const auto& one : found->second) {  // in the order of the pieces
    out.push_back(span_of(*one, offset, {one->address(), one->nbytes()}));
    offset += one->nbytes();
  }
  return out;
}

// Each value by what covers it already, or, if it is worth it, by a registration for it alone.
std::vector<Span> MemoryBook::gathered_spans(const Region& region) {
  std::vector<Span> out;
  Registrations made;
  uint64_t offset = 0;
  for (const mc_piece& piece : region.pieces()) {
    const auto shared = find(piece.address, Use::kReadByPeers);
    const size_t before = made.size();
    if (shared && piece.address + piece.nbytes <= shared->address() + shared->nbytes()) {
      out.push_back(span_of(*shared, offset, {piece.address, piece.nbytes}));
    } else if (piece.nbytes >= kGatherMin) {
      (void)register_range({piece.address, piece.nbytes}, region, &made);
    }
    uint64_t at = offset;
    for (size_t i = before; i < made.size(); ++i) {
      out.push_back(span_of(*made[i], at, {made[i]->address(), made[i]->nbytes()}));
      at += made[i]->nbytes();
    }
    offset += piece.nbytes;
  }
  const std::lock_guard lock(mutex_);
  // Revoked meanwhile: what was made here goes with this function, and its keys are void.
  if (region.alive()) {
    Registrations& kept = by_region_[region.id()];
    kept.insert(kept.end(), made.begin(), made.end());
    gathered_[region.id()] = out;  // whoever asks next; each of several nodes does
  }
  return out;
}

MemoryNumbers MemoryBook::numbers() const {
  const std::lock_guard lock(mutex_);
  MemoryNumbers out = numbers_;
  for (const auto& [id, registrations] : by_region_) {
    for (const auto& one : registrations) {
      ++out.registrations;
      out.registered_bytes += one->nbytes();
    }
  }
  return out;
}

// ---- Staging -----------------------------------------------------------------------------------

Staging::~Staging() {
  registration_.reset();
  if (base_ != 0) munmap(reinterpret_cast<void*>(base_), kBytes);
}

int32_t Staging::open_locked() {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail_errno(MC_E_OUT_OF_SPACE, "no memory to pass bytes through");
  base_ = reinterpret_cast<uint64_t>(memory);
  auto registration = std::make_shared<Registration>(adapters_, Range{base_, kBytes});
  const int32_t status = registration->begin(0);
  if (status != MC_OK) return status;
  registration_ = std::move(registration);
  free_[base_] = kBytes;
  return MC_OK;
}

int32_t Staging::allocate(uint64_t nbytes, uint64_t* out_address) {
  const uint64_t need = (nbytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(mutex_);
  if (base_ == 0 && !failed_) failed_ = open_locked() != MC_OK;
  if (failed_) return MC_E_OUT_OF_SPACE;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < need) continue;
    *out_address = it->first;
    const uint64_t left = it->second - need;
    free_.erase(it);
    if (left > 0) free_[*out_address + need] = left;
    return MC_OK;
  }
  return MC_E_BACKPRESSURE;
}

void Staging::free(uint64_t address, uint64_t nbytes) {
  uint64_t need = (nbytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(mutex_);
  auto after = free_.lower_bound(address);
  if (after != free_.end() && after->first == address + need) {
    need += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == address) {
      before->second += need;
      return;
    }
  }
  free_[address] = need;
}

}  // namespace mc::rdma
