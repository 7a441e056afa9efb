// What NIXL looks up in the plug-in's file.
#include "abi.h"
#include "engine.h"
#include "library.h"
#include "version.h"

namespace {

kvferry::Nixl nixl;

nixlBackendEngine *create(const nixlBackendInitParams *params) {
  nixlBackendEngine *made = nullptr;
  kvferry::guarded("creating the backend", [&] {
    if (params && params->customParams) made = new kvferry::Engine(*params, nixl);
    return NIXL_SUCCESS;
  });
  return made;
}

nixlBackendPlugin plugin = {
    NIXL_PLUGIN_API,
    create,
    [](nixlBackendEngine *engine) { delete engine; },
    [] { return "KVFERRY"; },
    [] { return kvferry::library().version(); },
    [] { return Params{}; },
    [] { return Mems{DRAM_SEG, VRAM_SEG}; },
};

}  // namespace

extern "C" __attribute__((visibility("default"))) nixlBackendPlugin *nixl_plugin_init() {
  const void *caller = __builtin_return_address(0);
  nixlBackendPlugin *found = nullptr;
  kvferry::guarded("loading", [&] {
    nixl = kvferry::find_nixl(caller);
    if (kvferry::is_accepted(nixl) && kvferry::open_library()) found = &plugin;
    return NIXL_SUCCESS;
  });
  return found;
}

extern "C" __attribute__((visibility("default"))) void nixl_plugin_fini() {}
