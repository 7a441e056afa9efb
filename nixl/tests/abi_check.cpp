// Compares abi.h with plug-ins of a NIXL wheel: the fields of an engine that NIXL's own code has made, and the function in
// each virtual slot of the engines named. Prints what differs; exits with 0 if nothing does.
//
//     abi_check PATH NAME CLASS...    of the plug-in NAME, which is made without parameters, and of the classes' tables
#include <cxxabi.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

// Compiled with -fno-access-control, because the fields are compared too.
#include "../src/abi.h"

namespace {

// By slot. Two destructors come first: one that frees and one that does not.
const char *const SLOTS[] = {
    "~",           "~",            "supportsRemote",     "supportsLocal", "supportsNotif",  "getSupportedMems", "registerMem",
    "deregisterMem", "connect",    "disconnect",         "unloadMD",      "prepXfer",       "postXfer",         "checkXfer",
    "releaseReqH", "prepMemView",  "prepMemView",        "releaseMemView", "getPublicData", "getConnInfo",      "loadRemoteConnInfo",
    "loadRemoteMD", "loadLocalMD", "getNotifs",          "genNotif",      "queryMem",       "estimateXferCost",
};

int wrong = 0;

void check(bool holds, const std::string &what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  wrong++;
}

std::string name_at(void *address) {
  Dl_info info;
  if (!dladdr(address, &info) || !info.dli_sname || info.dli_saddr != address) return "?";
  char *name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr);
  const std::string text = name ? name : info.dli_sname;
  std::free(name);
  // The method's name, without its class and its parameters.
  const std::string before = text.substr(0, text.find('('));
  const size_t at = before.find("::");
  const std::string method = at == std::string::npos ? before : before.substr(at + 2);
  return method.substr(0, method.find('['));
}

void check_slots(void **slots, const std::string &whose) {
  int unnamed = 0;
  for (size_t i = 0; i < sizeof SLOTS / sizeof *SLOTS; i++) {
    const std::string found = name_at(slots[i]), expected = SLOTS[i];
    // A function that the library does not export has no name here.
    if (found == "?") {
      unnamed++;
    } else {
      check(expected == "~" ? found[0] == '~' : found == expected,
            whose + ": slot " + std::to_string(i) + " is " + found + ", expected " + expected);
    }
  }
  check(unnamed <= 4, whose + ": " + std::to_string(unnamed) + " slots have no name");
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  void *handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::printf("%s\n", dlerror());
    return 2;
  }
  const auto init = reinterpret_cast<nixlBackendPlugin *(*)()>(dlsym(handle, "nixl_plugin_init"));
  nixlBackendPlugin *plugin = init ? init() : nullptr;
  if (!plugin) {
    std::printf("no plug-in\n");
    return 2;
  }
  const std::string name = argv[2];
  check(plugin->api_version == NIXL_PLUGIN_API, "the API is " + std::to_string(plugin->api_version));
  check(plugin->get_plugin_name() == name, std::string("the name is ") + plugin->get_plugin_name());
  const Mems mems = plugin->get_backend_mems();
  check(!mems.empty() && mems[0] >= DRAM_SEG && mems[0] <= FILE_SEG, "no memories");
  const Params options = plugin->get_backend_options();
  check(options.size() < 100, "no options");

  if (argc == 3) {
    Params params = options;
    params["a key"] = "a value";
    const nixlBackendInitParams given{"an agent with a long name", name, &params, true, 0, nixl_thread_sync_t::RW, false};
    nixlBackendEngine *engine = plugin->create_engine(&given);
    if (!engine) {
      std::printf("no engine\n");
      return 2;
    }
    check(engine->backendType == name, "backendType is elsewhere");
    check(engine->customParams.size() == params.size() && engine->customParams.count("a key"), "customParams is elsewhere");
    check(engine->telemetryEvents_.empty(), "telemetryEvents_ is elsewhere");
    check(engine->telemetryEventsMutex_.try_lock(), "telemetryEventsMutex_ is elsewhere");
    engine->telemetryEventsMutex_.unlock();
    check(!engine->initErr, "initErr is elsewhere, or the engine did not start");
    check(engine->localAgent == given.localAgent, "localAgent is elsewhere");
    check(!engine->enableTelemetry_, "enableTelemetry_ is elsewhere");
    check_slots(*reinterpret_cast<void ***>(engine), name);
    check(!engine->getSupportedMems().empty(), "getSupportedMems gives nothing");
    plugin->destroy_engine(engine);
  }
  for (int i = 3; i < argc; i++) {
    const std::string symbol = "_ZTV" + std::to_string(std::string(argv[i]).size()) + argv[i];
    void **table = static_cast<void **>(dlsym(handle, symbol.c_str()));
    check(table, std::string(argv[i]) + " has no table");
    // Offset and type information come first.
    if (table) check_slots(table + 2, argv[i]);
  }
  return wrong ? 1 : 0;
}
