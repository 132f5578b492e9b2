#include "base/crc.h"

#include <array>

// Appending n zero bytes to A multiplies its crc by x^(8n) modulo the polynomial; that is a linear
// map over GF(2), applied here as 32x32 bit matrices for the powers of two in n.

namespace mc {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli, reflected

using Matrix = std::array<uint32_t, 32>;  // column i: image of bit i

uint32_t apply(const Matrix& matrix, uint32_t bits) {
  uint32_t sum = 0;
  for (size_t i = 0; bits != 0; ++i, bits >>= 1) {
    if (bits & 1) sum ^= matrix[i];
  }
  return sum;
}

Matrix squared(const Matrix& matrix) {
  Matrix out{};
  for (size_t i = 0; i < out.size(); ++i) out[i] = apply(matrix, matrix[i]);
  return out;
}

// powers()[k] appends 2^k zero bytes.
const std::array<Matrix, 64>& powers() {
  static const std::array<Matrix, 64> table = [] {
    std::array<Matrix, 64> out{};
    Matrix bit{};  // appends one zero bit
    bit[0] = kPolynomial;
    for (size_t i = 1; i < bit.size(); ++i) bit[i] = 1U << (i - 1);
    out[0] = squared(squared(squared(bit)));
    for (size_t k = 1; k < out.size(); ++k) out[k] = squared(out[k - 1]);
    return out;
  }();
  return table;
}

}  // namespace

uint32_t crc32c_concat(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  for (size_t k = 0; second_nbytes != 0; ++k, second_nbytes >>= 1) {
    if (second_nbytes & 1) first = apply(powers()[k], first);
  }
  return first ^ second;
}

}  // namespace mc
