// SipHash-2-4 with 128 bits of output, after the paper of Aumasson and Bernstein: four words of
// state, two rounds a word of input, four rounds to end, twice.
#include <bit>
#include <cstring>

#include "base/abi.h"

namespace mc::memory {
namespace {

static_assert(std::endian::native == std::endian::little);

uint64_t load_word(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

void store_word(uint8_t* at, uint64_t word) { std::memcpy(at, &word, 8); }

struct SipState {
  uint64_t v0, v1, v2, v3;

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
    rounds(2);
    v0 ^= word;
  }
};

void digest(const uint8_t* key, uint64_t nbytes, const uint8_t* secret, uint8_t* out) {
  const uint64_t k0 = load_word(secret);
  const uint64_t k1 = load_word(secret + 8);
  SipState state{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d ^ 0xee, k0 ^ 0x6c7967656e657261,
                 k1 ^ 0x7465646279746573};
  const uint8_t* const end = key + nbytes / 8 * 8;
  for (; key != end; key += 8) state.absorb(load_word(key));
  uint64_t last = nbytes << 56;
  for (uint64_t i = 0; i < nbytes % 8; i++) last |= static_cast<uint64_t>(key[i]) << (8 * i);
  state.absorb(last);
  state.v2 ^= 0xee;
  state.rounds(4);
  store_word(out, state.v0 ^ state.v1 ^ state.v2 ^ state.v3);
  state.v1 ^= 0xdd;
  state.rounds(4);
  store_word(out + 8, state.v0 ^ state.v1 ^ state.v2 ^ state.v3);
}

}  // namespace
}  // namespace mc::memory

extern "C" void mc_digest(const uint8_t* keys, const uint64_t* ends, uint64_t n,
                          const uint8_t* secret, uint8_t* out) {
  uint64_t start = 0;
  for (uint64_t i = 0; i < n; i++) {
    mc::memory::digest(keys + start, ends[i] - start, secret, out + 16 * i);
    start = ends[i];
  }
}
