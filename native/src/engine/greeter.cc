#include "engine/greeter.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <bit>
#include <cerrno>

#include "transport/shm/shm_endpoint.h"

namespace mc {
namespace {

constexpr uint64_t kMeetingMs = 5'000;  // a stranger's time to become a peer
constexpr uint64_t kRestMs = 50;        // without descriptors
constexpr int kAcceptsMax = 64;         // in a row

}  // namespace

// ---- Listener ------------------------------------------------------------------------------

int32_t Listener::start() { return engine_.loop().add(shared_from_this(), fd_.get(), EPOLLIN); }

void Listener::close() {
  engine_.loop().remove(*this, fd_.get());
  ::shutdown(fd_.get(), SHUT_RDWR);
}

void Listener::ready_on_progress(uint32_t) {
  for (int i = 0; i < kAcceptsMax; ++i) {
    Fd fd(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        rest_on_progress();
      }
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    if (!engine_.add_stranger()) {
      engine_.refused();
      continue;
    }
    if (!is_unix_) tune_tcp(fd.get(), engine_.settings().calling.silence_max_ms);
    const auto greeter = std::make_shared<Greeter>(engine_, std::move(fd), is_unix_);
    (void)greeter->start();
  }
}

void Listener::rest_on_progress() {
  engine_.loop().modify(*this, fd_.get(), 0);
  engine_.loop().call_at(Deadline::in_ms(kRestMs), [self = shared_from_this()] {
    self->engine_.loop().modify(*self, self->fd_.get(), EPOLLIN);
  });
}

// ---- Greeter -------------------------------------------------------------------------------

Greeter::Greeter(Engine& engine, Fd fd, bool is_unix)
    : engine_(engine), fd_(std::move(fd)), is_unix_(is_unix), expected_(is_unix ? Step::kShmHello : Step::kHello) {}

Greeter::~Greeter() { engine_.drop_stranger(); }

int32_t Greeter::start() {
  timer_ = engine_.loop().call_at(Deadline::in_ms(kMeetingMs), [weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && self->fd_) {
      self->engine_.refused();
      self->hang_up_on_progress();
    }
  });
  return engine_.loop().add(shared_from_this(), fd_.get(), EPOLLIN);
}

void Greeter::hang_up_on_progress() {
  engine_.loop().cancel_call(timer_);
  engine_.loop().remove(*this, fd_.get());
  fd_.reset(-1);
}

void Greeter::ready_on_progress(uint32_t) {
  if (!fd_) return;
  auto* bytes = reinterpret_cast<uint8_t*>(&got_);
  const ssize_t n = receive_with_fd(fd_.get(), bytes + have_, sizeof got_ - have_, &passed_);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) return hang_up_on_progress();  // it decided for another way, or was no peer
  have_ += static_cast<size_t>(n);
  if (have_ >= sizeof got_.magic && got_.magic != kHelloMagic) {
    engine_.refused();
    return hang_up_on_progress();
  }
  if (have_ < sizeof got_) return;
  have_ = 0;
  step_on_progress();
}

void Greeter::step_on_progress() {
  if (got_.step == Step::kLane && expected_ == Step::kHello) return lane_on_progress();
  if (const int32_t status = check_hello(got_, expected_); status != MC_OK) {
    engine_.refused();
    Hello answer = engine_.own_hello();
    answer.step = expected_;
    answer.status = status == MC_E_VERSION ? status : MC_E_PEER_UNREACHABLE;
    (void)answer_on_progress(answer);
    return hang_up_on_progress();
  }
  switch (expected_) {
    case Step::kHello: return hello_on_progress();
    case Step::kShmHello: return shm_hello_on_progress();
    case Step::kShmProof: return shm_proof_on_progress();
    default: return choice_on_progress();
  }
}

bool Greeter::answer_on_progress(const Hello& hello, int passed) {
  // A fresh socket takes so few bytes at once, or it is not worth talking to.
  return send_with_fd(fd_.get(), &hello, sizeof hello, passed) ==
         static_cast<ssize_t>(sizeof hello);
}

