#include "transport/rdma/adapter.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "base/status.h"

namespace mc::rdma {
namespace {

constexpr int kCqSize = 8192;
constexpr uint32_t kSendDepth = 128;
constexpr uint32_t kInlineBytes[] = {220, 64, 0};  // tried in this order
constexpr int kRdAtomicMax = 16;
constexpr int64_t kSpinMaxNs = 60'000;
constexpr uint32_t kProbeEvery = 32;  // when spinning does not pay: whether it does by now

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

uint16_t vlan_of(const std::string& interface) {
  std::ifstream file("/proc/net/vlan/" + interface);
  std::string word;
  while (file >> word) {
    int vid = 0;
    if (word == "VID:" && file >> vid) return static_cast<uint16_t>(vid);
  }
  return 0;
}

uint32_t mtu_bytes(uint32_t code) { return code >= 1 && code <= 5 ? 128U << code : 0; }

}  // namespace

int64_t Patience::spin_ns() const {
  thread_local uint32_t calls = 0;
  const int64_t usual = usual_ns_;
  if (usual > kSpinMaxNs) return ++calls % kProbeEvery == 0 ? kSpinMaxNs : 0;
  return std::clamp<int64_t>(2 * usual, kSpinMaxNs / 2, kSpinMaxNs);
}

void Patience::took(int64_t ns) {
  const int64_t usual = usual_ns_;
  usual_ns_ = usual + (ns - usual) / 8;  // a lost update is no harm
}

// ---- opening -----------------------------------------------------------------------------------

class Adapter::AsyncWatch final : public Source {
 public:
  explicit AsyncWatch(std::weak_ptr<Adapter> adapter) : adapter_(std::move(adapter)) {}
  void ready_on_progress(uint32_t) override {
    if (const auto adapter = adapter_.lock()) adapter->async_on_progress();
  }

