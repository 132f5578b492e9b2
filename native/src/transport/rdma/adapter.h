// One port of one RDMA device: its protection domain, its completion queue, and who waits there.
//
// All queue pairs of the port share one completion queue. Whoever polls it hands each completion to
// the owner of its rail; the order of completions is kept by poll_mutex_. Rails are known by numbers
// that are never re-used, so that what a destroyed queue pair left in the queue reaches nobody.
//
// Bound: a work request is posted against a credit; there are as many credits as the queue has
// room for. Who gets none waits, and is called when some came back.
//
// Polling then events. Whoever posts sees to it that the completion is noticed: he arms the queue
// before, or he polls after it for a short while (as long as completions have lately taken, see
// Patience) and, when something is still outstanding, arms the queue then and polls once more. An
// armed queue makes one event on its channel, and whoever makes progress does the same with it.
//
// Lock order: poll_mutex_, then an owner's mutex, then arm_mutex_ or rails_mutex_.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/loop.h"
#include "transport/rdma/choice.h"
#include "transport/rdma/verbs.h"

namespace mc::rdma {

struct AdapterOptions {
  std::vector<std::string> devices;  // "name" or "name:port"; empty: every active port
  int gid_index = -1;                // -1: chosen
  int traffic_class = -1;            // -1: 0
  uint64_t region_bytes_max = 0;     // registered at once; 0: what the device says
};

// Who has rails on an adapter.
class RailOwner {
 public:
  virtual ~RailOwner() = default;
  // Under the adapter's poll_mutex_: take note only.
  virtual void completed(uint32_t rail, const verbs::Wc& completion) = 0;
  // Without locks, after one or more completed(): finish what is done and post what waits.
  virtual void settle_completed() = 0;
};

// How long polling pays: about as long as completions took lately, if that is short.
class Patience {
 public:
  int64_t spin_ns() const;  // 0: look once
  void took(int64_t ns);

 private:
  std::atomic<int64_t> usual_ns_{0};
};

class Adapter final : public Source, public std::enable_shared_from_this<Adapter> {
 public:
  static std::shared_ptr<Adapter> open(const verbs::Library& library, verbs::Device* device,
                                       uint8_t port, const AdapterOptions& options,
                                       std::string* why);
  ~Adapter() override;
  Adapter(const Adapter&) = delete;
  Adapter& operator=(const Adapter&) = delete;

  // `port_changed`: the port went down or came up; on the progress thread.
  int32_t start(Loop& loop, std::function<void()> port_changed);
  void stop();

  const std::string& name() const { return name_; }
  uint8_t port() const { return port_; }
  bool is_active() const { return active_; }
  int numa_node() const { return numa_node_; }
  uint32_t mtu() const { return mtu_; }
  uint16_t lid() const { return lid_; }
  uint8_t link_layer() const { return link_layer_; }
  uint8_t traffic_class() const { return traffic_class_; }
  uint8_t rd_atomic() const { return rd_atomic_; }
  uint64_t region_bytes_max() const { return region_bytes_max_; }
  std::vector<GidEntry> gids() const;
  std::string text() const;  // what was chosen and why

  // Null, with errno: refused.
  verbs::Mr* register_memory(uint64_t address, uint64_t nbytes, int access);
  void deregister_memory(verbs::Mr* mr);

  // A queue pair in its first state; null with the words in last_error(). `posts`: it will send.
  verbs::Qp* create_qp(bool posts, uint32_t* out_inline_bytes);
  int modify_qp(verbs::Qp* qp, verbs::QpAttr* attr, int mask) {
    return library_.modify_qp(qp, attr, mask);
  }
  void destroy_qp(verbs::Qp* qp);
  // `inlined` of the `works` carry their bytes themselves.
  int post(verbs::Qp* qp, verbs::SendWr* first, size_t works, size_t inlined,
           verbs::SendWr** out_bad) {
    works_ += works;
    inlined_ += inlined;
    ++doorbells_;
    return context_->operations.post_send(qp, first, out_bad);
  }
  const char* words_of(uint32_t status) const { return library_.wc_status_str(status); }

  uint32_t add_rail(std::weak_ptr<RailOwner> owner);
  void drop_rail(uint32_t rail);

  // Credits: false, and the owner is called with settle_completed() once there may be some.
  bool take_credit(const std::weak_ptr<RailOwner>& owner);
  void give_credits(uint64_t n);

  // Hand out what has completed; how many.
  size_t poll();
  // An event will come for what completes from now on; cheap when that is so already.
  void arm();
  uint64_t outstanding() const;
  Patience& patience() { return patience_; }

  void ready_on_progress(uint32_t events) override;

  uint64_t qps() const { return qps_; }
  uint64_t works() const { return works_; }  // posted
  uint64_t inlined() const { return inlined_; }
  uint64_t doorbells() const { return doorbells_; }
  uint64_t completions() const { return completions_; }
  uint64_t polls() const { return polls_; }
  uint64_t events() const { return events_; }

 private:
  class AsyncWatch;

  Adapter(const verbs::Library& library, std::string name, uint8_t port)
      : library_(library), name_(std::move(name)), port_(port) {}
  bool open_all(verbs::Device* device, const AdapterOptions& options, std::string* why);
  void read_gids();
  void async_on_progress();

  const verbs::Library& library_;
  const std::string name_;
  const uint8_t port_;
  verbs::Context* context_ = nullptr;
  verbs::Pd* pd_ = nullptr;
  verbs::Channel* channel_ = nullptr;
  verbs::Cq* cq_ = nullptr;
  verbs::DeviceAttr device_attr_{};
  uint32_t mtu_ = 0;
  uint16_t lid_ = 0;
  uint8_t link_layer_ = 0, traffic_class_ = 0, rd_atomic_ = 1;
  int numa_node_ = -1, wanted_gid_ = -1, gid_count_ = 0;
  uint64_t region_bytes_max_ = 0;
  std::atomic<bool> active_{false};
  Patience patience_;
  Loop* loop_ = nullptr;
  std::function<void()> port_changed_;
  std::shared_ptr<AsyncWatch> async_;

  std::mutex arm_mutex_;  // a leaf
  bool armed_ = false;     // an event will come; true only once it was asked for

  std::mutex poll_mutex_;
  uint32_t unacknowledged_ = 0;

  mutable std::mutex rails_mutex_;  // a leaf; guards all below
  std::unordered_map<uint32_t, std::weak_ptr<RailOwner>> rails_;
  std::deque<std::weak_ptr<RailOwner>> waiting_;  // for credits
  std::vector<GidEntry> gids_;
  uint64_t credits_ = 0, credits_max_ = 0;

  std::atomic<uint64_t> qps_{0}, works_{0}, inlined_{0}, doorbells_{0}, completions_{0}, polls_{0},
      events_{0};
};

// The ports to use, in the order in which they were asked for, else by name.
// Empty: none is usable, and *why says so. A port that was named and is missing is a failure.
std::vector<std::shared_ptr<Adapter>> open_adapters(const AdapterOptions& options,
                                                    std::string* why);

}  // namespace mc::rdma
