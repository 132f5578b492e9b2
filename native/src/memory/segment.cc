// Memory that a node offers: populated, of a size that cannot shrink, known to be there.
//
// A memfd has no limit of its own: too large a one ends in SIGBUS at some later touch, or in the
// kernel's out-of-memory killer. So before anything is touched the size is compared with what the
// machine and the control groups have left, and again before every step of the allocation, which
// fallocate proves page by page. Pages are mapped in advance too (2.5 us a page otherwise, in the
// middle of somebody's put), by several threads: one cannot keep up with the kernel's zeroing.

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/abi.h"

namespace mc::memory {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kStep = 256 << 20;
constexpr uint64_t kMargin = 32 << 20;  // left to the rest of the machine
constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kLargest = uint64_t{1} << 46;
constexpr size_t kNameMax = 200;
constexpr uint64_t kPopulatorsMax = 8;

// The number after `name` in a file of "name number" lines; `name` empty: the first number.
uint64_t number_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  while (name != "" && file >> word && word != name) {
  }
  uint64_t number = 0;
  return file >> number ? number : kUnknown;
}

struct GroupFiles {
  const char* root;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // in memory.stat: counted as used, given back on demand
};

constexpr GroupFiles kUnified = {"/sys/fs/cgroup", "/memory.max", "/memory.current",
                                 "inactive_file"};
constexpr GroupFiles kLegacy = {"/sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                                "/memory.usage_in_bytes", "total_inactive_file"};

uint64_t left_in_group(const GroupFiles& files, const std::string& group) {
  const std::string folder = files.root + group;
  const uint64_t limit = number_in(folder + files.limit, "");
  const uint64_t usage = number_in(folder + files.usage, "");
  if (limit == kUnknown || usage == kUnknown) return kUnknown;
  const uint64_t cache = number_in(folder + "/memory.stat", files.reclaimable);
  const uint64_t used = usage - (cache == kUnknown ? 0 : std::min(cache, usage));
  return limit - std::min(used, limit);
}

// What this process could still allocate: of the machine, and of every control group above it.
uint64_t available() {
  uint64_t left = number_in("/proc/meminfo", "MemAvailable:");
  if (left != kUnknown) left *= 1024;
  std::ifstream file("/proc/self/cgroup");
  std::string line;  // "0::/group", or "4:memory:/group" in the older layout
  while (std::getline(file, line)) {
    const bool unified = line.starts_with("0::");
    if (!unified && line.find(":memory:") == std::string::npos) continue;
    std::string group = line.substr(line.rfind(':') + 1);
    while (true) {
      while (!group.empty() && group.back() == '/') group.pop_back();
      left = std::min(left, left_in_group(unified ? kUnified : kLegacy, group));
      if (group.empty()) break;
      group.resize(group.rfind('/'));
    }
  }
  return left;
}

bool room_for(uint64_t nbytes) {
  const uint64_t left = available();
  // Page tables take another 1/512.
  return left == kUnknown || (left > kMargin && nbytes + nbytes / 512 <= left - kMargin);
}

// One descriptor and its mapping; whatever was not handed out is given back.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (address_ != MAP_FAILED) munmap(address_, nbytes_);
    if (fd_ >= 0) close(fd_);
  }

  int32_t open(const char* name, uint64_t nbytes, unsigned flags) {
    fd_ = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (fd_ < 0) return errno == ENOMEM ? MC_E_OUT_OF_SPACE : MC_E_INTERNAL;
    if (ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) return MC_E_OUT_OF_SPACE;
    for (uint64_t at = 0; at < nbytes; at += kStep) {
      const uint64_t step = std::min(kStep, nbytes - at);
      if ((flags & MFD_HUGETLB) == 0 && !room_for(step)) return MC_E_OUT_OF_SPACE;
      if (!allocate(at, step)) return MC_E_OUT_OF_SPACE;
    }
    nbytes_ = nbytes;
    address_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    return address_ == MAP_FAILED ? MC_E_OUT_OF_SPACE : populate();
  }

  int32_t open_file(int fd, uint64_t nbytes) {
    struct stat info {};
    struct statfs where {};
    if (fstat(fd, &info) != 0 || fstatfs(fd, &where) != 0) return MC_E_USAGE;
    const uint64_t there = static_cast<uint64_t>(info.st_blocks) * 512;
    const bool in_memory = where.f_type == TMPFS_MAGIC;
    if (in_memory && nbytes > there && !room_for(nbytes - there)) return MC_E_OUT_OF_SPACE;
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd_ < 0) return MC_E_USAGE;
    for (uint64_t at = 0; at < nbytes; at += kStep) {
      if (!allocate(at, std::min(kStep, nbytes - at))) return MC_E_OUT_OF_SPACE;
    }
    nbytes_ = nbytes;
    address_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    return address_ == MAP_FAILED ? MC_E_OUT_OF_SPACE : populate();
  }

  // After this no process can shrink the file, nor, with sole_writer, map it for writing.
  int32_t seal(bool sole_writer) {
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | (sole_writer ? F_SEAL_FUTURE_WRITE : 0);
    return fcntl(fd_, F_ADD_SEALS, seals | F_SEAL_SEAL) == 0 ? MC_OK : MC_E_INTERNAL;
  }

  void hand_out(uint64_t* address, uint64_t* nbytes, int32_t* fd) {
    *address = reinterpret_cast<uint64_t>(address_);
    *nbytes = nbytes_;
    *fd = fd_;
    address_ = MAP_FAILED;
    fd_ = -1;
  }

 private:
  bool allocate(uint64_t at, uint64_t nbytes) {
    int result;
    do {
      result = fallocate(fd_, 0, static_cast<off_t>(at), static_cast<off_t>(nbytes));
    } while (result != 0 && errno == EINTR);
    return result == 0;
  }

  int32_t populate() {
    const uint64_t cores = std::max(1U, std::thread::hardware_concurrency());
    const uint64_t pieces = (nbytes_ + kHugePage - 1) / kHugePage;
    const uint64_t parts = std::min({cores, kPopulatorsMax, pieces});
    const uint64_t each = (pieces + parts - 1) / parts * kHugePage;
    std::atomic<int32_t> status = MC_OK;
    auto run = [&](uint64_t at) {
      const int32_t result = populate_part(at, std::min(each, nbytes_ - at));
      if (result != MC_OK) status = result;
    };
    {
      std::vector<std::jthread> helpers;
      for (uint64_t at = each; at < nbytes_; at += each) {
        try {
          helpers.emplace_back(run, at);
        } catch (const std::exception&) {
          run(at);  // there is no thread to be had, or no memory for it
        }
      }
      run(0);
    }
    return status;
  }

  int32_t populate_part(uint64_t at, uint64_t nbytes) {
    uint8_t* const start = static_cast<uint8_t*>(address_) + at;
    int result;
    do {
      result = madvise(start, nbytes, MADV_POPULATE_WRITE);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return MC_OK;
    if (errno != EINVAL) return MC_E_OUT_OF_SPACE;
    // A kernel before 5.14. The pages are allocated, so that a touch finds them.
    for (uint64_t i = 0; i < nbytes; i += kPage) static_cast<volatile uint8_t*>(start)[i] = 0;
    return MC_OK;
  }

  void* address_ = MAP_FAILED;
  uint64_t nbytes_ = 0;
  int fd_ = -1;
};

