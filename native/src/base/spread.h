// Anonymous memory for tables: zero, and address space until it is touched. What lies beyond the first
// huge page is in huge pages where the system has them, so that a table of a million rows needs few
// entries of the TLB, and one of a thousand rows no megabytes.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

namespace mc {

inline constexpr uint64_t kHugeBytes = 2 << 20;

class Spread {
 public:
  Spread() = default;
  // The first `small` bytes are not worth huge pages. std::bad_alloc when there is none.
  explicit Spread(uint64_t nbytes, uint64_t small = kHugeBytes)
      : nbytes_((nbytes + kHugeBytes - 1) / kHugeBytes * kHugeBytes) {
    if (nbytes_ == 0) return;
    const uint64_t all = nbytes_ + kHugeBytes;
    void* const got = mmap(nullptr, all, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) throw std::bad_alloc();
    auto* const begin = static_cast<uint8_t*>(got);
    const uint64_t before = (kHugeBytes - reinterpret_cast<uintptr_t>(got) % kHugeBytes) % kHugeBytes;
    data_ = begin + before;
    if (before != 0) munmap(begin, before);
    munmap(data_ + nbytes_, kHugeBytes - before);
    if (small < nbytes_) (void)madvise(data_ + small, nbytes_ - small, MADV_HUGEPAGE);
  }
  Spread(Spread&& other) noexcept { swap(other); }
  Spread& operator=(Spread&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Spread() {
    if (data_ != nullptr) munmap(data_, nbytes_);
  }

  uint8_t* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // This range reads as zeros again and costs nothing.
  void forget(uint64_t start, uint64_t nbytes) {
    (void)madvise(data_ + start, nbytes, MADV_DONTNEED);
  }

 private:
  void swap(Spread& other) {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
  }

  uint8_t* data_ = nullptr;
  uint64_t nbytes_ = 0;
};

}  // namespace mc
