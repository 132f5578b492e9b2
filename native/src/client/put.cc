// A put of one client to one node: native/abi/puts.h. Two round trips without a return to the
// caller, which in an interpreter costs as much as a third.
#include <algorithm>
#include <cstring>

#include "base/abi.h"
#include "base/deadline.h"
#include "base/status.h"

namespace {

int32_t ask(mc_engine* engine, const mc_put_message& what, mc::Deadline deadline, mc_message* out) {
  const auto left_ms = static_cast<uint32_t>(deadline.left_ms());
  return mc_message_request(engine, what.peer, what.kind, what.data, what.nbytes, left_ms, out);
}

// One status for each of the pull's rows, and all of them 0.
bool all_sealed(const mc_put_message& pull, const mc_message& reply) {
  mc_pull_head head;
  if (pull.nbytes < sizeof head) return false;
  std::memcpy(&head, pull.data, sizeof head);
  return reply.nbytes == sizeof(uint32_t) + uint64_t{head.row_count} &&
         std::all_of(reply.data, reply.data + reply.nbytes, [](uint8_t each) { return each == 0; });
}

}  // namespace

extern "C" int32_t mc_put_reserved(mc_engine* engine, const mc_put_message* pull,
                                   const mc_put_message* commit, uint32_t timeout_ms,
                                   mc_message* out_pulled, mc_message* out_committed) {
  if (pull == nullptr || commit == nullptr || out_pulled == nullptr || out_committed == nullptr) {
    return mc::fail(MC_E_USAGE, "a message or a place for its reply is null");
  }
  *out_pulled = {};
  *out_committed = {};
  const mc::Deadline deadline = mc::Deadline::in_ms(timeout_ms);
  const int32_t status = ask(engine, *pull, deadline, out_pulled);
  if (status != MC_OK || !all_sealed(*pull, *out_pulled)) return status;
  return ask(engine, *commit, deadline, out_committed);
}