uint64_t rounded_up(uint64_t nbytes, uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }

int32_t open_memory(const char* name, uint64_t nbytes, uint32_t flags, uint64_t* out_address,
                    uint64_t* out_nbytes, int32_t* out_fd) {
  const bool sole_writer = (flags & MC_MEMORY_SOLE_WRITER) != 0;
  if ((flags & MC_MEMORY_HUGE) != 0) {
    Mapping mapping;
    if (mapping.open(name, rounded_up(nbytes, kHugePage), MFD_HUGETLB) == MC_OK &&
        mapping.seal(sole_writer) == MC_OK) {
      mapping.hand_out(out_address, out_nbytes, out_fd);
      return MC_OK;
    }
  }
  nbytes = rounded_up(nbytes, kPage);
  if (!room_for(nbytes)) return MC_E_OUT_OF_SPACE;
  Mapping mapping;
  int32_t status = mapping.open(name, nbytes, 0);
  if (status == MC_OK) status = mapping.seal(sole_writer);
  if (status == MC_OK) mapping.hand_out(out_address, out_nbytes, out_fd);
  return status;
}

}  // namespace
}  // namespace mc::memory

extern "C" {

int32_t mc_memory_open(const char* name, uint64_t nbytes, uint32_t flags, uint64_t* out_address,
                       uint64_t* out_nbytes, int32_t* out_fd) {
  using namespace mc::memory;
  if (name == nullptr || std::strlen(name) > kNameMax || nbytes == 0) return MC_E_USAGE;
  if ((flags & ~uint32_t{MC_MEMORY_HUGE | MC_MEMORY_SOLE_WRITER}) != 0) return MC_E_USAGE;
  if (nbytes > kLargest) return MC_E_OUT_OF_SPACE;
  return open_memory(name, nbytes, flags, out_address, out_nbytes, out_fd);
}

int32_t mc_memory_open_file(int32_t fd, uint64_t nbytes, uint64_t* out_address) {
  using namespace mc::memory;
  if (fd < 0 || nbytes == 0 || nbytes % kPage != 0 || nbytes > kLargest) return MC_E_USAGE;
  Mapping mapping;
  const int32_t status = mapping.open_file(fd, nbytes);
  if (status != MC_OK) return status;
  uint64_t mapped = 0;
  int32_t own = -1;
  mapping.hand_out(out_address, &mapped, &own);
  close(own);  // the mapping holds the file
  return MC_OK;
}

void mc_memory_close(uint64_t address, uint64_t nbytes, int32_t fd) {
  if (address != 0) munmap(reinterpret_cast<void*>(address), nbytes);
  if (fd >= 0) close(fd);
}

}  // extern "C"
