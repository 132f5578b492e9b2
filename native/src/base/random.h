// Unpredictable numbers from the kernel (incarnations, tokens) and the seeded ones of faults.
#pragma once

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace mc {

using Token = std::array<uint8_t, 16>;

inline Token random_token() {
  Token token;
  size_t have = 0;
  while (have < token.size()) {
    const ssize_t n = getrandom(token.data() + have, token.size() - have, 0);
    if (n > 0) have += static_cast<size_t>(n);
    else if (errno != EINTR) abort();  // a kernel without getrandom is not supported
  }
  return token;
}

inline std::string hex(const Token& token) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : token) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

// splitmix64: number `index` of the stream that `seed` names.
inline uint64_t seeded(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace mc
