// Engines against each other in one process: many threads, and everything ended in the middle.
// What it proves beyond the battery it proves through the sanitizers.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "base/address.h"
#include "base/crc.h"
#include "base/random.h"
#include "check.h"

namespace {

constexpr uint32_t kMs = 20'000;
constexpr uint64_t kMiB = 1 << 20;

mc_engine* open_engine(uint32_t transports, uint64_t queue_max = 0, uint32_t loss_ppm = 0,
                       uint32_t cut_ppm = 0) {
  mc_engine_options options{};
  options.struct_size = sizeof options;
  options.transports = transports;
  options.listen = "127.0.0.1:0";
  options.queue_max_bytes = queue_max;
  options.fault_seed = 1;
  options.fault_loss_ppm = loss_ppm;
  options.fault_corrupt_ppm = loss_ppm;
  options.fault_cut_ppm = cut_ppm;
  options.fault_delay_us = loss_ppm > 0 ? 300 : 0;
  mc_engine* engine = nullptr;
  CHECK_EQ(mc_engine_open(&options, &engine), MC_OK);
  return engine;
}

std::string address_of(mc_engine* engine) {
  char text[256];
  CHECK_EQ(mc_engine_address(engine, text, sizeof text), MC_OK);
  return text;
}

uint64_t connect(mc_engine* engine, mc_engine* to) {
  uint64_t peer = 0;
  CHECK_EQ(mc_peer_open(engine, address_of(to).c_str(), kMs, &peer), MC_OK);
  return peer;
}

// Answers requests until its engine is shut down.
class Server {
 public:
  explicit Server(mc_engine* engine) : engine_(engine), thread_([this] { serve(); }) {}
  ~Server() { thread_.join(); }

