// SipHash-2-4 with 128 bits of output: four rounds to end, twice.
#include <cstring>

#include "base/abi.h"
#include "base/sip.h"

namespace mc::memory {
namespace {

void store_word(uint8_t* at, uint64_t word) { std::memcpy(at, &word, 8); }

void digest(const uint8_t* key, uint64_t nbytes, const uint8_t* secret, uint8_t* out) {
  SipState<2> state(load_word(secret), load_word(secret + 8));
  state.v1 ^= 0xee;
  state.absorb(key, nbytes);
  state.v2 ^= 0xee;
  state.rounds(4);
  store_word(out, state.folded());
  state.v1 ^= 0xdd;
  state.rounds(4);
  store_word(out + 8, state.folded());
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
