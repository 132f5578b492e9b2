#include "transport/shm/guarded_copy.h"

#include <algorithm>
#include <cstddef>

#include "transport/copy.h"

#if defined(__x86_64__) && defined(__linux__)

extern "C" {
// The C library's: where each thread's rseq area is, seen from the thread pointer.
extern const ptrdiff_t __rseq_offset __attribute__((weak));
extern const unsigned int __rseq_size __attribute__((weak));
}

namespace mc {
namespace {

constexpr uint64_t kChunk = kProbeBytes;  // copied in one sequence: microseconds
constexpr uint64_t kStreamStep = 256;
constexpr int kTries = 10'000;           // of one chunk

struct RseqArea {  // the kernel's struct rseq, as far as it is used
  uint32_t cpu_id_start;
  int32_t cpu_id;  // negative: not registered
  uint64_t sequence;
};

RseqArea* area() {
  return reinterpret_cast<RseqArea*>(static_cast<uint8_t*>(__builtin_thread_pointer()) +
                                     __rseq_offset);
}

enum : uint32_t { kOk = 0, kNotPermitted = 1, kDisturbed = 2 };

// Both sequences: from 1 to 2, left by 4 when the kernel ends them. The descriptor is 3.
#define MC_RSEQ_BEGIN                                             \
  ".pushsection __rseq_cs, \"aw\"\n\t.balign 32\n\t"              \
  "3: .long 0, 0\n\t.quad 1f, 2f - 1f, 4f\n\t.popsection\n\t"     \
  ".pushsection __rseq_failure, \"ax\"\n\t"                       \
  ".byte 0x0f, 0xb9, 0x3d\n\t.long 0x53053053\n\t"                \
  "4: jmp 5f\n\t.popsection\n\t"                                  \
  "movl $2, %[result]\n\t"                                        \
  "leaq 3b(%%rip), %%rax\n\t"                                     \
  "movq %%rax, %[sequence]\n\t"                                   \
  "1:\n\t"                                                        \
  "cmpl %[expected], %[permission]\n\t"                           \
  "jne 6f\n\t"
#define MC_RSEQ_END          \
  "2:\n\t"                   \
  "xorl %[result], %[result]\n\t" \
  "jmp 5f\n\t"               \
  "6: movl $1, %[result]\n\t"\
  "5:\n\t"                   \
  "movq $0, %[sequence]\n\t"

__attribute__((noinline)) uint32_t copy_once(const uint32_t* permission, uint32_t expected,
                                             uint8_t* to, const uint8_t* from, uint64_t nbytes) {
  uint32_t result;
  RseqArea* const here = area();
  asm volatile(MC_RSEQ_BEGIN "rep movsb\n\t" MC_RSEQ_END
               : [result] "=&r"(result), "+D"(to), "+S"(from), "+c"(nbytes),
                 [sequence] "=m"(here->sequence)
               : [permission] "m"(*permission), [expected] "r"(expected)
               : "rax", "cc", "memory");
  return result;
}

// nbytes is a multiple of kStreamStep above nought, `to` one of 32.
__attribute__((noinline, target("avx2"))) uint32_t stream_once(const uint32_t* permission,
                                                               uint32_t expected, uint8_t* to,
                                                               const uint8_t* from,
                                                               uint64_t nbytes) {
  uint32_t result;
  RseqArea* const here = area();
  asm volatile(MC_RSEQ_BEGIN
               "7:\n\t"
               "vmovdqu 0(%%rsi), %%ymm0\n\t"
               "vmovdqu 32(%%rsi), %%ymm1\n\t"
               "vmovdqu 64(%%rsi), %%ymm2\n\t"
               "vmovdqu 96(%%rsi), %%ymm3\n\t"
               "vmovdqu 128(%%rsi), %%ymm4\n\t"
               "vmovdqu 160(%%rsi), %%ymm5\n\t"
               "vmovdqu 192(%%rsi), %%ymm6\n\t"
               "vmovdqu 224(%%rsi), %%ymm7\n\t"
               "vmovntdq %%ymm0, 0(%%rdi)\n\t"
               "vmovntdq %%ymm1, 32(%%rdi)\n\t"
               "vmovntdq %%ymm2, 64(%%rdi)\n\t"
               "vmovntdq %%ymm3, 96(%%rdi)\n\t"
               "vmovntdq %%ymm4, 128(%%rdi)\n\t"
               "vmovntdq %%ymm5, 160(%%rdi)\n\t"
               "vmovntdq %%ymm6, 192(%%rdi)\n\t"
               "vmovntdq %%ymm7, 224(%%rdi)\n\t"
               "addq $256, %%rsi\n\t"
               "addq $256, %%rdi\n\t"
               "subq $256, %%rcx\n\t"
               "jnz 7b\n\t" MC_RSEQ_END
               "sfence\n\t"
               "vzeroupper\n\t"
               : [result] "=&r"(result), "+D"(to), "+S"(from), "+c"(nbytes),
                 [sequence] "=m"(here->sequence)
               : [permission] "m"(*permission), [expected] "r"(expected)
               : "rax", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "cc", "memory");
  return result;
}

#undef MC_RSEQ_BEGIN
#undef MC_RSEQ_END

bool has_avx2() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
  }();
  return has;
}

}  // namespace

bool can_copy_guarded() {
  return &__rseq_size != nullptr && &__rseq_offset != nullptr && __rseq_size > 0 &&
         area()->cpu_id >= 0;
}

Guarded copy_guarded(const std::atomic<uint32_t>& permission, uint32_t expected, void* to,
                     const void* from, uint64_t nbytes) {
  auto* const word = reinterpret_cast<const uint32_t*>(&permission);
  auto* at = static_cast<uint8_t*>(to);
  auto* source = static_cast<const uint8_t*>(from);
  const bool is_large = nbytes >= kStreamMin && has_avx2();
  const int64_t began_ns = is_large ? now_ns() : 0;
  bool streams = false;
  for (uint64_t left = nbytes; left > 0;) {
    uint64_t n = std::min(left, kChunk);
    const uint64_t to_aligned = -reinterpret_cast<uint64_t>(at) % 32;
    const bool stream = streams && to_aligned == 0 && n >= kStreamStep;
    if (stream) n -= n % kStreamStep;
    else if (streams && to_aligned > 0) n = std::min(n, to_aligned);
    uint32_t result = kDisturbed;
    for (int i = 0; i < kTries && result == kDisturbed; ++i) {
      result = stream ? stream_once(word, expected, at, source, n)
                      : copy_once(word, expected, at, source, n);
    }
    if (result != kOk) return result == kDisturbed ? Guarded::kGaveUp : Guarded::kWithdrawn;
    if (is_large && left == nbytes) streams = now_ns() - began_ns > kHotNs;
    at += n;
    source += n;
    left -= n;
  }
  return Guarded::kDone;
}

}  // namespace mc

#else

namespace mc {

bool can_copy_guarded() { return false; }

Guarded copy_guarded(const std::atomic<uint32_t>&, uint32_t, void*, const void*, uint64_t) {
  return Guarded::kGaveUp;
}

}  // namespace mc

#endif
