#include "transport/shm/shm_endpoint.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transport/copy.h"

namespace mc {
namespace {

constexpr uint64_t kGroupBytes = 1 << 20;   // copied between two looks at stop and deadline
constexpr size_t kGroupParts = 128;
constexpr uint64_t kInlineMax = 256 << 10;  // of an asynchronous batch, copied by its caller

uint32_t access_for(uint32_t op) {
  return op == MC_OP_READ ? MC_ACCESS_REMOTE_READ : MC_ACCESS_REMOTE_WRITE;
}

}  // namespace

ShmEndpoint::ShmEndpoint(Host& host, Introduction peer, StreamLimits limits, ShmTies ties)
    : StreamEndpoint(host, std::move(peer), limits, "shm"),
      ties_(std::move(ties)),
      process_(ties_.pidfd ? std::make_shared<PeerProcess>(ties_.pid, std::move(ties_.pidfd))
                           : nullptr) {}

std::string ShmEndpoint::reason() const {
  std::string text = "shm: shared memory proven; memfds are mapped";
  text += ties_.we_read ? "; memory that is not a memfd by process_vm_readv"
                        : "; memory that is not a memfd through the socket (" + ties_.why_not + ")";
  if (!ties_.it_reads) text += "; writes through the socket";
  return text;
}

EndpointNumbers ShmEndpoint::numbers() const {
  EndpointNumbers sum = StreamEndpoint::numbers();
  sum.bytes_in += direct_in_ + pulled_in_;
  sum.bytes_out += direct_out_;
  return sum;
}

// ---- what the peer's regions look like -------------------------------------------------------

std::shared_ptr<RemoteRegion> ShmEndpoint::known(uint32_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second;
}

std::shared_ptr<ShmEndpoint::Query> ShmEndpoint::ask(uint32_t id) {
  const auto query = std::make_shared<Query>();
  FrameHead head;
  head.type = FrameType::kQuery;
  head.a = id;
  {
    const std::lock_guard lock(mutex_);
    head.tag = next_query_++;
    queries_[head.tag] = query;
  }
  const int32_t status = lane(0)->write(
      [&](OutQueue& out) { return out.send(head, nullptr, OutQueue::Room::kAlways); });
  if (status != MC_OK || is_closed()) {
    const std::lock_guard lock(mutex_);
    if (queries_.erase(head.tag) > 0) {
      query->status = MC_E_PEER_UNREACHABLE;
      query->done.set();
    }
  }
  return query;
}

int32_t ShmEndpoint::resolve(uint32_t id, Deadline deadline, std::shared_ptr<RemoteRegion>* out) {
  *out = known(id);
  if (*out) return MC_OK;
  const std::shared_ptr<Query> query = ask(id);
  if (!host().loop().wait(query->done, deadline)) return fail(MC_E_TIMEOUT, "the peer does not answer");
  if (query->status == MC_E_ACCESS) return fail(MC_E_ACCESS, "the peer has no region %u", id);
  if (query->status != MC_OK) return fail(query->status, "the peer is gone");
  *out = query->region;
  return MC_OK;
}

bool ShmEndpoint::reachable(RemoteRegion& region, uint32_t op, bool may_map) {
  if (region.mapped() == nullptr && region.mappable()) {
    if (!may_map) return false;
    (void)region.map();
  }
  if (op == MC_OP_WRITE) return region.writable();
  return region.mapped() != nullptr || ties_.we_read || region.readable();
}

// True: every slice of the batch is of a region in *out and can be copied from here.
bool ShmEndpoint::gather_regions(const Batch& batch, bool blocking, Regions* out) {
  for (uint64_t i = 0; i < batch.count(); ++i) {
    const mc_slice& slice = batch.slice(i);
    const auto found = out->find(slice.region);
    if (found != out->end()) {
      if (slice.op == MC_OP_READ || found->second->writable()) continue;
      return false;
    }
    std::shared_ptr<RemoteRegion> region;
    if (blocking) {
      if (resolve(slice.region, batch.deadline(), &region) != MC_OK) return false;
    } else {
      region = known(slice.region);
      if (!region) {
        (void)ask(slice.region);
        return false;
      }
    }
    if (!reachable(*region, slice.op, blocking)) {
      if (!blocking && region->mapped() == nullptr && region->mappable()) host().executor().run([region] { region->map(); });
      return false;
    }
    out->emplace(slice.region, std::move(region));
  }
  return true;
}

// ---- one-sided -------------------------------------------------------------------------------------

void ShmEndpoint::submit(const std::shared_ptr<Batch>& batch, bool blocking) {
  Regions regions;
  const bool held = batch->writes() && has_late_writes();
  if (is_closed() || held || !gather_regions(*batch, blocking, &regions)) {
    return StreamEndpoint::submit(batch, blocking);
  }
  uint64_t total = 0;
  for (uint64_t i = 0; i < batch->count() && total <= kInlineMax; ++i) {
    total += std::min(batch->slice(i).length, kInlineMax + 1);
  }
  if (blocking || total <= kInlineMax) return run(batch, regions);
  const auto self = std::static_pointer_cast<ShmEndpoint>(shared_from_this());
  host().executor().run([self, batch, regions] { self->run(batch, regions); });
}

// What is mapped already. Nobody else knows of these slices, so that there is no batch to lock; and a
// peer that has just ended left its memory in our mapping, so that nobody is asked whether it lives.
int32_t ShmEndpoint::run_now(std::span<mc_slice> slices) {
  std::array<std::shared_ptr<RemoteRegion>, kNowSlices> regions;  // of each slice
  if (is_closed() || slices.size() > regions.size()) return kNotNow;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < slices.size(); ++i) {
      const auto found = regions_.find(slices[i].region);
      if (found == regions_.end() || found->second->mapped() == nullptr) return kNotNow;
      if (slices[i].op == MC_OP_WRITE && !found->second->writable()) return kNotNow;
      regions[i] = found->second;
    }
  }
  const bool writes = std::any_of(slices.begin(), slices.end(),
                                  [](const mc_slice& one) { return one.op == MC_OP_WRITE; });
  if (writes && has_late_writes()) return kNotNow;
  int32_t status = MC_OK;
  for (size_t i = 0; i < slices.size(); ++i) {
    const Part part = whole_part(slices[i], i);
    const Pin pin(regions[i]->shape());
    Result result;
    if (pin && pin->allows(access_for(part.op), part.remote_offset, part.length)) {
      result = copy_mapped(*regions[i], part);
    }
    slices[i].status = result.status;
    if (part.crc && result.status == MC_OK) slices[i].crc = result.crc;
    if (result.status != MC_OK && status == MC_OK) {
      status = fail(result.status, "slice %zu: %s", i, kRefused);
    }
  }
  return status;
}