 private:
  const std::weak_ptr<Adapter> adapter_;
};

std::shared_ptr<Adapter> Adapter::open(const verbs::Library& library, verbs::Device* device,
                                       uint8_t port, const AdapterOptions& options,
                                       std::string* why) {
  const char* name = library.get_device_name(device);
  const std::shared_ptr<Adapter> adapter(new Adapter(library, name == nullptr ? "?" : name, port));
  if (adapter->open_all(device, options, why)) return adapter;
  *why = adapter->name_ + ":" + std::to_string(port) + ": " + *why;
  return nullptr;
}

bool Adapter::open_all(verbs::Device* device, const AdapterOptions& options, std::string* why) {
  const auto failed = [&](const char* what) {
    *why = std::string(what) + ": " + errno_text(errno);
    return false;
  };
  context_ = library_.open_device(device);
  if (context_ == nullptr) return failed("the device cannot be opened");
  if (!verbs::looks_right(*context_)) {
    *why = "libibverbs has another binary interface than ours";
    return false;
  }
  verbs::PortAttr attr{};
  if (library_.query_device(context_, &device_attr_) != 0) return failed("query_device");
  if (library_.query_port(context_, port_, &attr) != 0) return failed("there is no such port");
  active_ = attr.state == verbs::kPortActive;
  if (!active_) {
    *why = "the port is not active (state " + std::to_string(attr.state) + ", 4 is active)";
    return false;
  }
  mtu_ = attr.active_mtu;
  lid_ = attr.lid;
  link_layer_ = attr.link_layer;
  gid_count_ = attr.gid_count;
  wanted_gid_ = options.gid_index;
  traffic_class_ = static_cast<uint8_t>(std::clamp(options.traffic_class, 0, 255));
  rd_atomic_ = static_cast<uint8_t>(std::clamp(
      std::min(device_attr_.max_qp_rd_atom, device_attr_.max_qp_init_rd_atom), 1, kRdAtomicMax));
  region_bytes_max_ = options.region_bytes_max > 0
                          ? std::min(options.region_bytes_max, device_attr_.max_mr_size)
                          : device_attr_.max_mr_size;
  const std::string node = read_line("/sys/class/infiniband/" + name_ + "/device/numa_node");
  numa_node_ = node.empty() ? -1 : atoi(node.c_str());
  read_gids();
  if (gids_.empty() && link_layer_ != verbs::kLinkInfiniBand) {
    *why = wanted_gid_ >= 0 ? "GID " + std::to_string(wanted_gid_) + " is not usable for RoCE v2"
                            : "no GID for RoCE v2: its network interface has no address";
    return false;
  }
  pd_ = library_.alloc_pd(context_);
  if (pd_ == nullptr) return failed("no protection domain");
  channel_ = library_.create_comp_channel(context_);
  if (channel_ == nullptr) return failed("no completion channel");
  const int size = std::min(kCqSize, std::max(device_attr_.max_cqe, 1));
  cq_ = library_.create_cq(context_, size, nullptr, channel_, 0);
  if (cq_ == nullptr) return failed("no completion queue");
  credits_ = credits_max_ = static_cast<uint64_t>(size) / 2;  // the other half: flushed by queue pairs that ended
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  fcntl(context_->async_fd, F_SETFL, fcntl(context_->async_fd, F_GETFL) | O_NONBLOCK);
  return true;
}

void Adapter::read_gids() {
  std::vector<GidEntry> table;
  const std::string base = "/sys/class/infiniband/" + name_ + "/ports/" + std::to_string(port_);
  for (int i = 0; i < gid_count_ && i < 256; ++i) {
    verbs::Gid gid{};
    if (library_.query_gid(context_, port_, i, &gid) != 0) continue;
    GidEntry entry;
    memcpy(entry.raw.data(), gid.raw, sizeof gid.raw);
    entry.index = static_cast<uint16_t>(i);
    const std::string number = std::to_string(i);
    const std::string type = read_line(base + "/gid_attrs/types/" + number);
    if (link_layer_ == verbs::kLinkInfiniBand) entry.kind = kGidInfiniBand;
    else entry.kind = type.find("v2") != std::string::npos ? kGidRoce2 : kGidRoce1;
    entry.vlan = vlan_of(read_line(base + "/gid_attrs/ndevs/" + number));
    table.push_back(entry);
  }
  table = rank_gids(std::move(table), wanted_gid_);
  const std::lock_guard lock(rails_mutex_);
  gids_ = std::move(table);
}

Adapter::~Adapter() {
  if (cq_ != nullptr) {
    if (unacknowledged_ > 0) library_.ack_cq_events(cq_, unacknowledged_);
    (void)library_.destroy_cq(cq_);
  }
  if (channel_ != nullptr) (void)library_.destroy_comp_channel(channel_);
  if (pd_ != nullptr) (void)library_.dealloc_pd(pd_);
  if (context_ != nullptr) (void)library_.close_device(context_);
}

int32_t Adapter::start(Loop& loop, std::function<void()> port_changed) {
  loop_ = &loop;
  port_changed_ = std::move(port_changed);
  async_ = std::make_shared<AsyncWatch>(weak_from_this());
  int32_t status = loop.add(shared_from_this(), channel_->fd, EPOLLIN, Loop::Set::kShared);
  if (status == MC_OK) status = loop.add(async_, context_->async_fd, EPOLLIN);
  return status;
}

void Adapter::stop() {
  if (loop_ == nullptr) return;
  loop_->remove(*this, channel_->fd);
  loop_->remove(*async_, context_->async_fd);
}

std::vector<GidEntry> Adapter::gids() const {
  const std::lock_guard lock(rails_mutex_);
  return gids_;
}

std::string Adapter::text() const {
  const std::vector<GidEntry> known = gids();
  std::string out = name_ + ":" + std::to_string(port_) +
                    (link_layer_ == verbs::kLinkInfiniBand ? " InfiniBand" : " RoCE v2") + ", MTU " +
                    std::to_string(mtu_bytes(mtu_));
  if (!known.empty()) {
    out += ", GID " + std::to_string(known[0].index) + " (" + gid_text(known[0]) + ", " +
           (wanted_gid_ >= 0 ? "as asked" : "the best of " + std::to_string(known.size())) + ")";
    if (known[0].vlan != 0) out += ", VLAN " + std::to_string(known[0].vlan);
  }
  out += ", traffic class " + std::to_string(traffic_class_);
  out += numa_node_ < 0 ? ", NUMA node not known" : ", NUMA node " + std::to_string(numa_node_);
  return out;
}

// ---- memory and queue pairs --------------------------------------------------------------------

verbs::Mr* Adapter::register_memory(uint64_t address, uint64_t nbytes, int access) {
  return library_.reg_mr(pd_, reinterpret_cast<void*>(address), nbytes, access);
}

void Adapter::deregister_memory(verbs::Mr* mr) { (void)library_.dereg_mr(mr); }

verbs::Qp* Adapter::create_qp(bool posts, uint32_t* out_inline_bytes) {
  for (const uint32_t inline_bytes : kInlineBytes) {
    verbs::QpInit init{};
    init.send_cq = init.receive_cq = cq_;
    init.type = verbs::kQpRc;
    const auto most = static_cast<uint32_t>(std::max(device_attr_.max_qp_wr, 1));
    init.cap = {posts ? std::min(kSendDepth, most) : 1, 1, 1, 1, posts ? inline_bytes : 0};
    verbs::Qp* qp = library_.create_qp(pd_, &init);
    if (qp == nullptr && errno == EINVAL && posts && inline_bytes > 0) continue;
    if (qp == nullptr) {
      (void)fail_errno(MC_E_OUT_OF_SPACE, "%s: no queue pair (of %d)", name_.c_str(),
                       device_attr_.max_qp);
      return nullptr;
    }
    ++qps_;
    *out_inline_bytes = posts ? std::min(inline_bytes, init.cap.max_inline) : 0;
    return qp;
  }
  return nullptr;
}

void Adapter::destroy_qp(verbs::Qp* qp) {
  if (library_.destroy_qp(qp) == 0) --qps_;
}

uint32_t Adapter::add_rail(std::weak_ptr<RailOwner> owner) {
  static std::atomic<uint32_t> last_rail{0};  // over all adapters: an endpoint has rails on several
  const uint32_t rail = ++last_rail;
  const std::lock_guard lock(rails_mutex_);
  rails_.emplace(rail, std::move(owner));
  return rail;
}

void Adapter::drop_rail(uint32_t rail) {
  const std::lock_guard lock(rails_mutex_);
  rails_.erase(rail);
}

// ---- completions -------------------------------------------------------------------------------

bool Adapter::take_credit(const std::weak_ptr<RailOwner>& owner) {
  const std::lock_guard lock(rails_mutex_);
  if (credits_ > 0) {
    --credits_;
    return true;
  }
  waiting_.push_back(owner);
  return false;
}

void Adapter::give_credits(uint64_t n) {
  const std::lock_guard lock(rails_mutex_);
  credits_ += n;
}

size_t Adapter::poll() {
  std::vector<std::shared_ptr<RailOwner>> touched;
  std::deque<std::weak_ptr<RailOwner>> waiting;
  size_t total = 0;
  {
    const std::lock_guard lock(poll_mutex_);
    verbs::Wc wcs[32];
    ++polls_;
    for (int n = 32; n == 32;) {
      n = context_->operations.poll_cq(cq_, 32, wcs);
      if (n > 0) completions_ += static_cast<uint64_t>(n);
      for (int i = 0; i < n; ++i) {
        std::shared_ptr<RailOwner> owner;
        {
          const std::lock_guard rails(rails_mutex_);
          const auto found = rails_.find(static_cast<uint32_t>(wcs[i].id >> 32));
          if (found != rails_.end()) owner = found->second.lock();
        }
        if (!owner) continue;  // of a queue pair that has ended
        owner->completed(static_cast<uint32_t>(wcs[i].id >> 32), wcs[i]);
        ++total;
        if (std::find(touched.begin(), touched.end(), owner) == touched.end()) {
          touched.push_back(std::move(owner));
        }
      }
    }
    const std::lock_guard rails(rails_mutex_);
    if (credits_ > 0) waiting.swap(waiting_);
  }
  for (const auto& owner : touched) owner->settle_completed();
  for (const auto& weak : waiting) {
    if (const auto owner = weak.lock()) owner->settle_completed();
  }
  return total;
}

void Adapter::arm() {
  // Under a lock: who finds it armed goes to sleep, so that it must be.
  const std::lock_guard lock(arm_mutex_);
  if (!armed_) armed_ = context_->operations.request_notice(cq_, 0) == 0;
}

uint64_t Adapter::outstanding() const {
  const std::lock_guard lock(rails_mutex_);
  return credits_max_ - credits_;
}

void Adapter::ready_on_progress(uint32_t) {
  verbs::Cq* cq = nullptr;
  void* user = nullptr;
  {
    const std::lock_guard lock(poll_mutex_);
    // One, because a queue is armed once: asking for another is a system call in vain.
    bool came = false;
    {
      const std::lock_guard arming(arm_mutex_);
      came = library_.get_cq_event(channel_, &cq, &user) == 0;
      if (came) armed_ = false;
    }
    if (came) {
      ++events_;
      if (++unacknowledged_ >= 64) {  // acknowledging takes a lock: many at a time
        library_.ack_cq_events(cq_, unacknowledged_);
        unacknowledged_ = 0;
      }
    }
  }
  (void)poll();
  if (outstanding() == 0) return;
  arm();
  (void)poll();  // what came between the two
}

void Adapter::async_on_progress() {
  verbs::AsyncEvent event{};
  bool changed = false;
  while (library_.get_async_event(context_, &event) == 0) {
    const uint32_t type = event.type;
    const bool ours = type == verbs::kEventDeviceFatal || event.element.port == port_;
    library_.ack_async_event(&event);
    if (!ours) continue;
    if (type == verbs::kEventPortActive || type == verbs::kEventPortError ||
        type == verbs::kEventDeviceFatal) {
      active_ = type == verbs::kEventPortActive;
      changed = true;
    }
    if (type == verbs::kEventGidChange || type == verbs::kEventPortActive) read_gids();
  }
  if (changed) port_changed_();
}

// ---- all of them -------------------------------------------------------------------------------

namespace {

struct Wanted {
  std::string device;
  int port = 0;  // 0: every active one
};

constexpr int kPortNone = -1;  // not a number of a port

Wanted wanted_of(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return {text, 0};
  int port = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + colon + 1, end, port);
  const bool good = error == std::errc() && rest == end && port >= 1 && port <= 255;
  return {text.substr(0, colon), good ? port : kPortNone};
}

using Adapters = std::vector<std::shared_ptr<Adapter>>;

void open_ports(const verbs::Library& library, verbs::Device* device, const Wanted& wanted,
                const AdapterOptions& options, Adapters* out, std::string* why) {
  const int first = wanted.port > 0 ? wanted.port : 1;
  const int last = wanted.port > 0 ? wanted.port : 2;
  for (int port = first; port <= last; ++port) {
    std::string reason;
    auto adapter = Adapter::open(library, device, static_cast<uint8_t>(port), options, &reason);
    if (adapter) out->push_back(std::move(adapter));
    else if (port == first) *why += (why->empty() ? "" : "; ") + reason;
  }
}

}  // namespace

