// NIXL's plug-in POSIX as another version could have it, for a declaration of the interface in "abi.h" that differs.
#include <csignal>
#include <cstdlib>

#include "abi.h"

class nixlPosixEngine : public nixlBackendEngine {
 public:
  using nixlBackendEngine::nixlBackendEngine;

  bool supportsRemote() const override { return false; }
  bool supportsLocal() const override { return true; }
  bool supportsNotif() const override { return false; }
  Mems getSupportedMems() const override { return {FILE_SEG}; }
  nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) override { return NIXL_SUCCESS; }
  nixl_status_t deregisterMem(nixlBackendMD *) override { return NIXL_SUCCESS; }
  nixl_status_t connect(const std::string &) override { return NIXL_SUCCESS; }
  nixl_status_t disconnect(const std::string &) override { return NIXL_SUCCESS; }
  nixl_status_t unloadMD(nixlBackendMD *) override { return NIXL_SUCCESS; }
  nixl_status_t prepXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &, nixlBackendReqH *&,
                         const nixlBackendOptionalArgs *) const override {
    return NIXL_SUCCESS;
  }
  nixl_status_t postXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &, nixlBackendReqH *&,
                         const nixlBackendOptionalArgs *) const override {
    return NIXL_SUCCESS;
  }
  nixl_status_t checkXfer(nixlBackendReqH *) const override { return NIXL_SUCCESS; }
  nixl_status_t releaseReqH(nixlBackendReqH *) const override { return NIXL_SUCCESS; }
};

namespace {

// An engine of another layout that is looked at may do anything.
nixlBackendEngine *create(const nixlBackendInitParams *params) {
  if (std::getenv("KVFERRY_TEST_CRASH")) std::raise(SIGSEGV);
  return new nixlPosixEngine(*params);
}

nixlBackendPlugin plugin = {
    NIXL_PLUGIN_API,
    create,
    [](nixlBackendEngine *engine) { delete engine; },
    [] { return "POSIX"; },
    [] { return "9.9.9"; },
    [] { return Params{}; },
    [] { return Mems{FILE_SEG}; },
};

}  // namespace

extern "C" nixlBackendPlugin *nixl_plugin_init() { return &plugin; }
