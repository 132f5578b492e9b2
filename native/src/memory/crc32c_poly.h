// Arithmetic modulo the polynomial of crc32c, at compile time. Reflected: bit 31 is x^0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mc::memory {

constexpr uint32_t times_x(uint32_t r) { return (r >> 1) ^ ((r & 1) != 0 ? 0x82f63b78u : 0); }

// x^n modulo the polynomial.
consteval uint32_t x_power(unsigned n) {
  uint32_t r = 0x80000000u;
  for (unsigned i = 0; i < n; i++) r = times_x(r);
  return r;
}

// The product of two polynomials.
constexpr uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

// [k]: x^(8 * 2^k), what 2^k zero bytes multiply a register with.
constexpr std::array<uint32_t, 64> zero_bytes() {
  std::array<uint32_t, 64> powers{};
  powers[0] = x_power(8);
  for (size_t k = 1; k < powers.size(); k++) powers[k] = times(powers[k - 1], powers[k - 1]);
  return powers;
}

// [t][b]: byte b followed by t zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> byte_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t r = b;
    for (int i = 0; i < 8; i++) r = times_x(r);
    tables[0][b] = r;
  }
  for (size_t t = 1; t < 8; t++)
    for (uint32_t b = 0; b < 256; b++) {
      const uint32_t r = tables[t - 1][b];
      tables[t][b] = (r >> 8) ^ tables[0][r & 255];
    }
  return tables;
}

}  // namespace mc::memory
