#include "device.h"

#include <dlfcn.h>

namespace kvferry {
namespace {

// The driver's C API, of which no header is needed to build the plug-in. 0 is success.
using Result = int;
using Device = int;
using Context = void *;
using Stream = void *;
using DevicePointer = unsigned long long;

constexpr unsigned int NON_BLOCKING = 1;

struct Driver {
  Result (*init)(unsigned int);
  Result (*get_device)(Device *, int);
  Result (*retain)(Context *, Device);
  Result (*release)(Device);
  Result (*push)(Context);
  Result (*pop)(Context *);
  Result (*create_stream)(Stream *, unsigned int);
  Result (*destroy_stream)(Stream);
  Result (*copy)(DevicePointer, DevicePointer, size_t, Stream);
  Result (*synchronize)(Stream);
  Result (*error_name)(Result, const char **);

  // Why there is none; empty if there is.
  std::string missing;

  Driver() {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      missing = dlerror();
      return;
    }
    look_up(handle, "cuInit", init);
    look_up(handle, "cuDeviceGet", get_device);
    look_up(handle, "cuDevicePrimaryCtxRetain", retain);
    look_up(handle, "cuDevicePrimaryCtxRelease_v2", release);
    look_up(handle, "cuCtxPushCurrent_v2", push);
    look_up(handle, "cuCtxPopCurrent_v2", pop);
    look_up(handle, "cuStreamCreate", create_stream);
    look_up(handle, "cuStreamDestroy_v2", destroy_stream);
    look_up(handle, "cuMemcpyAsync", copy);
    look_up(handle, "cuStreamSynchronize", synchronize);
    look_up(handle, "cuGetErrorName", error_name);
  }

  std::string failed(const char *call, Result code) const {
    const char *name = nullptr;
    error_name(code, &name);
    return std::string(call) + ": " + (name ? name : std::to_string(code));
  }

 private:
  template <class F>
  void look_up(void *handle, const char *name, F &function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (!function) missing = std::string("the CUDA driver has no ") + name;
  }
};

const Driver &driver() {
  static const Driver only;
  return only;
}

DevicePointer pointer(const void *address) { return reinterpret_cast<uintptr_t>(address); }

// Makes the copies of one device, which is current.
std::string copy_on_current(const DeviceCopy *begin, const DeviceCopy *end) {
  const Driver &cuda = driver();
  Stream stream = nullptr;
  // Waits for nothing that the host has begun on the device, as NIXL's own backend does not.
  if (const Result code = cuda.create_stream(&stream, NON_BLOCKING)) return cuda.failed("cuStreamCreate", code);
  std::string why;
  for (const DeviceCopy *copy = begin; copy != end && why.empty(); copy++) {
    if (const Result code = cuda.copy(pointer(copy->to), pointer(copy->from), copy->len, stream)) {
      why = cuda.failed("cuMemcpyAsync", code);
    }
  }
  // Also after an error: what was begun uses the memory.
  if (const Result code = cuda.synchronize(stream); code && why.empty()) why = cuda.failed("cuStreamSynchronize", code);
  cuda.destroy_stream(stream);
  return why;
}

}  // namespace

std::string copy_on_devices(const std::vector<DeviceCopy> &copies) {
  if (copies.empty()) return "";
  const Driver &cuda = driver();
  if (!cuda.missing.empty()) return cuda.missing;
  if (const Result code = cuda.init(0)) return cuda.failed("cuInit", code);
  for (size_t start = 0, end; start < copies.size(); start = end) {
    const uint32_t ordinal = copies[start].device;
    for (end = start; end < copies.size() && copies[end].device == ordinal;) end++;
    Device device;
    Context context = nullptr;
    if (const Result code = cuda.get_device(&device, static_cast<int>(ordinal))) return cuda.failed("cuDeviceGet", code);
    if (const Result code = cuda.retain(&context, device)) return cuda.failed("cuDevicePrimaryCtxRetain", code);
    std::string why;
    if (const Result code = cuda.push(context)) {
      why = cuda.failed("cuCtxPushCurrent", code);
    } else {
      why = copy_on_current(&copies[start], &copies[start] + (end - start));
      cuda.pop(&context);
    }
    cuda.release(device);
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace kvferry
