#include "transport/rdma/verbs.h"

#include <dlfcn.h>
#include <fcntl.h>

#include <mutex>

namespace mc::verbs {
namespace {

struct Loaded {
  Library calls{};
  bool works = false;
  std::string why;
};

template <typename Function>
bool find(void* handle, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, name));
  return *out != nullptr;
}

Loaded load() {
  Loaded loaded;
  void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);  // stays for the process's life
  if (handle == nullptr) {
    loaded.why = "libibverbs.so.1 cannot be loaded (install libibverbs1 and ibverbs-providers, "
                 "or rdma-core)";
    return loaded;
  }
  Library& it = loaded.calls;
  loaded.works =
      find(handle, "ibv_get_device_list", &it.get_device_list) &&
      find(handle, "ibv_free_device_list", &it.free_device_list) &&
      find(handle, "ibv_get_device_name", &it.get_device_name) &&
      find(handle, "ibv_open_device", &it.open_device) &&
      find(handle, "ibv_close_device", &it.close_device) &&
      find(handle, "ibv_query_device", &it.query_device) &&
      find(handle, "ibv_query_port", &it.query_port) &&
      find(handle, "ibv_query_gid", &it.query_gid) && find(handle, "ibv_alloc_pd", &it.alloc_pd) &&
      find(handle, "ibv_dealloc_pd", &it.dealloc_pd) && find(handle, "ibv_reg_mr", &it.reg_mr) &&
      find(handle, "ibv_dereg_mr", &it.dereg_mr) &&
      find(handle, "ibv_create_comp_channel", &it.create_comp_channel) &&
      find(handle, "ibv_destroy_comp_channel", &it.destroy_comp_channel) &&
      find(handle, "ibv_create_cq", &it.create_cq) &&
      find(handle, "ibv_destroy_cq", &it.destroy_cq) &&
      find(handle, "ibv_get_cq_event", &it.get_cq_event) &&
      find(handle, "ibv_ack_cq_events", &it.ack_cq_events) &&
      find(handle, "ibv_create_qp", &it.create_qp) &&
      find(handle, "ibv_modify_qp", &it.modify_qp) &&
      find(handle, "ibv_destroy_qp", &it.destroy_qp) &&
      find(handle, "ibv_get_async_event", &it.get_async_event) &&
      find(handle, "ibv_ack_async_event", &it.ack_async_event) &&
      find(handle, "ibv_wc_status_str", &it.wc_status_str);
  if (!loaded.works) loaded.why = "libibverbs.so.1 is older than what we know";
  (void)find(handle, "ibv_reg_dmabuf_mr", &it.reg_dmabuf_mr);
  return loaded;
}

}  // namespace

const Library* library(std::string* why) {
  static const Loaded loaded = load();
  if (loaded.works) return &loaded.calls;
  if (why != nullptr) *why = loaded.why;
  return nullptr;
}

bool looks_right(const Context& context) {
  const Operations& table = context.operations;
  return context.device != nullptr && table.poll_cq != nullptr &&
         table.request_notice != nullptr && table.post_send != nullptr &&
         fcntl(context.async_fd, F_GETFD) >= 0 && context.vector_count >= 0;
}

}  // namespace mc::verbs
