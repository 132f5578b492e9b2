#include "master/call.h"

#include <algorithm>

namespace mc {
namespace {

constexpr uint64_t kTenant = 0x0A, kKey = 0x12;  // (field number << 3) | wire type
constexpr uint64_t kPrefix = 0x18, kGenerations = 0x1A, kFailed = 0x22, kReserved = 0x28;

class Reader {
 public:
  Reader(const uint8_t* data, uint64_t nbytes) : at_(data), end_(data + nbytes) {}

  bool ended() const { return at_ == end_; }

  bool number(uint64_t* out) {
    uint64_t value = 0;
    for (int shift = 0; shift < 70 && at_ != end_; shift += 7) {
      const uint8_t byte = *at_++;
      if (shift == 63 && byte > 1) return false;
      value |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) {
        *out = value;
        return true;
      }
    }
    return false;
  }

  bool text(Text* out) {
    uint64_t nbytes = 0;
    if (!number(&nbytes) || nbytes > static_cast<uint64_t>(end_ - at_)) return false;
    *out = {at_, nbytes};
    at_ += nbytes;
    return true;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

bool is_ascii(const Text& text) {
  return std::all_of(text.data, text.data + text.nbytes, [](uint8_t each) { return each < 0x80; });
}

// The parts that both calls have. False: the field is none of them, or not plain.
bool read_common(uint64_t tag, Reader* from, const CallLimits& limits, PlainCall* out) {
  if (tag == kTenant) {
    if (out->tenant.data != nullptr || !from->text(&out->tenant)) return false;
    return out->tenant.nbytes <= limits.tenant_max_bytes && is_ascii(out->tenant);
  }
  Text key;
  if (tag != kKey || !from->text(&key)) return false;
  if (key.nbytes == 0 || key.nbytes > limits.key_max_bytes || key.data[0] == 0xFF) return false;
  if (out->keys.size() >= limits.keys_max) return false;
  out->keys.push_back(key);
  return true;
}

bool read_generations(Reader* from, const CallLimits& limits, PlainCall* out) {
  Text packed;
  if (!out->generations.empty() || !from->text(&packed)) return false;
  Reader numbers(packed.data, packed.nbytes);
  while (!numbers.ended()) {
    uint64_t generation = 0;
    if (out->generations.size() >= limits.keys_max || !numbers.number(&generation)) return false;
    out->generations.push_back(generation);
  }
  return true;
}

void put_number(uint64_t value, std::vector<uint8_t>* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<uint8_t>(value) | 0x80);
  out->push_back(static_cast<uint8_t>(value));
}

}  // namespace

bool read_exists(const uint8_t* data, uint64_t nbytes, const CallLimits& limits, PlainCall* out) {
  Reader from(data, nbytes);
  while (!from.ended()) {
    uint64_t tag = 0, value = 0;
    if (!from.number(&tag)) return false;
    if (tag != kPrefix) {
      if (!read_common(tag, &from, limits, out)) return false;
    } else {
      if (!from.number(&value)) return false;
      out->flag = value != 0;
    }
  }
  return out->tenant.data != nullptr;
}

bool read_put_end(const uint8_t* data, uint64_t nbytes, const CallLimits& limits, PlainCall* out) {
  Reader from(data, nbytes);
  while (!from.ended()) {
    uint64_t tag = 0, value = 0;
    if (!from.number(&tag)) return false;
    if (tag == kGenerations) {
      if (!read_generations(&from, limits, out)) return false;
    } else if (tag == kReserved) {
      if (!from.number(&value)) return false;
      out->flag = value != 0;
    } else if (tag == kFailed || !read_common(tag, &from, limits, out)) {
      return false;
    }
  }
  return out->tenant.data != nullptr && out->flag && !out->keys.empty() &&
         out->keys.size() == out->generations.size();
}

void write_reply(uint64_t term, const std::vector<uint8_t>& bytes, std::vector<uint8_t>* out) {
  std::vector<uint8_t> number;
  if (term != 0) {
    number.push_back(0x18);
    put_number(term, &number);
  }
  out->clear();
  out->push_back(0x0A);
  put_number(number.size(), out);
  out->insert(out->end(), number.begin(), number.end());
  if (bytes.empty()) return;
  out->push_back(0x12);
  put_number(bytes.size(), out);
  out->insert(out->end(), bytes.begin(), bytes.end());
}

}  // namespace mc
