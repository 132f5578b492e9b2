#include "transport/rdma/rdma_endpoint.h"

#include <sched.h>

#include <algorithm>

namespace mc {

using namespace rdma;

namespace {

constexpr uint64_t kSmallBytes = 64 << 10;  // a batch whose end is worth spinning for
constexpr int64_t kTooLongNs = 200'000;     // what a batch counts as that did not end meanwhile
constexpr int kPollsABurst = 64;            // between two looks at the clock
constexpr int64_t kBurstNs = 10'000;        // what they take, about
constexpr uint64_t kCancelMs = 20;  // what is posted may end by itself before its rail is destroyed

bool is_small(const Batch& batch) {  // not yet submitted
  uint64_t sum = 0;
  for (uint64_t i = 0; i < batch.count(); ++i) {
    if (i == 16 || batch.slice(i).length > kSmallBytes) return false;
    sum += batch.slice(i).length;
  }
  return sum <= kSmallBytes;
}

}  // namespace

namespace rdma {

const Span* RemoteRegion::at(uint64_t offset) const {
  auto after = std::upper_bound(spans.begin(), spans.end(), offset,
                                [](uint64_t at, const Span& span) { return at < span.offset; });
  if (after == spans.begin()) return nullptr;
  const Span& span = *std::prev(after);
  return offset - span.offset < span.nbytes ? &span : nullptr;
}

const char* state_name(Rail::State state) {
  switch (state) {
    case Rail::State::kIdle: return "idle";
    case Rail::State::kConnecting: return "connecting";
    case Rail::State::kReady: return "ready";
    case Rail::State::kPaused: return "paused";
    default: return "down";
  }
}

}  // namespace rdma

RdmaEndpoint::RdmaEndpoint(Host& host, Introduction peer, StreamLimits limits, Fabric& fabric,
                           bool tcp_allowed)
    : StreamEndpoint(host, peer, limits, "rdma"),
      fabric_(fabric),
      tcp_allowed_(tcp_allowed),
      peer_ports_(std::clamp<size_t>(peer.rdma_ports, 1, kAdaptersMax)) {
  const size_t mine = fabric_.adapters().size();
  for (size_t i = 0; i < std::max(mine, peer_ports_); ++i) {
    Rail rail;
    rail.ours = i % mine;
    rail.theirs = i % peer_ports_;
    rails_.push_back(std::move(rail));
  }
}

RdmaEndpoint::~RdmaEndpoint() {
  fabric_.forget(*this);
  const std::lock_guard lock(work_mutex_);
  for (Rail& rail : rails_) destroy_locked(rail, Tell::kNobody);
  while (!passive_.empty()) close_passive_locked(passive_.begin()->first);
}

std::string RdmaEndpoint::reason() const {
  const std::lock_guard lock(work_mutex_);
  std::string text = "rdma:";
  for (const Rail& rail : rails_) {
    text += std::string(&rail == rails_.data() ? " " : ", ") +
            fabric_.adapters()[rail.ours]->name() + " " + state_name(rail.state);
    if (!rail.path.empty()) text += " (" + rail.path + ")";
    if (!rail.why.empty() && rail.state != Rail::State::kReady) text += " because " + rail.why;
  }
  if (!trouble_.empty()) text += "; data over tcp: " + trouble_;
  return text;
}

std::string RdmaEndpoint::paths_json() const {
  const auto field = [](const char* name, uint64_t value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  const auto clean = [](std::string text) {
    for (char& c : text) c = c == '"' || c == '\\' || static_cast<uint8_t>(c) < 0x20 ? '\'' : c;
    return text;
  };
  const std::lock_guard lock(work_mutex_);
  std::string out = "[";
  for (const Rail& rail : rails_) {
    out += (out.size() > 1 ? ", " : "") + std::string("{\"port\": \"") +
           fabric_.adapters()[rail.ours]->name() + "\", \"state\": \"" + state_name(rail.state) +
           "\", \"path\": \"" + clean(rail.path) + "\", \"last_failure\": \"" + clean(rail.why) +
           "\"" + field("bytes_read", rail.read_bytes) +
           field("bytes_written", rail.written_bytes) + field("errors", rail.errors) +
           field("resent", rail.resent) + field("connects", rail.connects) +
           field("posted", rail.posted.size()) + "}";
  }
  return out + "]";
}

EndpointNumbers RdmaEndpoint::numbers() const {
  EndpointNumbers sum = StreamEndpoint::numbers();
  const std::lock_guard lock(work_mutex_);
  for (const Rail& rail : rails_) {
    sum.bytes_in += rail.read_bytes;
    sum.bytes_out += rail.written_bytes;
  }
  sum.in_flight += flights_;
  return sum;
}

void RdmaEndpoint::send_frame(const FrameHead& head, const void* body) {
  (void)lane(0)->write(
      [&](OutQueue& out) { return out.send(head, body, OutQueue::Room::kAlways); });
}

// ---- batches -----------------------------------------------------------------------------------

void RdmaEndpoint::submit(const std::shared_ptr<Batch>& batch, bool blocking) {
  const bool spins = blocking && is_small(*batch);
  bool ended = false;
  {
    const std::lock_guard lock(work_mutex_);
    ended = ended_;
    if (!ended) batches_.push_back(batch);
  }
  if (ended) {
    const Failure why = why_closed();
    return batch->finish(why.status, why.reason.c_str());
  }
  fabric_.touch(*this);
  pump(Notice::kLooked);
  look(batch, spins);
}

// Polls for as long as that pays; what the completion took, about.
int64_t RdmaEndpoint::spin(Adapter& adapter, const Batch& batch) {
  const auto burst = [&] {  // without a look at the clock, which may be a system call
    for (int i = 0; i < kPollsABurst && !batch.done(); ++i) {
      relax();
      (void)adapter.poll();
    }
  };
  const int64_t most = adapter.patience().spin_ns();
  if (batch.done()) return 0;
  if (most > 0) burst();
  if (batch.done()) return kBurstNs;
  // Bounded, also alone on a processor: a sleep and an event cost more than this at its longest.
  const int64_t begun = now_ns();
  for (int64_t now = begun; now - begun < most; now = now_ns()) {
    burst();
    if (batch.done()) return kBurstNs + now_ns() - begun;
  }
  return kTooLongNs;
}

// Completions that come soon are worth waiting for here; for the others an event is asked for.
void RdmaEndpoint::look(const std::shared_ptr<Batch>& batch, bool spins) {
  for (const auto& adapter : fabric_.adapters()) {
    if (adapter->outstanding() == 0) continue;
    Patience& patience = adapter->patience();
    (void)adapter->poll();
    if (spins) patience.took(spin(*adapter, *batch));
    if (adapter->outstanding() == 0) continue;
    adapter->arm();
    (void)adapter->poll();
  }
}

void RdmaEndpoint::issue() {
  StreamEndpoint::issue();
  pump();
}

// Whether this is on its way for the batch and touches memory that is not ours: what is read into
// Staging goes no further.
bool RdmaEndpoint::must_end(const Job& job, const Batch& batch) {
  return job.batch.get() == &batch && (job.staged == 0 || job.writes());
}

void RdmaEndpoint::wait_a_little(const Batch& batch) {
  if (host().loop().on_progress()) return;
  const Deadline deadline = Deadline::in_ms(kCancelMs);
  const auto ends = [&](const Rail& rail) {
    return std::none_of(rail.posted.begin(), rail.posted.end(), [&](const Posted& one) {
      return must_end(*one.work.job, batch);
    });
  };
  for (;;) {
    {
      const std::lock_guard lock(work_mutex_);
      if (std::all_of(rails_.begin(), rails_.end(), ends)) return;
    }
    size_t n = 0;
    for (const auto& adapter : fabric_.adapters()) n += adapter->poll();
    if (deadline.passed()) return;
    if (n == 0) sched_yield();
  }
}

// What was written by rails that have just ended lands no more, if the peer says so soon.
void RdmaEndpoint::wait_landed() {
  Loop& loop = host().loop();
  std::shared_ptr<Event> landed;
  {
    const std::lock_guard lock(work_mutex_);
    if (landing_.empty() || ended_) return;
    if (!landed_) landed_ = std::make_shared<Event>();
    landed = landed_;
  }
  (void)loop.wait(*landed, Deadline::in_ms(kCancelMs));
}

void RdmaEndpoint::cancel(const std::shared_ptr<Batch>& batch, int32_t status,
                          const char* reason) {
  batch->stop();
  {
    const std::lock_guard lock(work_mutex_);
    std::erase(batches_, batch);
    drop_waiting_locked(*batch);
  }
  wait_a_little(*batch);
  bool lands = false;
  {
    const std::lock_guard lock(work_mutex_);
    const size_t before = landing_.size();
    for (Rail& rail : rails_) {
      const bool ours = std::any_of(rail.posted.begin(), rail.posted.end(), [&](const Posted& one) {
        return must_end(*one.work.job, *batch);
      });
      if (ours) break_locked(rail, "a transfer on it was cancelled", false);
    }
    drop_waiting_locked(*batch);
    lands = landing_.size() > before;
  }
  if (lands) wait_landed();
  StreamEndpoint::cancel(batch, status, reason);
}

// Everything of the batch that is not posted.
void RdmaEndpoint::drop_waiting_locked(const Batch& batch) {
  for (auto it = ready_.begin(); it != ready_.end();) {
    Job& job = *it->job;
    if (job.batch.get() != &batch) {
      ++it;
      continue;
    }
    if (--job.open == 0) release_locked(job);
    it = ready_.erase(it);
  }
  const auto drop = [&](const std::shared_ptr<Job>& job) {
    if (job->batch.get() != &batch) return false;
    release_locked(*job);
    return true;
  };
  std::erase_if(unplaced_, drop);
  for (auto& [id, asked] : regions_) std::erase_if(asked.waiting, drop);
}

void RdmaEndpoint::closed(const Failure& why) {
  std::set<std::shared_ptr<Job>> jobs;
  std::deque<std::shared_ptr<Batch>> batches;
  Jobs finished;
  {
    const std::lock_guard lock(work_mutex_);
    ended_ = true;
    landing_.clear();
    if (landed_) landed_->set();
    for (Rail& rail : rails_) {
      std::deque<Work> posted;
      take_posted_locked(rail, &posted);
      destroy_locked(rail, Tell::kNobody);
      for (Work& work : posted) jobs.insert(std::move(work.job));
      rail.state = Rail::State::kDown;
    }
    while (!passive_.empty()) close_passive_locked(passive_.begin()->first);
    for (Work& work : ready_) jobs.insert(std::move(work.job));
    ready_.clear();
    jobs.insert(unplaced_.begin(), unplaced_.end());
    unplaced_.clear();
    for (auto& [id, asked] : regions_) jobs.insert(asked.waiting.begin(), asked.waiting.end());
    for (const auto& job : jobs) release_locked(*job);
    regions_.clear();
    batches.swap(batches_);
    finished.swap(finished_);
  }
  for (const auto& job : finished) finish(*job);
  for (const auto& job : jobs) {
    job->batch->part_done(job->part, why.status, 0, why.reason.c_str());
  }
  for (const auto& batch : batches) batch->finish(why.status, why.reason.c_str());
  fabric_.forget(*this);
  const std::lock_guard lock(told_mutex_);
  for (const auto& [id, one] : forgetting_) one.answered->set();
}

}  // namespace mc
