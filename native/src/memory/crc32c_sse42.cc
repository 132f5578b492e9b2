// The crc instruction has a latency of three cycles and a throughput of one, so three independent
// lanes keep it busy. A block of 3 * L bytes (L a multiple of 64) is cut into three lanes of L;
// the crc is linear, so the whole is
//     shift(lane0, 2L) ^ shift(lane1, L) ^ lane2          shift(c, n) = c * x^(8n) mod P
// A shift is one carry-less product with a constant, reduced by one more crc instruction, which
// multiplies by x^32; the product of reflected numbers brings another x. Hence the exponent 8n-33.
//
// Three streams at once defeat the hardware's prefetching: each turn fetches three successive
// lines of the next block, of the source and, for plain stores, of the destination too. That
// doubles the speed on cold memory.
#if defined(__x86_64__)

#include <emmintrin.h>
#include <nmmintrin.h>
#include <wmmintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "memory/crc32c.h"
#include "memory/crc32c_poly.h"

#pragma GCC target("sse4.2,pclmul")

namespace mc::memory {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kLaneLines = 21;  // lanes of 1344 bytes: not a power of two, all in L1

// [k]: shifts by k lines.
constexpr auto kShift = [] {
  std::array<uint32_t, 2 * kLaneLines + 1> shift{};
  uint32_t r = x_power(8 * kLine - 33);
  for (size_t k = 1; k < shift.size(); k++) {
    shift[k] = r;
    for (size_t i = 0; i < 8 * kLine; i++) r = times_x(r);
  }
  return shift;
}();

enum class Store { kNone, kPlain, kStream };

inline uint64_t load(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

template <Store store>
inline uint64_t one_line(uint64_t crc, uint8_t* to, const uint8_t* from) {
  if constexpr (store == Store::kStream) {
    for (int i = 0; i < 4; i++) {
      const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, pair);
      crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_cvtsi128_si64(pair)));
      crc = _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(pair, 1)));
    }
    return crc;
  }
  for (int i = 0; i < 8; i++) {
    const uint64_t word = load(from + 8 * i);
    if constexpr (store == Store::kPlain) std::memcpy(to + 8 * i, &word, 8);
    crc = _mm_crc32_u64(crc, word);
  }
  return crc;
}

inline __m128i shifted(uint64_t crc, size_t lines) {
  return _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(crc)),
                              _mm_cvtsi32_si128(static_cast<int>(kShift[lines])), 0);
}

template <Store store>
uint64_t one_block(uint64_t crc, uint8_t* to, const uint8_t* from, size_t lines) {
  const size_t lane = lines * kLine;
  uint64_t crc1 = 0;
  uint64_t crc2 = 0;
  for (size_t at = 0; at < lane; at += kLine) {
    const size_t ahead = 3 * (lane + at);
    for (size_t line = 0; line < 3; line++) {
      _mm_prefetch(reinterpret_cast<const char*>(from + ahead + line * kLine), _MM_HINT_T0);
      if constexpr (store == Store::kPlain) __builtin_prefetch(to + ahead + line * kLine, 1);
    }
    crc = one_line<store>(crc, to + at, from + at);
    crc1 = one_line<store>(crc1, to + lane + at, from + lane + at);
    crc2 = one_line<store>(crc2, to + 2 * lane + at, from + 2 * lane + at);
  }
  const __m128i both = _mm_xor_si128(shifted(crc, 2 * lines), shifted(crc1, lines));
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(both))) ^ crc2;
}

// Less than a line, or what comes before an aligned one.
template <Store store>
uint64_t few(uint64_t crc, uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (; nbytes >= 8; nbytes -= 8) {
    const uint64_t word = load(from);
    crc = _mm_crc32_u64(crc, word);
    if constexpr (store != Store::kNone) std::memcpy(to, &word, 8);
    from += 8;
    to += 8;
  }
  for (; nbytes > 0; nbytes--) {
    const uint8_t byte = *from++;
    crc = _mm_crc32_u8(static_cast<uint32_t>(crc), byte);
    if constexpr (store != Store::kNone) *to++ = byte;
  }
  return crc;
}

template <Store store>
uint32_t run(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes) {
  uint64_t crc = raw;
  if constexpr (store == Store::kStream) {
    const size_t head = std::min(nbytes, -reinterpret_cast<uintptr_t>(to) % kLine);
    crc = few<store>(crc, to, from, head);
    to += head;
    from += head;
    nbytes -= head;
  }
  while (nbytes >= 3 * kLine) {
    const size_t lines = std::min(nbytes / (3 * kLine), kLaneLines);
    crc = one_block<store>(crc, to, from, lines);
    to += 3 * lines * kLine;
    from += 3 * lines * kLine;
    nbytes -= 3 * lines * kLine;
  }
  crc = few<store>(crc, to, from, nbytes);
  if constexpr (store == Store::kStream) _mm_sfence();
  return static_cast<uint32_t>(crc);
}

bool usable() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

uint32_t crc_only(uint32_t raw, const uint8_t* data, size_t nbytes) {
  return run<Store::kNone>(raw, nullptr, data, nbytes);
}

}  // namespace

const CrcKernel kSse42 = {"sse42", usable, crc_only, run<Store::kPlain>, run<Store::kStream>};

}  // namespace mc::memory

#endif
