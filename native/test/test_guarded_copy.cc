// Guarded copies: every size and alignment, permission, and a storm of signals.
#include <signal.h>
#include <sys/time.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "transport/shm/guarded_copy.h"

namespace {

constexpr uint8_t kOther = 0xEE;
std::atomic<uint64_t> signals{0};

void check_range(uint64_t to_offset, uint64_t from_offset, uint64_t nbytes) {
  std::vector<uint8_t> from(nbytes + 64), to(nbytes + 128, kOther);
  for (uint64_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 >> 3);
  const std::atomic<uint32_t> permission{7};
  CHECK(mc::copy_guarded(permission, 7, to.data() + to_offset, from.data() + from_offset, nbytes) ==
        mc::Guarded::kDone);
  CHECK(memcmp(to.data() + to_offset, from.data() + from_offset, nbytes) == 0);
  for (uint64_t i = 0; i < to_offset; ++i) CHECK_EQ(to[i], kOther);
  for (uint64_t i = to_offset + nbytes; i < to.size(); ++i) CHECK_EQ(to[i], kOther);
}

void check_withdrawn() {
  std::vector<uint8_t> from(1 << 20, 1), to(1 << 20, kOther);
  const std::atomic<uint32_t> permission{0};
  CHECK(mc::copy_guarded(permission, 7, to.data(), from.data(), to.size()) ==
        mc::Guarded::kWithdrawn);
  for (const uint8_t byte : to) CHECK_EQ(byte, kOther);
}

// Signals interrupt copies all the time; each goes on behind the handler and is right in the end.
void check_under_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { ++signals; };
  CHECK_EQ(sigaction(SIGALRM, &action, nullptr), 0);
  itimerval often{{0, 100}, {0, 100}};
  CHECK_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  for (uint64_t i = 0; i < 300; ++i) check_range(i % 33, i % 17, 1'000'000 + i);
  often = {};
  CHECK_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
  CHECK(signals > 0);
}

}  // namespace

int main() {
  if (!mc::can_copy_guarded()) {
    puts("  no restartable sequences here");
    return 0;
  }
  for (uint64_t nbytes = 0; nbytes < 600; ++nbytes) check_range(nbytes % 35, nbytes % 7, nbytes);
  for (const uint64_t nbytes : {65'535, 65'536, 65'537, 262'144, 262'145, 500'003, 1'048'576}) {
    for (uint64_t offset = 0; offset < 40; offset += 13) check_range(offset, 40 - offset, nbytes);
  }
  check_withdrawn();
  check_under_signals();
  return 0;
}
