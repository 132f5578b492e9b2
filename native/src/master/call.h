// Requests and replies of the two calls that are answered here, as protobuf has them
// (proto/mooncake/v1/master.proto). Only the plainest form is read: whatever else a request may
// hold is for the complete parser.
#pragma once

#include <cstdint>
#include <vector>

#include "master/text.h"

namespace mc {

struct PlainCall {
  Text tenant;
  std::vector<Text> keys;
  std::vector<uint64_t> generations;
  bool flag = false;  // `prefix` of Exists, `reserved` of PutEnd
};

struct CallLimits {
  uint64_t keys_max, key_max_bytes, tenant_max_bytes;
};

// False: not plain. May throw std::bad_alloc.
bool read_exists(const uint8_t* data, uint64_t nbytes, const CallLimits& limits, PlainCall* out);
bool read_put_end(const uint8_t* data, uint64_t nbytes, const CallLimits& limits, PlainCall* out);
// ExistsReply and PutEndReply look alike: an outcome with the term, one byte a key.
void write_reply(uint64_t term, const std::vector<uint8_t>& bytes, std::vector<uint8_t>* out);

}  // namespace mc