void ShmEndpoint::run(const std::shared_ptr<Batch>& batch, const Regions& regions) {
  std::vector<Part> group;
  for (bool more = true; more;) {
    group.clear();
    uint64_t bytes = 0;
    while (group.size() < kGroupParts && bytes < kGroupBytes) {
      Part part;
      const Batch::Next next = batch->next_part(kGroupBytes, kGroupBytes, &part);
      more = next != Batch::Next::kEnd;
      if (next != Batch::Next::kPart) break;
      bytes += part.length;
      group.push_back(part);
    }
    if (!copy_group(batch, regions, group)) return;
  }
}

// False: the batch was ended.
bool ShmEndpoint::copy_group(const std::shared_ptr<Batch>& batch, const Regions& regions,
                             const std::vector<Part>& group) {
  if (group.empty()) return true;
  Copying copying(*batch);
  if (!copying) return false;
  std::vector<Result> results(group.size());
  std::map<uint32_t, Pin> pins;
  std::vector<size_t> by_process;  // parts that process_vm_readv brings, all in one call
  for (size_t i = 0; i < group.size(); ++i) {
    const Part& part = group[i];
    RemoteRegion& region = *regions.at(part.region);
    const Pin& pin = pins.try_emplace(part.region, region.shape()).first->second;
    if (!pin || !pin->allows(access_for(part.op), part.remote_offset, part.length)) continue;
    if (region.mapped() != nullptr) results[i] = copy_mapped(region, part);
    else if (region.readable()) results[i] = read_file(region, part);
    else by_process.push_back(i);
  }
  if (!by_process.empty()) copy_by_process(regions, group, by_process, &results);
  pins.clear();
  const bool lives = process_lives();  // else another process may have been read
  copying.end();
  for (size_t i = 0; i < group.size(); ++i) {
    if (!lives) batch->part_done(group[i], MC_E_PEER_UNREACHABLE, 0, "the peer's process ended");
    else batch->part_done(group[i], results[i].status, results[i].crc, kRefused);
  }
  if (!batch->deadline().passed() && !is_closed()) return true;
  if (is_closed()) {
    const Failure why = why_closed();
    batch->finish(why.status, why.reason.c_str());
  } else {
    batch->finish(MC_E_TIMEOUT, "the deadline passed during the copy");
  }
  return false;
}

ShmEndpoint::Result ShmEndpoint::copy_mapped(RemoteRegion& region, const Part& part) {
  Result result;
  if (part.op == MC_OP_WRITE) {
    result.status = region.write(part.remote_offset, part.local, part.length);
    if (result.status == MC_OK) direct_out_ += part.length;
    if (part.crc) {
      result.crc = mc_crc32c(reinterpret_cast<const void*>(part.local), part.length, 0);
    }
    return result;
  }
  const auto from = reinterpret_cast<uint64_t>(region.mapped()) + part.remote_offset;
  if (part.crc) result.crc = mc_copy_crc32c(part.local, from, part.length);
  else copy_bytes(part.local, from, part.length);
  result.status = MC_OK;
  direct_in_ += part.length;
  return result;
}

