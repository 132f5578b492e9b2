// SipHash, after the paper of Aumasson and Bernstein: four words of state, so many rounds a word of
// input. 2-4 is the paper's, for what must not be forged; 1-3 is for tables, where all that counts is
// that nobody can choose keys that collide.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace mc {

static_assert(std::endian::native == std::endian::little);

inline uint64_t load_word(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

template <int kRounds>
struct SipState {
  uint64_t v0, v1, v2, v3;

  SipState(uint64_t k0, uint64_t k1)
      : v0(k0 ^ 0x736f6d6570736575), v1(k1 ^ 0x646f72616e646f6d), v2(k0 ^ 0x6c7967656e657261),
        v3(k1 ^ 0x7465646279746573) {}

  void rounds(int n) {
    for (; n > 0; n--) {
      v0 += v1;
      v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1;
      v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  }
  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(kRounds);
    v0 ^= word;
  }
  // All of the text, with its length.
  void absorb(const uint8_t* text, uint64_t nbytes) {
    const uint8_t* const end = text + nbytes / 8 * 8;
    for (; text != end; text += 8) absorb(load_word(text));
    uint64_t last = nbytes << 56;
    for (uint64_t i = 0; i < nbytes % 8; i++) last |= static_cast<uint64_t>(text[i]) << (8 * i);
    absorb(last);
  }
  uint64_t folded() const { return v0 ^ v1 ^ v2 ^ v3; }
};

}  // namespace mc
