#include "transport/local/local_endpoint.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/crc.h"
#include "transport/copy.h"
#include "transport/raw.h"

namespace mc {
namespace {

constexpr uint64_t kPieceMax = 1 << 20;         // copied between two looks at stop and deadline
constexpr uint64_t kInlineMax = 256 << 10;      // of an asynchronous batch, copied by its caller

class EventWaiter final : public RoomWaiter {
 public:
  void room() override { event.set(); }
  Event event;
};

uint64_t total(const Batch& batch) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < batch.count(); ++i) {
    if (__builtin_add_overflow(sum, batch.slice(i).length, &sum)) return UINT64_MAX;
  }
  return sum;
}

}  // namespace

LocalLink::Pair LocalLink::join(Host& first, Host& second,
                                std::array<uint32_t, 2> message_bytes_max) {
  const auto link = std::make_shared<LocalLink>();
  link->hosts_ = {&first, &second};
  link->message_bytes_max_ = message_bytes_max;
  Pair pair{std::make_shared<LocalEndpoint>(link, 0, first),
            std::make_shared<LocalEndpoint>(link, 1, second)};
  link->ends_ = {pair[0], pair[1]};
  return pair;
}

EndpointNumbers LocalEndpoint::numbers() const {
  EndpointNumbers numbers;
  numbers.bytes_in = bytes_in_;
  numbers.bytes_out = bytes_out_;
  return numbers;
}

Failure LocalEndpoint::gone_locked() const {
  if (why_.status != MC_OK) return why_;
  return {MC_E_PEER_UNREACHABLE, "the engine in this process was closed"};
}

void LocalEndpoint::submit(const std::shared_ptr<Batch>& batch, bool blocking) {
  if (blocking || total(*batch) <= kInlineMax) return run(batch);
  own_.executor().run([self = shared_from_this(), batch] { self->run(batch); });
}

int32_t LocalEndpoint::run_now(std::span<mc_slice> slices) {
  int32_t first = MC_OK;
  for (size_t i = 0; i < slices.size(); ++i) {
    uint32_t crc = 0;
    const Part part = whole_part(slices[i], i);
    const int32_t status = slices[i].status = move(part, &crc);
    if (part.crc && status == MC_OK) slices[i].crc = crc;
    if (status != MC_OK && first == MC_OK) {
      first = fail(status, "slice %zu: %s", i, std::string(last_error()).c_str());
    }
  }
  return first;
}

void LocalEndpoint::run(const std::shared_ptr<Batch>& batch) {
  Part part;
  while (batch->next_part(kPieceMax, kPieceMax, &part) == Batch::Next::kPart) {
    if (batch->deadline().passed()) {
      batch->part_done(part, MC_E_TIMEOUT, 0, "the deadline passed during the copy");
      batch->finish(MC_E_TIMEOUT, "the deadline passed during the copy");
      return;
    }
    Copying copying(*batch);
    if (!copying) return;
    uint32_t crc = 0;
    const int32_t status = move(part, &crc);
    copying.end();
    batch->part_done(part, status, crc, status == MC_OK ? "" : last_error());
    if (status != MC_OK && closed_) return batch->finish(status, last_error());
  }
}

int32_t LocalEndpoint::move(const Part& part, uint32_t* out_crc) {
  const std::shared_lock lock(link_->mutex_);
  Host* host = link_->hosts_[other()];
  if (host == nullptr || link_->hosts_[side_] == nullptr) return gone_locked().raise();
  const bool reading = part.op == MC_OP_READ;
  const Pin pin(host->region(part.region));
  if (!pin || !pin->allows(reading ? MC_ACCESS_REMOTE_READ : MC_ACCESS_REMOTE_WRITE,
                           part.remote_offset, part.length)) {
    host->refused();
    return fail(MC_E_ACCESS, "%s", kRefused);
  }
  uint64_t local = part.local;
  uint32_t crc = 0;
  bool is_there = true;
  pin->each_piece(part.remote_offset, part.length, [&](const iovec& piece) {
    const auto remote = reinterpret_cast<uint64_t>(piece.iov_base);
    const uint64_t to = reading ? local : remote, from = reading ? remote : local;
    if (pin->is_raw()) {
      is_there = is_there && copy_raw(to, from, piece.iov_len);
      if (is_there && part.crc) crc = mc_crc32c(reinterpret_cast<const void*>(local), piece.iov_len, crc);
    } else if (part.crc) {
      crc = crc32c_concat(crc, mc_copy_crc32c(to, from, piece.iov_len), piece.iov_len);
    } else {
      copy_bytes(to, from, piece.iov_len);
    }
    local += piece.iov_len;
  });
  if (!is_there) return fail(MC_E_ACCESS, "%s", kRefused);
  *out_crc = crc;
  (reading ? bytes_in_ : bytes_out_) += part.length;
  return MC_OK;
}

