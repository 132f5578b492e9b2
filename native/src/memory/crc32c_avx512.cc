// Folding with 512-bit registers: twice as fast as 256-bit ones as long as everything is in cache.
// Streaming copies stay with those: measured a sixth faster on cold memory.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "memory/crc32c.h"
#include "memory/crc32c_poly.h"

#pragma GCC target("sse4.2,avx512f,avx512vl,vpclmulqdq")

#include "memory/crc32c_fold.h"

namespace mc::memory {
namespace {

struct Avx512 {
  using Register = __m512i;
  static constexpr size_t kWidth = 64;
  static constexpr size_t kCount = 4;

  static Register load(const uint8_t* at) { return _mm512_loadu_si512(at); }
  static void store(uint8_t* at, Register value) { _mm512_storeu_si512(at, value); }
  static Register add_low(Register value, uint32_t low) {
    return _mm512_xor_si512(value, _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, low));
  }
  static Register constants(uint32_t for_low, uint32_t for_high) {
    return _mm512_set_epi64(for_high, for_low, for_high, for_low, for_high, for_low, for_high,
                            for_low);
  }
  static Register fold(Register lanes, Register by, Register onto) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                     _mm512_clmulepi64_epi128(lanes, by, 0x11), onto, 0x96);
  }
};

bool usable() {
  __builtin_cpu_init();
  return kAvx2.usable() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

uint32_t crc_only(uint32_t raw, const uint8_t* data, size_t nbytes) {
  return fold::run<Avx512, fold::Store::kNone>(raw, nullptr, data, nbytes);
}

uint32_t streaming(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes) {
  return kAvx2.stream(raw, to, from, nbytes);
}

}  // namespace

const CrcKernel kAvx512 = {"avx512", usable, crc_only, fold::run<Avx512, fold::Store::kPlain>,
                           streaming};

}  // namespace mc::memory

#endif
