// The side that is called: listening sockets and strangers until they are peers.
//
// Strangers are served by the progress thread without waiting: a bounded number of them, each with
// a deadline, and nothing is allocated from what they say.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "engine/hello.h"
#include "transport/shm/proof.h"

namespace mc {

class Listener final : public Source, public std::enable_shared_from_this<Listener> {
 public:
  Listener(Engine& engine, Fd fd, bool is_unix)
      : engine_(engine), fd_(std::move(fd)), is_unix_(is_unix) {}
  int32_t start();
  void close();
  void ready_on_progress(uint32_t events) override;

 private:
  void rest_on_progress();  // out of descriptors: try again later

  Engine& engine_;
  Fd fd_;
  const bool is_unix_;
};

class Greeter final : public Source, public std::enable_shared_from_this<Greeter> {
 public:
  Greeter(Engine& engine, Fd fd, bool is_unix);
  ~Greeter() override;
  int32_t start();
  void ready_on_progress(uint32_t events) override;

 private:
  void hang_up_on_progress();
  void step_on_progress();
  void hello_on_progress();
  void choice_on_progress();
  void lane_on_progress();
  void shm_hello_on_progress();
  void shm_proof_on_progress();
  bool answer_on_progress(const Hello& hello, int passed = -1);
  Introduction stranger() const;

  Engine& engine_;
  Fd fd_;
  const bool is_unix_;
  uint64_t timer_ = 0;
  Step expected_;
  Hello got_;
  size_t have_ = 0;
  Hello first_;  // what the stranger said of itself
  const Token session_ = random_token();
  Fd passed_;  // the memfd of its proof
  Proof proof_;
  ShmTies ties_;
};

}  // namespace mc