void Greeter::hello_on_progress() {
  first_ = got_;
  Hello answer = engine_.own_hello();
  answer.step = Step::kHello;
  answer.session = session_;
  expected_ = Step::kChoice;
  if (!answer_on_progress(answer)) hang_up_on_progress();
}

Introduction Greeter::stranger() const {
  return {first_.incarnation, first_.address_text(), first_.transports, first_.message_bytes_max,
          first_.message_window, first_.rdma_ports};
}

void Greeter::choice_on_progress() {
  const uint32_t choice = got_.choice;
  Hello ready = engine_.own_hello();
  ready.step = Step::kReady;
  constexpr uint32_t streams = MC_TRANSPORT_TCP | MC_TRANSPORT_FAKE | MC_TRANSPORT_RDMA;
  // Messages are taken from whoever may call at all: they travel by TCP whatever bytes travel by.
  const uint32_t possible = (streams & engine_.transports()) | MC_TRANSPORT_MESSAGES;
  if (std::popcount(choice) != 1 || (choice & possible) == 0) {
    ready.status = MC_E_PEER_UNREACHABLE;
    engine_.refused();
    (void)answer_on_progress(ready);
    return hang_up_on_progress();
  }
  if (!answer_on_progress(ready)) return hang_up_on_progress();
  engine_.loop().cancel_call(timer_);
  engine_.loop().remove(*this, fd_.get());
  const auto endpoint = engine_.make_stream(choice, stranger(), "tcp: the peer chose it");
  (void)endpoint->add_lane(std::move(fd_));
  engine_.add_session(session_, endpoint);
  engine_.adopt(endpoint, stranger(), "");
  if (endpoint->start() != MC_OK) endpoint->close(Failure::last(MC_E_PEER_UNREACHABLE));
}

void Greeter::lane_on_progress() {
  Hello ready = engine_.own_hello();
  ready.step = Step::kReady;
  const auto endpoint =
      check_hello(got_, Step::kLane) == MC_OK ? engine_.session(got_.session) : nullptr;
  if (!endpoint) {
    engine_.refused();
    ready.status = MC_E_PEER_UNREACHABLE;
  }
  const bool answered = answer_on_progress(ready);
  if (!endpoint || !answered) return hang_up_on_progress();
  engine_.loop().cancel_call(timer_);
  engine_.loop().remove(*this, fd_.get());
  (void)endpoint->add_lane(std::move(fd_));
}

// ---- the proof of shared memory ------------------------------------------------------------

void Greeter::shm_hello_on_progress() {
  first_ = got_;
  Hello answer = engine_.own_hello();
  answer.step = Step::kShmHello;
  if (!read_proof(passed_, &answer.token) || proof_.make() != MC_OK) {
    engine_.refused();
    return hang_up_on_progress();
  }
  passed_.reset(-1);
  tie(fd_.get(), answer.token, got_.token_address, &ties_);
  answer.reads_memory = ties_.we_read ? 1 : 0;
  answer.token_address = proof_.token_address();
  expected_ = Step::kShmProof;
  if (!answer_on_progress(answer, proof_.fd())) hang_up_on_progress();
}

void Greeter::shm_proof_on_progress() {
  Hello ready = engine_.own_hello();
  ready.step = Step::kReady;
  const bool proven = got_.token == proof_.token();
  if (!proven) {
    engine_.refused();
    ready.status = MC_E_PEER_UNREACHABLE;
  }
  if (!answer_on_progress(ready) || !proven) return hang_up_on_progress();
  engine_.loop().cancel_call(timer_);
  engine_.loop().remove(*this, fd_.get());
  ties_.it_reads = got_.reads_memory != 0;
  const auto endpoint = std::make_shared<ShmEndpoint>(engine_, stranger(),
                                                      engine_.stream_limits(), std::move(ties_));
  (void)endpoint->add_lane(std::move(fd_), true);
  engine_.adopt(endpoint, stranger(), "");
  if (endpoint->start() != MC_OK) endpoint->close(Failure::last(MC_E_PEER_UNREACHABLE));
}

}  // namespace mc
