// Two devices that exist in this file only: what is undone when the second one refuses, and in which
// order things are given back.
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <vector>

#include "base/status.h"
#include "check.h"
#include "transport/rdma/memory_book.h"

namespace {

using namespace mc;
using namespace mc::rdma;

constexpr int kMaxCqe = 128;

struct Machine {
  std::array<verbs::Context, 2> contexts{};
  std::array<verbs::Pd, 2> pds{};
  std::array<verbs::Channel, 2> channels{};
  std::array<verbs::Cq, 2> cqs{};
  std::vector<std::string> ended;  // in this order
  int live = 0, made = 0;          // memory regions
  int flags = 0;                   // of the last one
  int refuses = -1;                // this device, with this error
  int error = 0;
};
Machine machine;

size_t number(const verbs::Context* context) {
  return static_cast<size_t>(context - machine.contexts.data());
}

verbs::Context* open_device(verbs::Device* device) {
  verbs::Context& context = machine.contexts[reinterpret_cast<uintptr_t>(device) - 1];
  context.device = device;
  context.operations.poll_cq = [](verbs::Cq*, int, verbs::Wc*) { return 0; };
  context.operations.request_notice = [](verbs::Cq*, int) { return 0; };
  context.operations.post_send = [](verbs::Qp*, verbs::SendWr*, verbs::SendWr**) { return 0; };
  context.async_fd = eventfd(0, EFD_CLOEXEC);
  return &context;
}

int query_device(verbs::Context*, verbs::DeviceAttr* out) {
  out->max_mr_size = 1 << 30;
  out->max_cqe = out->max_qp_wr = kMaxCqe;
  return 0;
}

int query_port(verbs::Context*, uint8_t, verbs::PortAttr* out) {
  out->state = verbs::kPortActive;
  out->link_layer = verbs::kLinkInfiniBand;
  return 0;
}

verbs::Mr* register_memory(verbs::Pd* pd, void*, size_t, int flags) {
  machine.flags = flags;
  if (static_cast<int>(number(pd->context)) == machine.refuses) {
    errno = machine.error;
    return nullptr;
  }
  ++machine.live;
  auto* mr = new verbs::Mr{};
  mr->lkey = mr->rkey = static_cast<uint32_t>(++machine.made);
  return mr;
}

int deregister_memory(verbs::Mr* mr) {
  --machine.live;
  delete mr;
  return 0;
}

int ends(const char* what) {
  machine.ended.emplace_back(what);
  return 0;
}

verbs::Library library() {
  verbs::Library it{};
  it.get_device_name = [](verbs::Device*) -> const char* { return "made0"; };
  it.open_device = open_device;
  it.query_device = query_device;
  it.query_port = query_port;
  it.alloc_pd = [](verbs::Context* context) {
    verbs::Pd& pd = machine.pds[number(context)];
    pd.context = context;
    return &pd;
  };
  it.create_comp_channel = [](verbs::Context* context) {
    verbs::Channel& channel = machine.channels[number(context)];
    channel.fd = eventfd(0, EFD_CLOEXEC);
    return &channel;
  };
  it.create_cq = [](verbs::Context* context, int, void*, verbs::Channel*, int) {
    return &machine.cqs[number(context)];
  };
  it.reg_mr = register_memory;
  it.dereg_mr = deregister_memory;
  it.destroy_cq = [](verbs::Cq*) { return ends("completion queue"); };
  it.destroy_comp_channel = [](verbs::Channel* channel) {
    close(channel->fd);
    return ends("channel");
  };
  it.dealloc_pd = [](verbs::Pd*) { return ends("protection domain"); };
  it.close_device = [](verbs::Context* context) {
    close(context->async_fd);
    return ends("device");
  };
  return it;
}

Adapters open_both(const verbs::Library& calls) {
  Adapters out;
  for (uintptr_t device = 1; device <= 2; ++device) {
    std::string why;
    out.push_back(Adapter::open(calls, reinterpret_cast<verbs::Device*>(device), 1, {}, &why));
    CHECK(out.back() != nullptr);
  }
  return out;
}

void what_the_second_device_refuses_is_taken_back_from_the_first(const Adapters& adapters) {
  std::vector<uint8_t> memory(1 << 16);
  const Range range{reinterpret_cast<uint64_t>(memory.data()), memory.size()};
  machine.refuses = 1;
  for (const int error : {ENOMEM, EINVAL}) {
    machine.error = error;
    Registration refused(adapters, range);
    CHECK_EQ(refused.begin(MC_ACCESS_REMOTE_READ), MC_E_OUT_OF_SPACE);
    CHECK_EQ(machine.live, 0);
    CHECK(std::string(last_error()).find("made0 does not register 65536 bytes") == 0);
  }
  machine.refuses = -1;
  {
    Registration taken(adapters, range);
    CHECK_EQ(taken.begin(MC_ACCESS_REMOTE_READ), MC_OK);
    CHECK_EQ(machine.live, 2);
    CHECK(taken.rkey(0) != taken.rkey(1));
    taken.end();
    taken.end();  // twice is once
    CHECK_EQ(machine.live, 0);
  }
  CHECK_EQ(machine.live, 0);
}

// No peer is told the keys of raw memory, so that none need be good.
void raw_memory_gets_no_remote_keys(const Adapters& adapters) {
  std::vector<uint8_t> memory(1 << 16);
  const mc_piece piece{reinterpret_cast<uint64_t>(memory.data()), memory.size()};
  MemoryBook book(adapters, 0);
  for (const uint32_t raw : {0U, uint32_t{MC_ACCESS_RAW}}) {
    const Region region(1, {piece}, MC_ACCESS_REMOTE_READ | raw, Fd());
    CHECK_EQ(book.add(region), MC_OK);
    CHECK_EQ((machine.flags & (verbs::kRemoteRead | verbs::kRemoteWrite)) != 0, raw == 0);
    CHECK(book.find(piece.address, MemoryBook::Use::kTarget) != nullptr);
    // A value that lies in raw memory and is put as one with an owner needs keys of its own.
    CHECK_EQ(book.find(piece.address, MemoryBook::Use::kReadByPeers) != nullptr, raw == 0);
    book.drop(1, Deadline::in_ms(0));
  }
  CHECK_EQ(machine.live, 0);
}

// A transfer that waits for its rail may hold it for longer than deregister() waits.
void who_still_holds_an_ended_registration_has_void_keys(const Adapters& adapters) {
  std::vector<uint8_t> memory(1 << 16);
  const mc_piece piece{reinterpret_cast<uint64_t>(memory.data()), memory.size()};
  MemoryBook book(adapters, 0);
  CHECK_EQ(book.add(Region(1, {piece}, MC_ACCESS_REMOTE_READ, Fd())), MC_OK);
  const auto held = book.find(piece.address, MemoryBook::Use::kTarget);
  const uint32_t local = held->lkey(1), remote = held->rkey(1);
  CHECK(!held->ended());
  book.drop(1, Deadline::in_ms(0));
  CHECK(held->ended());
  CHECK_EQ(machine.live, 0);
  CHECK(held->lkey(1) == local && held->rkey(1) == remote);
  CHECK(book.find(piece.address, MemoryBook::Use::kTarget) == nullptr);
}

// Segments and values: no device may write there, whatever key a peer made up.
void memory_for_reading_gives_no_right_to_write(const Adapters& adapters) {
  std::vector<uint8_t> memory(1 << 16);
  const Range range{reinterpret_cast<uint64_t>(memory.data()), memory.size()};
  for (const uint32_t access : {uint32_t{MC_ACCESS_REMOTE_READ},
                                uint32_t{MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE}}) {
    Registration registration(adapters, range);
    CHECK_EQ(registration.begin(access), MC_OK);
    CHECK((machine.flags & verbs::kRemoteRead) != 0);
    CHECK_EQ((machine.flags & verbs::kRemoteWrite) != 0, access != MC_ACCESS_REMOTE_READ);
  }
}

struct Poster final : RailOwner {
  int called = 0;
  void completed(uint32_t, const verbs::Wc&) override {}
  void settle_completed() override { ++called; }
};

// Half of the queue is for works that may complete, so that it cannot be overrun.
void without_credit_nothing_is_posted_and_who_waits_is_called(const Adapters& adapters) {
  Adapter& adapter = *adapters[0];
  const auto first = std::make_shared<Poster>(), second = std::make_shared<Poster>();
  uint64_t taken = 0;
  while (adapter.take_credit(first)) ++taken;
  CHECK_EQ(taken, uint64_t{kMaxCqe / 2});
  CHECK_EQ(adapter.outstanding(), taken);
  CHECK(!adapter.take_credit(second));
  (void)adapter.poll();
  CHECK_EQ(first->called + second->called, 0);  // there is none yet
  adapter.give_credits(taken);
  (void)adapter.poll();
  CHECK(first->called == 1 && second->called == 1);
  (void)adapter.poll();
  CHECK(first->called == 1 && second->called == 1);
  CHECK_EQ(adapter.outstanding(), 0U);
}

void children_end_before_their_parents() {
  const std::vector<std::string> one{"completion queue", "channel", "protection domain", "device"};
  CHECK_EQ(machine.ended.size(), 2 * one.size());
  for (size_t i = 0; i < machine.ended.size(); ++i) CHECK(machine.ended[i] == one[i % one.size()]);
}

}  // namespace

int main() {
  const verbs::Library calls = library();
  Adapters adapters = open_both(calls);
  what_the_second_device_refuses_is_taken_back_from_the_first(adapters);
  raw_memory_gets_no_remote_keys(adapters);
  who_still_holds_an_ended_registration_has_void_keys(adapters);
  memory_for_reading_gives_no_right_to_write(adapters);
  without_credit_nothing_is_posted_and_who_waits_is_called(adapters);
  adapters.clear();
  children_end_before_their_parents();
  return 0;
}
