#include "transport/shm/gate.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "transport/shm/proof.h"

namespace mc {
namespace {

constexpr size_t kGateBytes = kGateSlots * sizeof(GateSlot);

GateSlot* map_gate(const Fd& fd) {
  void* at = mmap(nullptr, kGateBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  return at == MAP_FAILED ? nullptr : static_cast<GateSlot*>(at);  // zeros are a closed slot
}

// The state letter of /proc/PID/task/TID/stat; 0: no such thread.
char state_of(const char* path) {
  const Fd file(open(path, O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t n = file ? read(file.get(), text, sizeof text - 1) : 0;
  if (n <= 0) return 0;
  text[n] = '\0';
  const char* name_end = strrchr(text, ')');
  return name_end != nullptr && name_end + 2 < text + n ? name_end[2] : 'R';
}

}  // namespace

Gate::~Gate() { munmap(slots_, kGateBytes); }

std::shared_ptr<Gate> Gate::make(Fd* out_fd) {
  Fd fd(memfd_create("mooncake gate", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ftruncate(fd.get(), kGateBytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return nullptr;
  }
  GateSlot* const slots = map_gate(fd);
  if (slots == nullptr) return nullptr;
  *out_fd = std::move(fd);
  return std::shared_ptr<Gate>(new Gate(slots));
}

std::shared_ptr<Gate> Gate::join(const Fd& fd) {
  if (!is_safe_to_map(fd.get(), kGateBytes)) return nullptr;
  GateSlot* const slots = map_gate(fd);
  return slots == nullptr ? nullptr : std::shared_ptr<Gate>(new Gate(slots));
}

bool PeerProcess::lives() const {
  pollfd ended{pidfd_.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

bool PeerProcess::stands_still() const {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/task", pid_);
  DIR* const tasks = opendir(path);
  if (tasks == nullptr) return false;
  bool still = true;
  size_t seen = 0;
  while (const dirent* task = still ? readdir(tasks) : nullptr) {
    if (task->d_name[0] == '.') continue;
    ++seen;
    char stat[128];
    snprintf(stat, sizeof stat, "/proc/%d/task/%.20s/stat", pid_, task->d_name);
    const char state = state_of(stat);
    still = state == 0 || strchr("TtZXx", state) != nullptr;
  }
  closedir(tasks);
  return still && seen > 0 && lives();  // else it may have been another process's
}

// One region that the peer may write; held by the region.
class GateKeeper::Admission final : public OutsideWriter {
 public:
  Admission(std::shared_ptr<Gate> gate, std::shared_ptr<PeerProcess> peer, GateSlot& slot,
            uint32_t region)
      : gate_(std::move(gate)), peer_(std::move(peer)), slot_(slot), region_(region) {}
  void withdraw() override {
    uint32_t mine = region_;  // the slot may be another region's by now
    slot_.open.compare_exchange_strong(mine, 0);
  }
  bool quiet() const override {
    const bool is_anothers = slot_.open != 0 && withdrawn();  // was quiet before it became so
    return is_anothers || slot_.writers == 0 || !peer_->lives() || peer_->stands_still();
  }
  bool withdrawn() const override { return slot_.open != region_; }

 private:
  const std::shared_ptr<Gate> gate_;
  const std::shared_ptr<PeerProcess> peer_;
  GateSlot& slot_;
  const uint32_t region_;
};

int32_t GateKeeper::admit(const std::shared_ptr<Region>& region) {
  const std::lock_guard lock(mutex_);
  if (closed_) return -1;
  int32_t chosen = -1;
  for (uint32_t i = 0; i < kGateSlots; ++i) {
    GateSlot& slot = gate_->slot(i);
    if (slot.open == region->id()) return static_cast<int32_t>(i);  // it asked once more
    // Nobody is in there, so whoever comes late finds another id.
    if (chosen < 0 && slot.open == 0 && slot.writers == 0) chosen = static_cast<int32_t>(i);
  }
  if (chosen < 0) return -1;
  GateSlot& slot = gate_->slot(static_cast<uint32_t>(chosen));
  slot.open = region->id();
  // In this order: a region that is revoked meanwhile withdraws what it has taken in.
  const auto admission = std::make_shared<Admission>(gate_, peer_, slot, region->id());
  return region->add_writer(admission) ? chosen : -1;
}

void GateKeeper::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (uint32_t i = 0; i < kGateSlots; ++i) gate_->slot(i).open = 0;
}

}  // namespace mc