void LocalEndpoint::cancel(const std::shared_ptr<Batch>& batch, int32_t status,
                           const char* reason) {
  batch->stop();
  batch->finish(status, reason);
}

int32_t LocalEndpoint::send(const MessageHead& head, const void* bytes, Deadline deadline) {
  if (head.nbytes > link_->message_bytes_max_[other()]) {
    return fail(MC_E_USAGE, "the message has %u bytes, the peer accepts %u", head.nbytes,
                link_->message_bytes_max_[other()]);
  }
  Bytes copy = allocate_bytes(head.nbytes);
  if (!copy) return fail(MC_E_OUT_OF_SPACE, "no memory for a message of %u bytes", head.nbytes);
  if (head.nbytes > 0) memcpy(copy.get(), bytes, head.nbytes);
  for (;;) {
    const auto waiter = std::make_shared<EventWaiter>();
    Failure gone;
    {
      const std::shared_lock lock(link_->mutex_);
      Host* host = link_->hosts_[other()];
      const std::shared_ptr<LocalEndpoint> end = link_->ends_[other()].lock();
      if (host == nullptr || !end || closed_) gone = gone_locked();
      else if (host->reserve(head.nbytes, waiter)) {
        host->deliver(*end, head, std::move(copy));
        return MC_OK;
      }
    }
    if (gone.status != MC_OK) {  // known here before the progress thread hears of it
      close(gone);
      return gone.raise();
    }
    // Short sleeps as well, so that a peer that closes meanwhile is noticed.
    const Deadline look = std::min(deadline, Deadline::in_ms(100));
    if (!waiter->event.wait(look) && deadline.passed()) {
      return fail(MC_E_TIMEOUT, "the peer does not take its messages");
    }
  }
}

int32_t LocalEndpoint::reply(uint64_t correlation, const void* bytes, uint32_t nbytes) {
  Bytes copy = allocate_bytes(nbytes);
  if (!copy) return fail(MC_E_OUT_OF_SPACE, "no memory for a reply of %u bytes", nbytes);
  if (nbytes > 0) memcpy(copy.get(), bytes, nbytes);
  const std::shared_lock lock(link_->mutex_);
  Host* host = link_->hosts_[other()];
  const std::shared_ptr<LocalEndpoint> end = link_->ends_[other()].lock();
  if (host == nullptr || !end || closed_) return gone_locked().raise();
  host->deliver_reply(*end, correlation, std::move(copy), nbytes);
  return MC_OK;
}

int32_t LocalEndpoint::map(uint32_t region, Deadline, uint64_t* out_address,
                           uint64_t* out_nbytes) {
  const std::shared_lock lock(link_->mutex_);
  Host* host = link_->hosts_[other()];
  if (host == nullptr) return gone_locked().raise();
  const Pin pin(host->region(region));
  if (!pin) return fail(MC_E_ACCESS, "the peer has no region %u", region);
  if (pin->fd() < 0) return fail(MC_E_ACCESS, "region %u has no memfd to map", region);
  void* at = mmap(nullptr, pin->nbytes(), PROT_READ, MAP_SHARED | MAP_POPULATE, pin->fd(), 0);
  if (at == MAP_FAILED) return fail_errno(MC_E_ACCESS, "mmap of region %u", region);
  *out_address = reinterpret_cast<uint64_t>(at);
  *out_nbytes = pin->nbytes();
  return MC_OK;
}

void LocalEndpoint::close(const Failure& why) {
  if (closed_.exchange(true)) return;
  const auto self = shared_from_this();
  std::shared_ptr<LocalEndpoint> far;
  {
    const std::unique_lock lock(link_->mutex_);
    far = link_->ends_[other()].lock();
    Host* far_host = link_->hosts_[other()];
    try {
      if (far_host != nullptr && far) {
        far_host->loop().post([far, gone = gone_locked()] { far->close(gone); });
      }
      why_ = why;
    } catch (const std::bad_alloc&) {
      // The other side notices at its next use.
    }
    link_->hosts_[side_] = nullptr;
  }
  own_.lost(*this, why);
}

}  // namespace mc
