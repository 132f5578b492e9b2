// Folding with 256-bit registers: processors with VPCLMULQDQ (from Ice Lake and Zen 3 on).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "memory/crc32c.h"
#include "memory/crc32c_poly.h"

#pragma GCC target("sse4.2,avx2,vpclmulqdq")

#include "memory/crc32c_fold.h"

namespace mc::memory {
namespace {

struct Avx2 {
  using Register = __m256i;
  static constexpr size_t kWidth = 32;
  static constexpr size_t kCount = 8;

  static Register load(const uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static void store(uint8_t* at, Register value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value);
  }
  static void stream(uint8_t* at, Register value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(at), value);
  }
  static Register add_low(Register value, uint32_t low) {
    return _mm256_xor_si256(value, _mm256_set_epi64x(0, 0, 0, low));
  }
  static Register constants(uint32_t for_low, uint32_t for_high) {
    return _mm256_set_epi64x(for_high, for_low, for_high, for_low);
  }
  static Register fold(Register lanes, Register by, Register onto) {
    return _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(lanes, by, 0x00),
                                             _mm256_clmulepi64_epi128(lanes, by, 0x11)),
                            onto);
  }
};

bool usable() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("vpclmulqdq");
}

uint32_t crc_only(uint32_t raw, const uint8_t* data, size_t nbytes) {
  return fold::run<Avx2, fold::Store::kNone>(raw, nullptr, data, nbytes);
}

}  // namespace

const CrcKernel kAvx2 = {"avx2", usable, crc_only, fold::run<Avx2, fold::Store::kPlain>,
                         fold::run<Avx2, fold::Store::kStream>};

}  // namespace mc::memory

#endif