ShmEndpoint::Result ShmEndpoint::read_file(const RemoteRegion& region, const Part& part) {
  Result result;
  if (!region.read(part.remote_offset, part.length, part.local)) return result;
  if (part.crc) {
    result.crc = mc_crc32c(reinterpret_cast<const void*>(part.local), part.length, 0);
  }
  result.status = MC_OK;
  direct_in_ += part.length;
  return result;
}

void ShmEndpoint::copy_by_process(const Regions& regions, const std::vector<Part>& group,
                                  const std::vector<size_t>& which, std::vector<Result>* results) {
  std::vector<iovec> here, there;
  const auto add = [&](const Part& part) {
    if (part.length == 0) return;
    here.push_back({reinterpret_cast<void*>(part.local), part.length});
    regions.at(part.region)->shape()->slice(part.remote_offset, part.length, &there);
  };
  for (const size_t i : which) add(group[i]);
  bool all = read_memory(here, there) == MC_OK;
  for (const size_t i : which) {
    Result& result = (*results)[i];
    if (!all) {  // find out which of them cannot be read
      here.clear();
      there.clear();
      add(group[i]);
    }
    if (!all && read_memory(here, there) != MC_OK) continue;
    result.status = MC_OK;
    direct_in_ += group[i].length;
    if (group[i].crc) {
      const auto* at = reinterpret_cast<const void*>(group[i].local);
      result.crc = mc_crc32c(at, group[i].length, 0);
    }
  }
}

// Both lists describe the same number of bytes, cut differently.
int32_t ShmEndpoint::read_memory(std::span<const iovec> here, std::span<const iovec> there) {
  constexpr size_t kIovMax = 512;
  std::vector<iovec> to(here.begin(), here.end());
  size_t next = 0;
  while (!there.empty()) {
    const auto from = there.first(std::min(kIovMax, there.size()));
    uint64_t want = 0;
    for (const iovec& piece : from) want += piece.iov_len;
    // As many destinations as these sources fill; the last one may go on in the next call.
    std::vector<iovec> part;
    for (uint64_t left = want; left > 0;) {
      iovec& piece = to[next];
      const uint64_t n = std::min<uint64_t>(left, piece.iov_len);
      if (part.size() == kIovMax) return MC_E_INTERNAL;  // callers keep groups small
      part.push_back({piece.iov_base, n});
      piece.iov_base = static_cast<uint8_t*>(piece.iov_base) + n;
      piece.iov_len -= n;
      if (piece.iov_len == 0) ++next;
      left -= n;
    }
    const ssize_t got =
        process_vm_readv(ties_.pid, part.data(), part.size(), from.data(), from.size(), 0);
    if (got != static_cast<ssize_t>(want)) return MC_E_ACCESS;  // that memory is not there
    there = there.subspan(from.size());
  }
  return MC_OK;
}

bool ShmEndpoint::process_lives() const { return !process_ || process_->lives(); }

int32_t ShmEndpoint::map(uint32_t id, Deadline deadline, uint64_t* out_address,
                         uint64_t* out_nbytes) {
  std::shared_ptr<RemoteRegion> region;
  int32_t status = resolve(id, deadline, &region);
  if (status != MC_OK) return status;
  const Pin pin(region->shape());
  if (!pin) return fail(MC_E_ACCESS, "region %u was deregistered", id);
  status = region->map_for_caller(out_address);
  if (status == MC_OK) *out_nbytes = region->shape()->nbytes();
  return status;
}

// ---- writes ------------------------------------------------------------------------------------

void ShmEndpoint::issue_write(Connection& lane, const std::shared_ptr<Batch>& batch,
                              const Part& part, uint64_t tag) {
  if (!ties_.it_reads) return StreamEndpoint::issue_write(lane, batch, part, tag);
  pulls_.push_back({tag, part.region, part.crc ? kWriteCrc : 0, part.remote_offset, part.local,
                    part.length});
}

void ShmEndpoint::issued(Connection& lane) {
  for (size_t at = 0; at < pulls_.size(); at += kEntriesMax) {
    const size_t n = std::min<size_t>(pulls_.size() - at, kEntriesMax);
    FrameHead head;
    head.type = FrameType::kPull;
    head.a = static_cast<uint32_t>(n);
    head.nbytes = static_cast<uint32_t>(n * sizeof(PullEntry));
    (void)lane.write([&](OutQueue& out) {
      return out.send(head, pulls_.data() + at, OutQueue::Room::kAlways);
    });
  }
  pulls_.clear();
  StreamEndpoint::issued(lane);
}

}  // namespace mc