 private:
  void serve() {
    for (;;) {
      mc_message message{};
      const int32_t status = mc_message_receive(engine_, kMs, &message);
      if (status == MC_E_TIMEOUT) continue;
      if (status != MC_OK) return;
      if (message.correlation != 0) {
        (void)mc_message_reply(engine_, &message, message.data, message.nbytes);
      }
      mc_message_free(&message);
    }
  }
  mc_engine* engine_;
  std::thread thread_;
};

std::vector<uint8_t> numbers(uint64_t nbytes, uint64_t seed) {
  std::vector<uint8_t> out(nbytes);
  for (uint64_t i = 0; i < nbytes; ++i) out[i] = static_cast<uint8_t>(mc::seeded(seed, i));
  return out;
}

uint32_t offer(mc_engine* engine, std::vector<uint8_t>& memory, uint32_t access, int fd = -1) {
  const mc_piece piece{reinterpret_cast<uint64_t>(memory.data()), memory.size()};
  uint32_t region = 0;
  CHECK_EQ(mc_region_register(engine, &piece, 1, access, fd, &region), MC_OK);
  return region;
}

mc_slice slice(uint32_t op, uint32_t region, uint64_t offset, uint8_t* local, uint64_t length) {
  return {op, region, offset, reinterpret_cast<uint64_t>(local), length, MC_SLICE_CRC, 0, 0, 0};
}

void check_crc_concat() {
  const std::vector<uint8_t> bytes = numbers(10'000, 3);
  for (const uint64_t cut : {0UL, 1UL, 7UL, 4096UL, 9999UL, 10'000UL}) {
    const uint32_t first = mc_crc32c(bytes.data(), cut, 0);
    const uint32_t second = mc_crc32c(bytes.data() + cut, bytes.size() - cut, 0);
    CHECK_EQ(mc::crc32c_concat(first, second, bytes.size() - cut),
             mc_crc32c(bytes.data(), bytes.size(), 0));
  }
}

// Threads read, write, ask and cancel; regions come and go; at last all is shut under them.
void check_all_at_once(uint32_t transports, uint32_t loss_ppm, uint32_t cut_ppm) {
  mc_engine* here = open_engine(transports, 0, loss_ppm, cut_ppm);
  mc_engine* there = open_engine(transports, 0, loss_ppm, cut_ppm);
  std::vector<uint8_t> source = numbers(4 * kMiB, 5), sink(4 * kMiB);
  const uint32_t readable = offer(there, source, MC_ACCESS_REMOTE_READ);
  const uint32_t writable = offer(there, sink, MC_ACCESS_REMOTE_READ | MC_ACCESS_REMOTE_WRITE);
  const std::string address = address_of(there);  // nobody answers once it is shut
  const uint32_t patience_ms = loss_ppm > 0 || cut_ppm > 0 ? 200 : kMs;
  std::atomic<bool> ending{false};
  std::atomic<uint64_t> good{0};
  const auto work = [&](uint64_t number) {
    std::vector<uint8_t> target(2 * kMiB);
    for (uint64_t i = 0; !ending; ++i) {
      uint64_t peer = 0;
      if (mc_peer_open(here, address.c_str(), kMs, &peer) != MC_OK) continue;
      const uint64_t n = 1 + mc::seeded(number, i) % (2 * kMiB - 1);
      const uint64_t offset = mc::seeded(number, ~i) % (2 * kMiB);
      mc_slice slices[2] = {slice(MC_OP_READ, readable, offset, target.data(), n),
                            slice(MC_OP_READ, readable, offset, target.data(), n / 2)};
      slices[1].flags |= MC_SLICE_FENCE;
      if (number % 3 == 0) {
        mc_batch* batch = nullptr;
        if (mc_batch_submit(here, peer, slices, 2, kMs, &batch) != MC_OK) continue;
        if (i % 2 == 0) (void)mc_batch_wait(batch, 1);
        mc_batch_close(batch);
        memset(target.data(), 0, n);  // nobody writes here any more
      } else if (number % 3 == 1) {
        const int32_t status = mc_transfer(here, peer, slices, 1, patience_ms);
        if (status == MC_OK && slices[0].crc == mc_crc32c(source.data() + offset, n, 0)) {
          CHECK_EQ(memcmp(target.data(), source.data() + offset, n), 0);
          ++good;
        }
        CHECK(loss_ppm > 0 || cut_ppm > 0 || status == MC_OK || ending);
      } else {
        mc_slice out = slice(MC_OP_WRITE, writable, number * 4096, source.data(), 4096);
        (void)mc_transfer(here, peer, &out, 1, patience_ms);
        mc_message reply{};
        if (mc_message_request(here, peer, 1, &i, sizeof i, patience_ms, &reply) == MC_OK) {
          CHECK_EQ(reply.nbytes, sizeof i);
          CHECK_EQ(memcmp(reply.data, &i, sizeof i), 0);
          ++good;
        }
        mc_message_free(&reply);
      }
    }
  };
  {
    const Server server(there), other(here);
    std::vector<std::thread> threads;
    for (uint64_t number = 1; number <= 6; ++number) threads.emplace_back(work, number);
    for (int i = 0; i < 30 || (good == 0 && i < 3'000); ++i) {  // the others get a turn
      std::vector<uint8_t> passing = numbers(100'000, 9), target(100'000);
      const uint32_t region = offer(there, passing, MC_ACCESS_REMOTE_READ);
      mc_slice one = slice(MC_OP_READ, region, 0, target.data(), target.size());
      uint64_t peer = 0;
      if (mc_peer_open(here, address.c_str(), kMs, &peer) == MC_OK) {
        mc_batch* batch = nullptr;
        if (mc_batch_submit(here, peer, &one, 1, kMs, &batch) == MC_OK) {
          CHECK_EQ(mc_region_deregister(there, region, kMs), MC_OK);
          std::fill(passing.begin(), passing.end(), 0);  // ours again
          mc_batch_close(batch);
          continue;
        }
      }
      CHECK_EQ(mc_region_deregister(there, region, kMs), MC_OK);
    }
    ending = true;
    mc_engine_shutdown(there);
    for (std::thread& thread : threads) thread.join();
    mc_engine_shutdown(here);
  }
  mc_engine_close(here);
  mc_engine_close(there);
  CHECK(good > 0);
}

// A sender that is faster than the receiver's program waits; nothing is lost.
void check_back_pressure(uint32_t transports) {
  mc_engine* here = open_engine(transports);
  mc_engine* there = open_engine(transports, 64 << 10);
  const uint64_t peer = connect(here, there);
  constexpr uint32_t kCount = 3000;
  std::thread sender([&] {
    std::vector<uint8_t> bytes(3000);
    for (uint32_t i = 0; i < kCount; ++i) {
      memcpy(bytes.data(), &i, sizeof i);
      CHECK_EQ(mc_message_send(here, peer, 1, bytes.data(), 3000, kMs), MC_OK);
    }
  });
  for (uint32_t i = 0; i < kCount; ++i) {
    mc_message message{};
    CHECK_EQ(mc_message_receive(there, kMs, &message), MC_OK);
    uint32_t number = 0;
    memcpy(&number, message.data, sizeof number);
    CHECK_EQ(number, i);
    mc_message_free(&message);
  }
  sender.join();
  mc_engine_close(here);
  mc_engine_close(there);
}

// Whatever strangers say, they are cut and peers are served.
void check_strangers() {
  mc_engine* here = open_engine(MC_TRANSPORT_TCP);
  mc_engine* there = open_engine(MC_TRANSPORT_TCP);
  mc::HostPort where;
  CHECK_EQ(mc::parse_host_port(address_of(there), &where), MC_OK);
  {
    const Server server(there);
    for (uint64_t seed = 0; seed < 40; ++seed) {
      mc::Fd fd;
      CHECK_EQ(mc::connect_to(where, mc::Deadline::in_ms(kMs), -1, &fd), MC_OK);
      std::vector<uint8_t> bytes = numbers(1 + seed * 37, seed);
      if (seed % 2 == 0 && bytes.size() > 4) memcpy(bytes.data(), "MCET", 4);
      (void)send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
    const uint64_t peer = connect(here, there);
    mc_message reply{};
    CHECK_EQ(mc_message_request(here, peer, 1, "x", 1, kMs, &reply), MC_OK);
    mc_message_free(&reply);
    mc_engine_shutdown(there);
  }
  mc_engine_close(here);
  mc_engine_close(there);
}

}  // namespace

int main() {
  check_crc_concat();
  for (const uint32_t transport :
       {MC_TRANSPORT_LOCAL, MC_TRANSPORT_SHM, MC_TRANSPORT_TCP, MC_TRANSPORT_FAKE}) {
    check_back_pressure(static_cast<uint32_t>(transport));
    check_all_at_once(static_cast<uint32_t>(transport), 0, 0);
  }
  check_all_at_once(MC_TRANSPORT_FAKE, 20'000, 0);
  check_all_at_once(MC_TRANSPORT_FAKE, 20'000, 5'000);
  check_strangers();
  return 0;
}
