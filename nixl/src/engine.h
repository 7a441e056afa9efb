// A NIXL backend on an agent of kvferry.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "abi.h"
#include "device.h"
#include "library.h"
#include "plan.h"
#include "version.h"

namespace kvferry {

// How often a call that NIXL's user may free memory after is tried before it gives up. NIXL holds its lock meanwhile.
constexpr int TRIES = 3;

// A connection to a remote agent and the regions of it that NIXL has loaded: one for all that it has loaded of the
// agent.
struct Connection {
  explicit Connection(std::string text) : metadata(std::move(text)) {}

  // How it stands, with Engine::mutex_ held. No two connections have one peer id.
  uint64_t peer = 0;
  bool is_connected = false;

  // Held over the calls that wait for the agent's thread; taken before Engine::mutex_. It guards what follows.
  std::mutex calls;
  // The metadata that the connection is made with, again where it broke.
  const std::string metadata;
  // A region's metadata, and how often it is loaded.
  struct Loaded {
    std::string encoded;
    size_t times = 0;
  };
  std::unordered_map<uint32_t, Loaded> regions;
  // True if the agent's thread did not answer in time when a region was removed: until one is loaded, none is removed,
  // because each would wait as long with NIXL's lock held.
  bool is_late = false;
};

// A transfer of NIXL's, which may be posted again and again.
struct Request : nixlBackendReqH {
  std::string agent;
  kvf_direction direction = KVF_READ;
  Plan plan;
  // The life of the peer whose regions the plan names.
  uint64_t life = 0;

  // Within this agent: what is copied, and the registrations that this needs.
  struct Copy {
    void *to;
    const void *from;
    size_t len;
  };
  bool is_own = false;
  std::vector<Copy> copies;
  std::vector<DeviceCopy> device_copies;
  std::vector<uint64_t> own_regions;

  // The last posting: its transfer while it is in flight, and how it stands.
  uint64_t transfer = 0;
  bool is_active = false;
  nixl_status_t status = NIXL_ERR_NOT_POSTED;
  // Whether NIXL was told that it cannot be released yet.
  bool is_refused = false;
  // Whether releasing it has cancelled the transfer.
  bool is_cancelled = false;
  // Whether NIXL has forgotten it while the transfer goes on. Whoever takes the transfer's end frees it.
  bool is_abandoned = false;
};

// Every public function may be called from any thread, as NIXL does; it holds no lock of its own over most of them.
class Engine final : public nixlBackendEngine {
 public:
  Engine(const nixlBackendInitParams &params, const Nixl &nixl);
  ~Engine() override;

  bool supportsRemote() const override { return true; }
  bool supportsLocal() const override { return true; }
  bool supportsNotif() const override { return true; }
  Mems getSupportedMems() const override { return {DRAM_SEG, VRAM_SEG}; }

  nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) override;
  nixl_status_t deregisterMem(nixlBackendMD *) override;
  nixl_status_t connect(const std::string &) override;
  nixl_status_t disconnect(const std::string &) override;
  nixl_status_t unloadMD(nixlBackendMD *) override;
  nixl_status_t prepXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &, nixlBackendReqH *&,
                         const nixlBackendOptionalArgs *) const override;
  nixl_status_t postXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &, nixlBackendReqH *&,
                         const nixlBackendOptionalArgs *) const override;
  nixl_status_t checkXfer(nixlBackendReqH *) const override;
  nixl_status_t releaseReqH(nixlBackendReqH *) const override;
  nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const override;
  nixl_status_t getConnInfo(std::string &) const override;
  nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) override;
  nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) override;
  nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) override;
  nixl_status_t getNotifs(Notifications &) override;
  nixl_status_t genNotif(const std::string &, const std::string &) const override;

 private:
  int32_t start_agent(const Params &params);

  // A remote agent that NIXL has loaded. Whoever has its connection may use it after NIXL has removed or replaced the
  // agent.
  struct Remote {
    uint64_t life = 0;
    SharedConnection connection;
  };

  Remote find(const std::string &name) const;
  SharedConnection connection_with(const std::string &metadata) const;
  std::pair<bool, uint64_t> peer_of(const Connection &connection) const;
  nixl_status_t connect_to(const std::string &name, Connection &connection, uint64_t broken) const;
  nixl_status_t reconnect(const std::string &name, Connection &connection, std::unique_lock<std::mutex> &lock) const;
  int32_t start(Request &request, uint64_t peer, const std::string *message) const;
  nixl_status_t post_own(Request &request, const nixlBackendOptionalArgs *options) const;
  std::string wrap(const std::string &message) const;
  int32_t take_events() const;
  void take_event(const kvf_event &event) const;
  void take_message(const std::string &message) const;
  bool keep(std::string name, std::string text) const;
  int32_t wait_until_over(const Request &request, uint64_t transfer) const;

  // Address, length, kind and device of a registration.
  using Place = std::tuple<uintptr_t, size_t, uint32_t, uint32_t>;
  static Place place_of(const LocalRegion &region) { return {region.base, region.len, region.kind, region.device}; }
  // A region of the agent's, for all registrations of one place.
  struct Shared {
    uint64_t id;
    uint32_t index;
    size_t registrations;
  };

  kvf_agent *agent_ = nullptr;
  std::string conn_info_;

  // Guards all that follows up to shared_mutex_, and is held by whoever takes events from the agent. Not over a call that
  // waits for the agent's thread: other threads look at their transfers meanwhile.
  mutable std::mutex mutex_;
  mutable std::map<std::string, Remote> remotes_;
  // By their metadata, those that nobody has any more among them.
  mutable std::map<std::string, std::weak_ptr<Connection>> connections_;
  mutable uint64_t lives_ = 0;
  mutable std::unordered_map<uint64_t, Request *> in_flight_;
  mutable Notifications notifications_;
  mutable size_t notification_bytes_ = 0;
  mutable LineLimit full_line_, foreign_line_, poll_line_, connect_line_, broken_line_, region_line_, start_line_,
      transfer_line_, send_line_;

  // Guards the next, also while a region is registered, so that one of the same place waits for it.
  std::mutex shared_mutex_;
  std::map<Place, Shared> shared_;

  // Shared while memory of registrations of this agent is copied, exclusive while one ends.
  mutable std::shared_mutex own_mutex_;
  std::unordered_set<uint64_t> own_regions_;
};

// Calls `function`; an exception becomes a status and a line on standard error, for none may reach NIXL.
template <class Function>
nixl_status_t guarded(const char *what, Function &&function) noexcept {
  try {
    return function();
  } catch (const std::exception &error) {
    try {
      say(std::string(what) + ": " + error.what());
    } catch (...) {
    }
  } catch (...) {
  }
  return NIXL_ERR_BACKEND;
}

}  // namespace kvferry
