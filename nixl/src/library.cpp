#include "library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

namespace kvferry {
namespace {

Library functions;
bool is_open = false;

// Where libkvferry may be: in one folder with the plug-in, or in the Python package `kvferry` where the plug-in is
// SITE/.PACKAGE.mesonpy.libs/plugins/libplugin_KVFERRY.so.
std::vector<std::string> candidates() {
  if (const char *chosen = std::getenv("KVFERRY_LIBRARY"); chosen && *chosen) return {chosen};
  std::vector<std::string> found;
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&open_library), &info)) return found;
  std::error_code error;
  // The folder that NIXL_PLUGIN_DIR names may have only a symbolic link to it.
  auto folder = std::filesystem::canonical(info.dli_fname, error).parent_path();
  if (error) return found;
  for (const char *name : {"libkvferry.so.1", "libkvferry.so"}) {
    if (std::filesystem::exists(folder / name, error)) found.push_back(folder / name);
  }
  std::vector<std::string> packaged;
  for (const auto &entry : std::filesystem::directory_iterator(folder.parent_path().parent_path() / "kvferry" / "_native", error)) {
    if (entry.path().extension() == ".so") packaged.push_back(entry.path());
  }
  std::sort(packaged.begin(), packaged.end());
  found.insert(found.end(), packaged.begin(), packaged.end());
  return found;
}

template <class F>
bool look_up(void *handle, const char *name, F &function, std::string &missing) {
  function = reinterpret_cast<F>(dlsym(handle, name));
  if (!function) missing += std::string(missing.empty() ? "" : ", ") + name;
  return function;
}

// Escapes what a terminal could take for a command: also the controls above ASCII, which are two bytes in UTF-8.
std::string printable(const std::string &text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); i++) {
    const unsigned char byte = text[i], next = i + 1 < text.size() ? text[i + 1] : 0;
    const bool is_pair = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    if (byte >= 0x20 && byte != 0x7f && !is_pair) {
      shown += text[i];
      continue;
    }
    char escaped[12];
    std::snprintf(escaped, sizeof escaped, is_pair ? "\\x%02x\\x%02x" : "\\x%02x", byte, next);
    shown += escaped;
    i += is_pair;
  }
  return shown;
}

}  // namespace

const Library *open_library() {
  if (is_open) return &functions;
  const auto paths = candidates();
  if (paths.empty()) {
    say("there is no libkvferry beside the plug-in; set KVFERRY_LIBRARY to the path of libkvferry.so");
    return nullptr;
  }
  const std::string &path = paths.front();
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    say("cannot load libkvferry: " + std::string(dlerror()));
    return nullptr;
  }
  std::string missing;
  if (look_up(handle, "kvf_abi_version", functions.abi_version, missing) && functions.abi_version() != KVF_ABI_VERSION) {
    say(path + " has C ABI " + std::to_string(functions.abi_version()) + ", the plug-in was built for " +
        std::to_string(KVF_ABI_VERSION) + ": use the library and the plug-in of one release");
    return nullptr;
  }
#define LOOK_UP(name) look_up(handle, "kvf_" #name, functions.name, missing)
  LOOK_UP(version);
  LOOK_UP(last_error);
  LOOK_UP(buffer_free);
  LOOK_UP(agent_start);
  LOOK_UP(agent_shutdown);
  LOOK_UP(agent_free);
  LOOK_UP(agent_register);
  LOOK_UP(agent_deregister);
  LOOK_UP(agent_metadata);
  LOOK_UP(agent_region_metadata);
  LOOK_UP(agent_add_region);
  LOOK_UP(agent_remove_region);
  LOOK_UP(agent_connect);
  LOOK_UP(agent_transfer);
  LOOK_UP(agent_transfer_and_send);
  LOOK_UP(agent_cancel);
  LOOK_UP(agent_wait_transfer);
  LOOK_UP(agent_send);
  LOOK_UP(agent_poll);
  LOOK_UP(agent_recv);
#undef LOOK_UP
  if (!missing.empty()) {
    say(path + " has no " + missing + ": use the library and the plug-in of one release");
    return nullptr;
  }
  is_open = true;
  return &functions;
}

const Library &library() { return functions; }

void say(const std::string &line) { std::fprintf(stderr, "kvferry NIXL plug-in: %s\n", printable(line).c_str()); }

void LineLimit::say(const std::string &line) {
  const auto now = std::chrono::steady_clock::now();
  if (has_last_ && now - last_ < std::chrono::seconds(10)) {
    left_out_++;
    return;
  }
  kvferry::say(left_out_ ? line + " (" + std::to_string(left_out_) + " similar lines suppressed)" : line);
  last_ = now;
  has_last_ = true;
  left_out_ = 0;
}

std::string failed(const std::string &what) {
  char text[1024] = "";
  size_t len = 0;
  functions.last_error(text, sizeof text, &len);
  // It may have a NUL inside.
  return what + ": " + std::string(text, std::min(len, sizeof text - 1));
}

void say_failed(const std::string &what) { say(failed(what)); }

std::string take(kvf_buffer &buffer) {
  std::string bytes(reinterpret_cast<const char *>(buffer.data), buffer.len);
  functions.buffer_free(&buffer);
  return bytes;
}

nixl_status_t status_of(int32_t code) {
  switch (code) {
    case KVF_OK:
      return NIXL_SUCCESS;
    case KVF_INVALID_ARGUMENT:
    case KVF_OUT_OF_RANGE:
      return NIXL_ERR_INVALID_PARAM;
    case KVF_NOT_FOUND:
      return NIXL_ERR_NOT_FOUND;
    case KVF_CORRUPT:
    case KVF_VERSION_MISMATCH:
    case KVF_INCOMPATIBLE:
      return NIXL_ERR_MISMATCH;
    case KVF_UNSUPPORTED:
      return NIXL_ERR_NOT_SUPPORTED;
    case KVF_PEER_DIED:
    case KVF_UNREACHABLE:
      return NIXL_ERR_REMOTE_DISCONNECT;
    case KVF_CANCELLED:
      return NIXL_ERR_CANCELED;
    default:
      return NIXL_ERR_BACKEND;
  }
}

}  // namespace kvferry
