// How the parts of batches become work requests, and what becomes of those.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/rdma/rdma_endpoint.h"

namespace mc {

using namespace rdma;

namespace {

constexpr size_t kReadyMax = 64;       // works made ahead of posting
// Between two completions: every one costs system calls here. A work that the processor has to look
// at afterwards (to copy it on, or for its checksum) gets one of its own, unless it is small.
constexpr uint64_t kSignalBytes = 4 << 20;
constexpr uint64_t kSignalOwnBytes = 64 << 10;
constexpr uint32_t kSignalEvery = 16;
constexpr uint32_t kTriesMax = 12;
constexpr char kUnregistered[] = "the memory here was unregistered before the transfer had ended";

bool is_remote_refusal(uint32_t status) {
  return status == verbs::kWcRemoteAccess || status == verbs::kWcRemoteInvalid ||
         status == verbs::kWcRemoteOperation;
}

}  // namespace

// ---- parts to works ----------------------------------------------------------------------------

void RdmaEndpoint::pump(Notice notice) {
  for (;;) {
    Jobs finished;
    {
      const std::lock_guard lock(work_mutex_);
      for (bool more = !ended_; more;) {
        const bool took = next_jobs_locked();
        post_locked(notice);
        more = took && ready_.size() < kReadyMax;
      }
      finished.swap(finished_);
    }
    if (finished.empty()) return;
    for (const auto& job : finished) finish(*job);  // which may let a fenced slice begin
  }
}

void RdmaEndpoint::settle_completed() { pump(); }

// True: something was handed out, so there may be more.
bool RdmaEndpoint::next_jobs_locked() {
  bool took = false;
  while (!unplaced_.empty()) {
    const std::shared_ptr<Job> job = unplaced_.front();
    if (!route_locked(job)) return took;
    unplaced_.pop_front();
    took = true;
  }
  const auto ready = std::count_if(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.state == Rail::State::kReady;
  });
  const uint64_t part_max = part_bytes(static_cast<size_t>(ready));
  if (!batches_.empty()) want_rails_locked();
  for (auto it = batches_.begin(); it != batches_.end();) {
    if (ready_.size() >= kReadyMax || flights_ >= kWindow || !unplaced_.empty()) return took;
    Part part;
    const Batch::Next next = (*it)->next_part(part_max, part_max, &part);
    if (next == Batch::Next::kEnd) {
      it = batches_.erase(it);
    } else if (next == Batch::Next::kFence) {
      ++it;
    } else {
      auto job = std::make_shared<Job>();
      job->batch = *it;
      job->part = part;
      ++flights_;
      begin_job_locked(job);
      took = true;
    }
  }
  return took;
}

void RdmaEndpoint::begin_job_locked(const std::shared_ptr<Job>& job) {
  const Part& part = job->part;
  const auto [found, is_new] = regions_.try_emplace(part.region);
  if (!found->second.region) {
    found->second.waiting.push_back(job);
    if (is_new) ask_locked(part.region);
    return;
  }
  job->region = found->second.region;
  ++job->region->users;
  const uint32_t wanted =
      part.op == MC_OP_READ ? MC_ACCESS_REMOTE_READ : MC_ACCESS_REMOTE_WRITE;
  if (!job->region->allows(wanted, part.remote_offset, part.length)) {
    return fail_locked(job, MC_E_ACCESS, kRefused);
  }
  if (part.length == 0) return finished_.push_back(job);
  if (!route_locked(job)) unplaced_.push_back(job);
}

// By rail, or by the control connection where there is none. False: it must wait (see unplaced_).
bool RdmaEndpoint::route_locked(const std::shared_ptr<Job>& job) {
  if (job->writes() && !may_write_locked()) return false;
  if (any_hope_locked()) return place_locked(job);
  by_stream_locked(job);
  return true;
}

// The works of a job from where its bytes lie now, or whose end no device can reach. kGone: raw
// memory of ours that is not mapped any more, though the device still has its pages.
RdmaEndpoint::Reach RdmaEndpoint::works_locked(const std::shared_ptr<Job>& job,
                                               std::vector<Work>* out) {
  const Part& part = job->part;
  const auto use = job->writes() ? MemoryBook::Use::kSource : MemoryBook::Use::kTarget;
  uint64_t offset = part.remote_offset, local = job->local();
  for (uint64_t left = part.length; left > 0;) {
    const Span* span = job->region->at(offset);
    if (span == nullptr) return Reach::kNotTheirs;
    uint64_t n = std::min(left, span->offset + span->nbytes - offset);
    auto memory = job->staged != 0 ? fabric_.staging().registration()
                                   : fabric_.memory().find(local, use);
    if (!memory) return Reach::kNotOurs;
    n = std::min(n, memory->address() + memory->nbytes() - local);
    if (memory->raw() && !is_mapped(local, n)) return Reach::kGone;
    out->push_back({job, std::move(memory), local, span->address + (offset - span->offset), n, span});
    offset += n;
    local += n;
    left -= n;
  }
  return Reach::kAll;
}