std::vector<std::shared_ptr<Adapter>> open_adapters(const AdapterOptions& options,
                                                    std::string* why) {
  const verbs::Library* library = verbs::library(why);
  if (library == nullptr) return {};
  int count = 0;
  verbs::Device** devices = library->get_device_list(&count);
  Adapters adapters;
  if (devices == nullptr || count == 0) {
    *why = "libibverbs finds no RDMA device (is its driver loaded, and is /dev/infiniband there?)";
  } else if (options.devices.empty()) {
    for (int i = 0; i < count; ++i) {
      open_ports(*library, devices[i], {}, options, &adapters, why);
    }
    std::stable_sort(adapters.begin(), adapters.end(), [](const auto& a, const auto& b) {
      return a->name() < b->name();
    });
  } else {
    for (const std::string& text : options.devices) {
      const Wanted wanted = wanted_of(text);
      const size_t before = adapters.size();
      std::string reason;
      if (wanted.port == kPortNone) reason = "'" + text + "' is not DEVICE or DEVICE:PORT";
      for (int i = 0; i < count && wanted.port != kPortNone; ++i) {
        if (wanted.device != library->get_device_name(devices[i])) continue;
        open_ports(*library, devices[i], wanted, options, &adapters, &reason);
      }
      if (adapters.size() > before) continue;
      *why = reason.empty() ? "there is no RDMA device " + wanted.device + " here" : reason;
      adapters.clear();
      break;
    }
  }
  if (devices != nullptr) library->free_device_list(devices);
  return adapters;
}

}  // namespace mc::rdma
