// The engine: memory, connections, and what comes in.
#include "engine.h"

#include <cstring>
#include <iterator>
#include <memory>

#include "config.h"
#include "ucx.h"

namespace kvferry {
namespace {

// The beginning of what a region's owner publishes; kvf_agent_region_metadata follows. Both sides run this plug-in on
// machines of one byte order.
struct RegionHeader {
  char magic[4];
  uint32_t index;
  uint64_t base;
};
constexpr char REGION_MAGIC[4] = {'K', 'V', 'R', '1'};

// The beginning of a notification; the sender's name and the text follow.
struct NotificationHeader {
  char magic[4];
  uint32_t name_len;
};
constexpr char NOTIFICATION_MAGIC[4] = {'K', 'V', 'N', '1'};

constexpr size_t EVENTS = 64;

// How long the end of the agent may take.
constexpr uint32_t SHUTDOWN_MS = 10000;

// What NIXL's user may leave untaken.
constexpr size_t MAX_NOTIFICATIONS = 65536;
constexpr size_t MAX_NOTIFICATION_BYTES = size_t{256} << 20;

const char *name_of(nixl_mem_t mem) {
  switch (mem) {
    case DRAM_SEG:
      return "DRAM";
    case VRAM_SEG:
      return "VRAM";
    case BLK_SEG:
      return "block storage";
    case OBJ_SEG:
      return "object storage";
    case FILE_SEG:
      return "file";
  }
  return "unknown";
}

}  // namespace

int32_t Engine::start_agent(const Params &params) {
  const std::string config = agent_config(localAgent, params);
  return library().agent_start(reinterpret_cast<const uint8_t *>(config.data()), config.size(), &agent_);
}

Engine::Engine(const nixlBackendInitParams &params, const Nixl &nixl) : nixlBackendEngine(params) {
  Params chosen = *params.customParams;
  const std::string ucx = chosen.count("ucx_lib") ? "" : preferred_ucx(nixl);
  if (!ucx.empty()) chosen["ucx_lib"] = ucx;
  int32_t code = start_agent(chosen);
  // Another will do where NIXL's is not usable.
  if (code == KVF_UCX_MISSING && !ucx.empty()) code = start_agent(*params.customParams);
  kvf_buffer metadata{};
  if (code != KVF_OK) {
    say_failed("starting an agent");
    initErr = true;
  } else if (library().agent_metadata(agent_, &metadata) != KVF_OK) {
    say_failed("the agent's metadata");
    initErr = true;
  } else {
    // Without regions, which NIXL has registered later and publishes one by one.
    conn_info_ = take(metadata);
  }
}

Engine::~Engine() {
  if (!agent_) return;
  // What may still be used is left as it is, as the memory must be.
  if (library().agent_shutdown(agent_, SHUTDOWN_MS) != KVF_OK) {
    say_failed("ending the agent, which is left behind: memory that was registered with it must stay allocated");
  } else if (library().agent_free(agent_) != KVF_OK) {
    say_failed("freeing the agent");
  }
}

nixl_status_t Engine::registerMem(const nixlBlobDesc &range, const nixl_mem_t &mem, nixlBackendMD *&out) {
  return guarded("registering memory", [&] {
    if (mem != DRAM_SEG && mem != VRAM_SEG) {
      say("memory of the kind " + std::string(name_of(mem)) + " cannot be registered; expected DRAM or VRAM");
      return NIXL_ERR_NOT_SUPPORTED;
    }
    const bool is_device = mem == VRAM_SEG;
    if (is_device && range.devId > UINT32_MAX) {
      say("memory of device " + std::to_string(range.devId) + " cannot be registered; expected at most " +
          std::to_string(UINT32_MAX));
      return NIXL_ERR_INVALID_PARAM;
    }
    auto region = std::make_unique<LocalRegion>();
    region->base = range.addr;
    region->len = range.len;
    region->kind = is_device ? KVF_MEMORY_CUDA : KVF_MEMORY_HOST;
    region->device = is_device ? static_cast<uint32_t>(range.devId) : 0;
    // NIXL finds a peer's range by its address and length, and refuses a second one of other metadata.
    std::lock_guard lock(shared_mutex_);
    const auto [place, is_new] = shared_.try_emplace(place_of(*region));
    Shared &shared = place->second;
    if (is_new) {
      const int32_t code = library().agent_register(agent_, reinterpret_cast<void *>(range.addr), range.len,
                                                    region->kind, region->device, &shared.id, &shared.index);
      if (code != KVF_OK) {
        shared_.erase(place);
        say_failed("registering " + std::to_string(range.len) + " bytes of " + name_of(mem));
        return status_of(code);
      }
      std::unique_lock own_lock(own_mutex_);
      own_regions_.insert(shared.id);
    }
    shared.registrations++;
    region->id = shared.id;
    region->index = shared.index;
    out = region.release();
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::deregisterMem(nixlBackendMD *metadata) {
  return guarded("deregistering memory", [&] {
    std::unique_ptr<LocalRegion> region(static_cast<LocalRegion *>(metadata));
    {
      std::lock_guard lock(shared_mutex_);
      const auto place = shared_.find(place_of(*region));
      if (place != shared_.end() && place->second.id == region->id) {
        if (--place->second.registrations > 0) return NIXL_SUCCESS;
        shared_.erase(place);
      }
    }
    {
      std::unique_lock lock(own_mutex_);
      own_regions_.erase(region->id);
    }
    // NIXL lets its user free the memory whatever this returns, so it returns when nothing touches that any more. Memory that
    // is still used after all tries stays registered: what RDMA writes to goes to no other memory then.
    int32_t code = library().agent_deregister(agent_, region->id);
    for (int tries = 1; code == KVF_TIMEOUT && tries < TRIES; tries++) {
      say_failed("deregistering memory, which is tried again");
      code = library().agent_deregister(agent_, region->id);
    }
    if (code == KVF_TIMEOUT) {
      say(failed("giving up deregistering memory") + ". It stays registered, and must stay allocated until the process ends");
    } else if (code != KVF_OK) {
      say_failed("deregistering memory");
    }
    return status_of(code);
  });
}

nixl_status_t Engine::getPublicData(const nixlBackendMD *metadata, std::string &out) const {
  return guarded("a region's metadata", [&] {
    const auto *region = static_cast<const LocalRegion *>(metadata);
    kvf_buffer encoded{};
    const int32_t code = library().agent_region_metadata(agent_, region->id, &encoded);
    if (code != KVF_OK) {
      say_failed("a region's metadata");
      return status_of(code);
    }
    RegionHeader header{{}, region->index, region->base};
    std::memcpy(header.magic, REGION_MAGIC, sizeof header.magic);
    out.assign(reinterpret_cast<const char *>(&header), sizeof header);
    out += take(encoded);
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::getConnInfo(std::string &out) const {
  return guarded("the connection's metadata", [&] {
    out = conn_info_;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::loadRemoteConnInfo(const std::string &name, const std::string &metadata) {
  return guarded("connecting", [&] {
    Remote remote;
    {
      std::lock_guard lock(mutex_);
      remotes_[name] = remote = {++lives_, connection_with(metadata)};
    }
    nixl_status_t status;
    {
      std::lock_guard calls(remote.connection->calls);
      status = connect_to(name, *remote.connection, peer_of(*remote.connection).second);
    }
    if (status != NIXL_SUCCESS) {
      std::lock_guard lock(mutex_);
      if (find(name).life == remote.life) remotes_.erase(name);
    }
    return status;
  });
}

// The remote of this name, without a connection where none is loaded. With mutex_ held.
Engine::Remote Engine::find(const std::string &name) const {
  const auto found = remotes_.find(name);
  return found == remotes_.end() ? Remote{} : found->second;
}

// The connection that is made with this. With mutex_ held.
SharedConnection Engine::connection_with(const std::string &metadata) const {
  for (auto known = connections_.begin(); known != connections_.end();) {
    known = known->second.expired() ? connections_.erase(known) : std::next(known);
  }
  auto &known = connections_[metadata];
  SharedConnection connection = known.lock();
  if (!connection) known = connection = std::make_shared<Connection>(metadata);
  return connection;
}

// Whether it is there, and its peer or the last one's.
std::pair<bool, uint64_t> Engine::peer_of(const Connection &connection) const {
  std::lock_guard lock(mutex_);
  return {connection.is_connected, connection.peer};
}

// Connects and makes the regions known that are loaded, unless another thread has done that since the peer `broken` was
// found gone. With connection.calls held, and not mutex_. A connection that breaks at once may be taken for one that
// stands: using it finds its peer unknown.
nixl_status_t Engine::connect_to(const std::string &name, Connection &connection, uint64_t broken) const {
  const auto bytes = [](const std::string &text) { return reinterpret_cast<const uint8_t *>(text.data()); };
  if (const auto [is_connected, peer] = peer_of(connection); is_connected && peer != broken) return NIXL_SUCCESS;
  uint64_t peer = 0;
  int32_t code = library().agent_connect(agent_, bytes(connection.metadata), connection.metadata.size(), &peer);
  for (auto region = connection.regions.begin(); code == KVF_OK && region != connection.regions.end(); ++region) {
    const std::string &encoded = region->second.encoded;
    uint32_t index;
    code = library().agent_add_region(agent_, peer, bytes(encoded), encoded.size(), &index);
  }
  std::lock_guard lock(mutex_);
  connection.is_connected = code == KVF_OK;
  if (code != KVF_OK) {
    connect_line_.say(failed("connecting to agent " + name));
    return status_of(code);
  }
  connection.peer = peer;
  return NIXL_SUCCESS;
}

// Connects again where the peer is found gone. With `lock` of mutex_, which is free meanwhile.
nixl_status_t Engine::reconnect(const std::string &name, Connection &connection,
                                std::unique_lock<std::mutex> &lock) const {
  const uint64_t broken = connection.peer;
  lock.unlock();
  nixl_status_t status;
  {
    std::lock_guard calls(connection.calls);
    status = connect_to(name, connection, broken);
  }
  lock.lock();
  return status;
}

// Connections are made when metadata is loaded.
nixl_status_t Engine::connect(const std::string &name) {
  return guarded("connecting", [&] {
    if (name == localAgent) return NIXL_SUCCESS;
    std::unique_lock lock(mutex_);
    const SharedConnection connection = find(name).connection;
    if (!connection) {
      say("the metadata of agent " + name + " is not loaded");
      return NIXL_ERR_NOT_FOUND;
    }
    return connection->is_connected ? NIXL_SUCCESS : reconnect(name, *connection, lock);
  });
}

// Forgets the remote. The connection stays for what the remote does with it: its transfers and its messages use it too.
nixl_status_t Engine::disconnect(const std::string &name) {
  return guarded("disconnecting", [&] {
    if (name == localAgent) return NIXL_SUCCESS;
    std::lock_guard lock(mutex_);
    return remotes_.erase(name) ? NIXL_SUCCESS : NIXL_ERR_NOT_FOUND;
  });
}

nixl_status_t Engine::loadRemoteMD(const nixlBlobDesc &range, const nixl_mem_t &, const std::string &name,
                                   nixlBackendMD *&out) {
  return guarded("loading a remote region", [&] {
    RegionHeader header;
    std::unique_lock lock(mutex_);
    if (range.metaInfo.size() < sizeof header ||
        (std::memcpy(&header, range.metaInfo.data(), sizeof header), std::memcmp(header.magic, REGION_MAGIC, 4) != 0)) {
      region_line_.say("the metadata of a region of agent " + name + " is not of this plug-in");
      return NIXL_ERR_MISMATCH;
    }
    const Remote remote = find(name);
    if (!remote.connection) {
      region_line_.say("a region of agent " + name + " came before the metadata of its connection");
      return NIXL_ERR_NOT_FOUND;
    }
    lock.unlock();
    std::string encoded = range.metaInfo.substr(sizeof header);
    uint32_t index = 0;
    const auto add = [&](uint64_t peer) {
      return library().agent_add_region(agent_, peer, reinterpret_cast<const uint8_t *>(encoded.data()), encoded.size(),
                                        &index);
    };
    Connection &connection = *remote.connection;
    std::lock_guard calls(connection.calls);
    const auto [is_connected, peer] = peer_of(connection);
    int32_t code = is_connected ? add(peer) : KVF_NOT_FOUND;
    if (code == KVF_NOT_FOUND && connect_to(name, connection, peer) == NIXL_SUCCESS) {
      code = add(peer_of(connection).second);
    }
    if (code != KVF_OK) {
      lock.lock();
      region_line_.say(failed("a region of agent " + name));
      return status_of(code);
    }
    connection.is_late = false;
    auto region = std::make_unique<RemoteRegion>();
    region->index = index;
    region->base = header.base;
    region->life = remote.life;
    region->connection = remote.connection;
    Connection::Loaded &loaded = connection.regions[index];
    loaded.encoded = std::move(encoded);
    loaded.times++;
    out = region.release();
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::loadLocalMD(nixlBackendMD *in, nixlBackendMD *&out) {
  return guarded("loading a local region", [&] {
    const auto *local = static_cast<const LocalRegion *>(in);
    auto region = std::make_unique<RemoteRegion>();
    region->index = local->index;
    region->base = local->base;
    region->own_id = local->id;
    out = region.release();
    return NIXL_SUCCESS;
  });
}

// The agent forgets a region that is not loaded any more. Transfers in flight go on.
nixl_status_t Engine::unloadMD(nixlBackendMD *metadata) {
  return guarded("unloading a region", [&] {
    const std::unique_ptr<RemoteRegion> region(static_cast<RemoteRegion *>(metadata));
    if (!region) return NIXL_SUCCESS;
    const SharedConnection connection = region->connection;
    // Within this agent there is none.
    if (!connection) return NIXL_SUCCESS;
    std::lock_guard calls(connection->calls);
    const auto loaded = connection->regions.find(region->index);
    if (loaded == connection->regions.end() || --loaded->second.times > 0) return NIXL_SUCCESS;
    connection->regions.erase(loaded);
    const auto [is_connected, peer] = peer_of(*connection);
    if (!is_connected || connection->is_late) return NIXL_SUCCESS;
    const int32_t code = library().agent_remove_region(agent_, peer, region->index);
    connection->is_late = code == KVF_TIMEOUT;
    // The connection may have broken, and the peer may have deregistered the region.
    if (code == KVF_OK || code == KVF_NOT_FOUND) return NIXL_SUCCESS;
    say_failed("unloading a region");
    return status_of(code);
  });
}

std::string Engine::wrap(const std::string &message) const {
  NotificationHeader header{{}, static_cast<uint32_t>(localAgent.size())};
  std::memcpy(header.magic, NOTIFICATION_MAGIC, sizeof header.magic);
  std::string wrapped(reinterpret_cast<const char *>(&header), sizeof header);
  return wrapped + localAgent + message;
}

void Engine::take_message(const std::string &message) const {
  NotificationHeader header;
  if (message.size() >= sizeof header) {
    std::memcpy(&header, message.data(), sizeof header);
    const size_t end = sizeof header + size_t{header.name_len};
    if (std::memcmp(header.magic, NOTIFICATION_MAGIC, 4) == 0 && message.size() >= end) {
      keep(message.substr(sizeof header, header.name_len), message.substr(end));
      return;
    }
  }
  foreign_line_.say("a message that is no notification was dropped: every agent that connects must run this plug-in");
}

// Keeps a notification until NIXL takes it. False if too many are kept. With mutex_ held.
bool Engine::keep(std::string name, std::string text) const {
  const size_t bytes = name.size() + text.size();
  if (notifications_.size() >= MAX_NOTIFICATIONS || bytes > MAX_NOTIFICATION_BYTES - notification_bytes_) {
    full_line_.say("a notification of agent " + name + " was dropped: " + std::to_string(notifications_.size()) +
                   " with " + std::to_string(notification_bytes_) + " bytes are untaken, and at most " +
                   std::to_string(MAX_NOTIFICATIONS) + " with " + std::to_string(MAX_NOTIFICATION_BYTES) +
                   " bytes are kept; take them more often");
    return false;
  }
  notification_bytes_ += bytes;
  notifications_.emplace_back(std::move(name), std::move(text));
  return true;
}

// Takes all events of the agent. Fails where it has none to give any more, as in a process that was forked off. With mutex_
// held.
int32_t Engine::take_events() const {
  kvf_event events[EVENTS];
  size_t count = EVENTS;
  while (count == EVENTS) {
    const int32_t code = library().agent_poll(agent_, events, EVENTS, &count);
    if (code != KVF_OK) {
      poll_line_.say(failed("looking at the agent"));
      return code;
    }
    for (size_t i = 0; i < count; i++) take_event(events[i]);
  }
  return KVF_OK;
}

void Engine::take_event(const kvf_event &event) const {
  std::string payload;
  if (kvf_buffer bytes{}; event.payload && library().agent_recv(agent_, event.payload, &bytes) == KVF_OK) {
    payload = take(bytes);
  }
  if (event.kind == KVF_EVENT_TRANSFER_DONE) {
    const auto found = in_flight_.find(event.transfer);
    if (found == in_flight_.end()) return;
    Request &request = *found->second;
    in_flight_.erase(found);
    request.is_active = false;
    request.status = status_of(event.status);
    if (event.status != KVF_OK && !(event.status == KVF_CANCELLED && request.is_cancelled)) {
      transfer_line_.say("a transfer with agent " + request.agent + " failed: " + payload);
    }
    if (request.is_abandoned) delete &request;
  } else if (event.kind == KVF_EVENT_MESSAGE) {
    take_message(payload);
  } else if (event.kind == KVF_EVENT_PEER_LOST) {
    for (auto &[name, remote] : remotes_) {
      Connection &connection = *remote.connection;
      if (connection.is_connected && connection.peer == event.peer) {
        connection.is_connected = false;
        broken_line_.say("the connection to agent " + name + " broke: " + payload);
      }
    }
  }
}

}  // namespace kvferry
