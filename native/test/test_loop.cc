// Whoever waits comes back, whichever thread makes progress: one alone, a crowd, and in turns.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/abi.h"
#include "base/loop.h"
#include "check.h"

namespace {

using mc::Deadline;
using mc::Event;
using mc::Loop;

// What a peer would be: its descriptor becomes ready, and the events of those that wait are set.
struct Bell final : mc::Source {
  mc::Fd fd{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::vector<std::atomic<Event*>> waiters;
  Loop& loop;
  Bell(Loop& on, size_t threads) : waiters(threads), loop(on) {}
  void ready_on_progress(uint32_t) override {
    CHECK(loop.drives_shared());
    uint64_t count = 0;
    (void)!read(fd.get(), &count, sizeof count);
    for (auto& waiter : waiters) {
      if (Event* event = waiter.exchange(nullptr)) event->set();
    }
  }
  void ring() const {
    const uint64_t one = 1;
    CHECK(write(fd.get(), &one, sizeof one) == ssize_t{sizeof one});
  }
};

void everybody_comes_back(size_t threads, int rounds) {
  Loop loop;
  CHECK_EQ(loop.start(), MC_OK);
  const auto bell = std::make_shared<Bell>(loop, threads);
  CHECK_EQ(loop.add(bell, bell->fd.get(), EPOLLIN, Loop::Set::kShared), MC_OK);
  std::vector<std::thread> all;
  for (size_t me = 0; me < threads; ++me) {
    all.emplace_back([&, me] {
      for (int i = 0; i < rounds; ++i) {
        const auto event = std::make_unique<Event>();
        bell->waiters[me] = event.get();
        bell->ring();
        CHECK(loop.wait(*event, Deadline::in_ms(20'000)));
        // Whoever sets it may still be about to wake; see Event::set.
      }
    });
  }
  for (std::thread& one : all) one.join();
  bell->ring();
  Event late;
  CHECK(!loop.wait(late, Deadline::in_ms(1)));  // a deadline counts alone as well as after a crowd
  loop.remove(*bell, bell->fd.get());
  loop.stop();
}

}  // namespace

int main() {
  for (const size_t threads : {1, 2, 4, 1}) everybody_comes_back(threads, 2'000);
}