// False: it must wait for room in Staging.
bool RdmaEndpoint::place_locked(const std::shared_ptr<Job>& job) {
  const Part& part = job->part;
  std::vector<Work> works;
  const Reach reach = works_locked(job, &works);
  if (reach == Reach::kGone) {
    fail_locked(job, MC_E_ACCESS, "the raw memory here is not mapped any more");
    return true;
  }
  if (reach == Reach::kNotTheirs) {
    by_stream_locked(job);
    return true;
  }
  if (reach == Reach::kNotOurs) {
    works.clear();
    const int32_t status = fabric_.staging().allocate(part.length, &job->staged);
    if (status == MC_E_BACKPRESSURE) {
      look_again_soon_locked();
      return false;
    }
    if (status == MC_OK && part.op == MC_OP_WRITE) {
      if (const Copying copying(*job->batch); copying) {
        mc_copy(job->staged, part.local, part.length);
      }
    }
    if (status != MC_OK || works_locked(job, &works) != Reach::kAll) {
      by_stream_locked(job);
      return true;
    }
    ++staged_parts_;
  }
  job->open = works.size();
  ready_.insert(ready_.end(), works.begin(), works.end());
  return true;
}

void RdmaEndpoint::by_stream_locked(const std::shared_ptr<Job>& job) {
  if (!any_hope_locked() && !tcp_allowed_) {
    return fail_locked(job, MC_E_PEER_UNREACHABLE, "no path: " + why_no_rail_locked());
  }
  if (!any_hope_locked()) trouble_ = why_no_rail_locked();
  release_locked(*job);
  ++streamed_parts_;
  if (!issue_part(job->batch, job->part)) {
    job->batch->part_done(job->part, MC_E_PEER_UNREACHABLE, 0, "the peer is gone");
  }
}

void RdmaEndpoint::fail_locked(const std::shared_ptr<Job>& job, int32_t status, std::string why) {
  release_locked(*job);
  job->batch->part_done(job->part, status, 0, why.c_str());
}

void RdmaEndpoint::release_locked(Job& job) {
  --flights_;
  if (job.staged != 0) fabric_.staging().free(job.staged, job.part.length);
  job.staged = 0;
  if (!job.region) return;
  if (--job.region->users == 0 && job.region->revoked) acknowledge(job.region->id);
  job.region.reset();
}

// No rail is left: what waits for one goes another way.
void RdmaEndpoint::rails_gone_locked() {
  std::set<std::shared_ptr<Job>> jobs;
  for (Work& work : ready_) {
    --work.job->open;
    jobs.insert(std::move(work.job));
  }
  ready_.clear();
  for (const auto& job : jobs) {
    if (job->open > 0) continue;  // cannot be: nothing is posted any more
    if (job->batch->stopped()) release_locked(*job);
    else if (!route_locked(job)) unplaced_.push_back(job);
  }
}

// ---- posting -----------------------------------------------------------------------------------

void RdmaEndpoint::post_locked(Notice notice) {
  if (ready_.empty()) return;
  want_rails_locked();
  std::vector<RailView> views;
  for (const Rail& rail : rails_) {
    views.push_back({rail.state == Rail::State::kReady, rail.outstanding_bytes,
                     rail.posted.size(), fabric_.adapters()[rail.ours]->numa_node()});
  }
  std::vector<std::vector<Work>> chains(rails_.size());
  while (!ready_.empty()) {
    Work& work = ready_.front();
    Job& job = *work.job;
    if (job.status != MC_OK || job.batch->stopped()) {
      if (--job.open == 0) finished_.push_back(work.job);
      ready_.pop_front();
      continue;
    }
    if (work.memory->ended()) {  // unregistered here while it waited for a rail
      job.status = MC_E_ACCESS;
      job.why = kUnregistered;
      continue;
    }
    if (job.writes() && !may_write_locked()) break;
    const int i = pick_rail(views, work.length, work.memory->numa_node());
    if (i < 0) break;
    const auto index = static_cast<size_t>(i);
    if (!fabric_.adapters()[rails_[index].ours]->take_credit(weak_owner())) {
      look_again_soon_locked();
      break;
    }
    views[index].outstanding_bytes += work.length;
    ++views[index].outstanding_count;
    chains[index].push_back(std::move(work));
    ready_.pop_front();
  }
  for (size_t i = rails_.size(); i-- > 0;) {
    if (chains[i].empty()) continue;
    if (notice == Notice::kByEvent) fabric_.adapters()[rails_[i].ours]->arm();
    post_chain_locked(rails_[i], &chains[i]);
  }
}

