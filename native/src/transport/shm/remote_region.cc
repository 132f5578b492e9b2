#include "transport/shm/remote_region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/status.h"
#include "transport/shm/guarded_copy.h"
#include "transport/shm/proof.h"

namespace mc {

RemoteRegion::RemoteRegion(uint32_t id, std::vector<mc_piece> pieces, uint32_t access, Fd fd,
                           std::shared_ptr<GateSlot> slot)
    : shape_(std::make_shared<Region>(id, std::move(pieces), access, Fd())),
      fd_(std::move(fd)),
      slot_(std::move(slot)),
      mappable_(shape_->pieces().size() == 1 && is_safe_to_map(fd_.get(), shape_->nbytes())),
      readable_(shape_->pieces().size() == 1 && is_memory(fd_.get(), shape_->nbytes())) {}

RemoteRegion::~RemoteRegion() {
  if (const uint8_t* at = mapped_) munmap(const_cast<uint8_t*>(at), shape_->nbytes());
}

const uint8_t* RemoteRegion::map() {
  if (const uint8_t* at = mapped()) return at;
  if (!mappable_) return nullptr;
  const std::lock_guard lock(mutex_);
  if (const uint8_t* at = mapped()) return at;
  if (slot_) {
    void* at = mmap(nullptr, shape_->nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                    fd_.get(), 0);
    if (at != MAP_FAILED) mapped_ = static_cast<const uint8_t*>(at);
    else slot_.reset();  // its owner sealed it
  }
  uint64_t address = 0;
  if (mapped() == nullptr && map_for_caller(&address) == MC_OK) {
    mapped_ = reinterpret_cast<const uint8_t*>(address);
  }
  return mapped_;
}

int32_t RemoteRegion::write(uint64_t offset, uint64_t local, uint64_t nbytes) {
  uint8_t* const to = const_cast<uint8_t*>(mapped()) + offset;
  ++slot_->writers;
  const Guarded outcome = copy_guarded(slot_->open, shape_->id(), to,
                                       reinterpret_cast<const void*>(local), nbytes);
  --slot_->writers;
  if (outcome == Guarded::kDone) return MC_OK;
  return outcome == Guarded::kWithdrawn ? MC_E_ACCESS : MC_E_PEER_UNREACHABLE;
}

bool RemoteRegion::read(uint64_t offset, uint64_t nbytes, uint64_t to) const {
  while (nbytes > 0) {
    const ssize_t n = pread(fd_.get(), reinterpret_cast<void*>(to), nbytes,
                            static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    offset += static_cast<uint64_t>(n);
    to += static_cast<uint64_t>(n);
    nbytes -= static_cast<uint64_t>(n);
  }
  return true;
}

int32_t RemoteRegion::map_for_caller(uint64_t* out_address) const {
  if (!mappable_) return fail(MC_E_ACCESS, "region %u is no memfd that can be mapped", shape_->id());
  void* at = mmap(nullptr, shape_->nbytes(), PROT_READ, MAP_SHARED | MAP_POPULATE, fd_.get(), 0);
  if (at == MAP_FAILED) return fail_errno(MC_E_ACCESS, "mmap of region %u", shape_->id());
  *out_address = reinterpret_cast<uint64_t>(at);
  return MC_OK;
}

}  // namespace mc
