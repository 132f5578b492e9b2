// crc32c by folding, written once for two register widths. Included by crc32c_avx2.cc and
// crc32c_avx512.cc after they have set their target; `Vector` brings the intrinsics.
//
// A register holds 128-bit lanes, each a piece of the message as a polynomial. A lane A moves D
// bits further along the message when it is multiplied by x^D: with its halves A = lo*x^64 + hi,
//     A * x^D = lo * x^(D+64) + hi * x^D     (mod P: two carry-less products with constants)
// and is then added to the piece that lies there. Several registers run side by side, each moving
// on by all of them at a step, and at the end are folded into the last one, whose bytes have the
// crc of the whole. The constants are reflected, 32 bits long in 64, and a product brings one more
// x: 33 less.
//
// One stream of loads and one of stores is what the hardware prefetches best.
#pragma once

// Unnamed: each including file has its own copies, compiled for its own processor.
namespace mc::memory {
namespace {
namespace fold {

enum class Store { kNone, kPlain, kStream };

template <class Vector, Store store>
inline typename Vector::Register pass(uint8_t* to, const uint8_t* from) {
  const typename Vector::Register piece = Vector::load(from);
  if constexpr (store == Store::kPlain) Vector::store(to, piece);
  if constexpr (store == Store::kStream) Vector::stream(to, piece);
  return piece;
}

template <Store store>
inline uint64_t few(uint64_t crc, uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (; nbytes >= 8; nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, from, 8);
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

// Bytes before the next cache line, at most nbytes.
inline size_t to_line(const uint8_t* to, size_t nbytes) {
  const size_t head = -reinterpret_cast<uintptr_t>(to) % 64;
  return head < nbytes ? head : nbytes;
}

template <class Vector, Store store>
uint32_t run(uint32_t raw, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kWidth = Vector::kWidth;
  constexpr size_t kStep = Vector::kCount * kWidth;
  uint64_t crc = raw;
  if constexpr (store == Store::kStream) {
    const size_t head = to_line(to, nbytes);
    crc = few<store>(crc, to, from, head);
    to += head;
    from += head;
    nbytes -= head;
  }
  if (nbytes >= kStep) {
    typename Vector::Register lanes[Vector::kCount];
    for (size_t i = 0; i < Vector::kCount; i++)
      lanes[i] = pass<Vector, store>(to + i * kWidth, from + i * kWidth);
    lanes[0] = Vector::add_low(lanes[0], static_cast<uint32_t>(crc));
    size_t at = kStep;
    constexpr unsigned kStepBits = 8 * kStep;
    const auto far = Vector::constants(x_power(kStepBits + 31), x_power(kStepBits - 33));
    for (; at + kStep <= nbytes; at += kStep)
      for (size_t i = 0; i < Vector::kCount; i++)
        lanes[i] = Vector::fold(lanes[i], far,
                                pass<Vector, store>(to + at + i * kWidth, from + at + i * kWidth));
    constexpr unsigned kWidthBits = 8 * kWidth;
    const auto near = Vector::constants(x_power(kWidthBits + 31), x_power(kWidthBits - 33));
    for (size_t i = 1; i < Vector::kCount; i++)
      lanes[i] = Vector::fold(lanes[i - 1], near, lanes[i]);
    alignas(64) uint8_t last[kWidth];
    Vector::store(last, lanes[Vector::kCount - 1]);
    crc = few<Store::kNone>(0, last, last, kWidth);
    to += at;
    from += at;
    nbytes -= at;
  }
  crc = few<store>(crc, to, from, nbytes);
  if constexpr (store == Store::kStream) _mm_sfence();
  return static_cast<uint32_t>(crc);
}

}  // namespace fold
}  // namespace
}  // namespace mc::memory