// One doorbell for all of them; only some ask for a completion, which stands for those before it.
void RdmaEndpoint::post_chain_locked(Rail& rail, std::vector<Work>* works) {
  Adapter& adapter = *fabric_.adapters()[rail.ours];
  const size_t n = works->size();
  size_t inlined = 0;
  std::vector<verbs::SendWr> requests(n);
  std::vector<verbs::Sge> sges(n);
  for (size_t i = 0; i < n; ++i) {
    const Work& work = (*works)[i];
    const bool read = work.job->part.op == MC_OP_READ;
    verbs::SendWr& request = requests[i];
    const uint32_t sequence = rail.next_sequence++;
    sges[i] = {work.local, static_cast<uint32_t>(work.length), work.memory->lkey(rail.ours)};
    request.id = uint64_t{rail.number} << 32 | sequence;
    request.next = i + 1 < n ? &requests[i + 1] : nullptr;
    request.sges = &sges[i];
    request.sge_count = 1;
    request.opcode = read ? verbs::kOpRead : verbs::kOpWrite;
    const bool looked_at = work.job->staged != 0 || work.job->part.crc;
    rail.unsignaled_bytes += work.length;
    const bool signaled = i + 1 == n || rail.unsignaled_bytes >= kSignalBytes ||
                          (looked_at && work.length >= kSignalOwnBytes) ||
                          sequence % kSignalEvery == 0;
    if (signaled) rail.unsignaled_bytes = 0;
    request.flags = signaled ? verbs::kSendSignaled : 0;
    if (!read && work.length <= rail.inline_bytes) {
      request.flags |= verbs::kSendInline;
      ++inlined;
    }
    request.remote = work.remote;
    request.rkey = work.span->rkeys[rail.theirs];
    rail.outstanding_bytes += work.length;
    rail.posted.push_back({sequence, work});
  }
  verbs::SendWr* bad = nullptr;
  const int error = adapter.post(rail.qp, requests.data(), n, inlined, &bad);
  if (error == 0) return;
  // The device took a part of the chain at most, which may end without a completion: begin anew.
  break_locked(rail, "the device took no work: " + errno_text(error), true);
}

// ---- completions -------------------------------------------------------------------------------

// All works up to this one have succeeded.
void RdmaEndpoint::succeeded_locked(Rail& rail, uint32_t sequence, bool inclusive) {
  uint64_t n = 0;
  while (!rail.posted.empty()) {
    const auto ahead = static_cast<int32_t>(sequence - rail.posted.front().sequence);
    if (inclusive ? ahead < 0 : ahead <= 0) break;
    Work work = std::move(rail.posted.front().work);
    rail.posted.pop_front();
    rail.outstanding_bytes -= work.length;
    (work.job->part.op == MC_OP_READ ? rail.read_bytes : rail.written_bytes) += work.length;
    if (--work.job->open == 0) finished_.push_back(std::move(work.job));
    ++n;
  }
  if (n == 0) return;
  fabric_.adapters()[rail.ours]->give_credits(n);
  rail.backoff.worked();
}

void RdmaEndpoint::completed(uint32_t number, const verbs::Wc& completion) {
  const std::lock_guard lock(work_mutex_);
  const auto found = std::find_if(rails_.begin(), rails_.end(),
                                  [&](const Rail& rail) { return rail.number == number; });
  if (found == rails_.end() || found->qp == nullptr) return;
  Rail& rail = *found;
  const auto sequence = static_cast<uint32_t>(completion.id);
  if (completion.status == verbs::kWcSuccess) return succeeded_locked(rail, sequence, true);
  succeeded_locked(rail, sequence, false);
  const std::string words = fabric_.adapters()[rail.ours]->words_of(completion.status);
  const bool refusal = is_remote_refusal(completion.status);
  if (!rail.posted.empty() && rail.posted.front().sequence == sequence) {
    Job& job = *rail.posted.front().work.job;
    if (completion.status == verbs::kWcLocalProtection) {
      job.status = MC_E_ACCESS;
      job.why = kUnregistered;
    } else if (refusal) {
      job.status = MC_E_ACCESS;
      job.why = kRefused;
      if (job.region) regions_.erase(job.region->id);  // the next one asks what it is now
    } else if (completion.status != verbs::kWcFlushed && ++job.tries >= kTriesMax) {
      job.status = MC_E_PEER_UNREACHABLE;
      job.why = "given up after " + std::to_string(job.tries) + " tries: " + words;
    }
  }
  break_locked(rail, words, !refusal && completion.status != verbs::kWcLocalProtection);
}

void RdmaEndpoint::finish(Job& job) {
  const Part& part = job.part;
  uint32_t crc = 0;
  Copying copying(*job.batch);
  if (job.status == MC_OK && copying) {
    const bool arrived = job.staged != 0 && part.op == MC_OP_READ;
    if (arrived && part.crc) {
      crc = mc_copy_crc32c(part.local, job.staged, part.length);
    } else if (arrived) {
      mc_copy(part.local, job.staged, part.length);
    } else if (part.crc && part.length > 0) {
      crc = mc_crc32c(reinterpret_cast<const void*>(part.local), part.length, 0);
    }
  }
  // Stopped: whoever did that finishes it. Its bytes were not copied on, so this is no success.
  const bool stopped = !copying;
  copying.end();
  {
    const std::lock_guard lock(work_mutex_);
    release_locked(job);
  }
  if (!stopped) job.batch->part_done(part, job.status, crc, job.why.c_str());
}

}  // namespace mc
