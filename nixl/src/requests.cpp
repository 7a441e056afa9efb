// The engine: transfers and notifications.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "engine.h"

namespace kvferry {
namespace {

// How long releasing a transfer in flight may take. A cancelled one ends by itself within the agent's cancel_grace_ms,
// after which its connection is closed.
constexpr uint32_t RELEASE_MS = 60000;

// How a connection stands that could not be made again. NIXL forgets the remote at REMOTE_DISCONNECT, so only one that is
// gone is that.
nixl_status_t reconnect_status(nixl_status_t status) {
  const bool is_gone = status == NIXL_ERR_REMOTE_DISCONNECT || status == NIXL_ERR_NOT_FOUND;
  return is_gone ? NIXL_ERR_REMOTE_DISCONNECT : NIXL_ERR_BACKEND;
}

}  // namespace

nixl_status_t Engine::prepXfer(const nixl_xfer_op_t &op, const Ranges &local, const Ranges &remote,
                               const std::string &name, nixlBackendReqH *&out, const nixlBackendOptionalArgs *) const {
  return guarded("preparing a transfer", [&] {
    if (!are_pairs(local, remote)) {
      say("a transfer's local and remote ranges differ in number or length, or are in no registered memory");
      return NIXL_ERR_INVALID_PARAM;
    }
    auto request = std::make_unique<Request>();
    request->agent = name;
    request->direction = op == NIXL_READ ? KVF_READ : KVF_WRITE;
    if (name == localAgent) {
      request->is_own = true;
      const bool is_here = local.mem() == VRAM_SEG, is_there = remote.mem() == VRAM_SEG;
      for (size_t i = 0; i < local.size(); i++) {
        auto *to = reinterpret_cast<void *>(local[i].addr), *from = reinterpret_cast<void *>(remote[i].addr);
        if (op == NIXL_WRITE) std::swap(to, from);
        if (is_here || is_there) {
          const uint64_t device = is_here ? local[i].devId : remote[i].devId;
          request->device_copies.push_back({to, from, local[i].len, static_cast<uint32_t>(device)});
        } else {
          request->copies.push_back({to, from, local[i].len});
        }
        request->own_regions.push_back(static_cast<const LocalRegion *>(local[i].metadataP)->id);
        request->own_regions.push_back(static_cast<const RemoteRegion *>(remote[i].metadataP)->own_id);
      }
      std::sort(request->own_regions.begin(), request->own_regions.end());
      const auto end = std::unique(request->own_regions.begin(), request->own_regions.end());
      request->own_regions.erase(end, request->own_regions.end());
    } else {
      request->plan = make_plan(local, remote);
      request->life = static_cast<const RemoteRegion *>(remote[0].metadataP)->life;
    }
    out = request.release();
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &,
                               nixlBackendReqH *&handle, const nixlBackendOptionalArgs *options) const {
  return guarded("starting a transfer", [&] {
    Request &request = *static_cast<Request *>(handle);
    if (request.is_own) return post_own(request, options);
    std::string message;
    const bool has_message = options && options->hasNotif;
    if (has_message) message = wrap(options->notifMsg);
    std::unique_lock lock(mutex_);
    int32_t code = KVF_NOT_FOUND;
    for (bool is_again = false; code == KVF_NOT_FOUND; is_again = true) {
      if (request.is_active) return NIXL_ERR_REPOST_ACTIVE;
      const auto [life, connection] = find(request.agent);
      if (!connection || life != request.life) {
        say("agent " + request.agent + " was removed or loaded anew after the transfer was made; make a new one");
        return request.status = NIXL_ERR_NOT_FOUND;
      }
      if (connection->is_connected) code = start(request, connection->peer, has_message ? &message : nullptr);
      if (code != KVF_NOT_FOUND || is_again) break;
      // The connection broke since; the agent may still be there. What is looked at above may change meanwhile.
      const nixl_status_t status = reconnect(request.agent, *connection, lock);
      if (status != NIXL_SUCCESS) return request.status = reconnect_status(status);
    }
    if (code != KVF_OK) {
      start_line_.say(failed("starting a transfer with agent " + request.agent));
      return request.status = code == KVF_NOT_FOUND ? NIXL_ERR_REMOTE_DISCONNECT : status_of(code);
    }
    in_flight_[request.transfer] = &request;
    request.is_active = true;
    request.is_cancelled = false;
    request.status = NIXL_IN_PROG;
    // A small one may be over. What goes wrong here is told by checkXfer.
    take_events();
    return request.status;
  });
}

int32_t Engine::start(Request &request, uint64_t peer, const std::string *message) const {
  const Plan &plan = request.plan;
  const size_t lists = plan.list_offsets.size() - 1;
  if (!message) {
    return library().agent_transfer(agent_, peer, request.direction, plan.segments.data(), plan.segments.size(),
                                    plan.local_ids.data(), plan.remote_ids.data(), plan.list_offsets.data(), lists, 0,
                                    &request.transfer);
  }
  const auto *text = reinterpret_cast<const uint8_t *>(message->data());
  return library().agent_transfer_and_send(agent_, peer, request.direction, plan.segments.data(),
                                           plan.segments.size(), plan.local_ids.data(), plan.remote_ids.data(),
                                           plan.list_offsets.data(), lists, text, message->size(), 0, &request.transfer);
}

nixl_status_t Engine::post_own(Request &request, const nixlBackendOptionalArgs *options) const {
  {
    std::shared_lock lock(own_mutex_);
    for (uint64_t region : request.own_regions) {
      if (!own_regions_.count(region)) {
        say("memory of a transfer within this agent was deregistered; make a new one");
        return request.status = NIXL_ERR_NOT_FOUND;
      }
    }
    for (const Request::Copy &copy : request.copies) std::memmove(copy.to, copy.from, copy.len);
    if (const std::string why = copy_on_devices(request.device_copies); !why.empty()) {
      std::lock_guard line_lock(mutex_);
      transfer_line_.say("a transfer within this agent failed: " + why);
      return request.status = NIXL_ERR_BACKEND;
    }
  }
  if (options && options->hasNotif) {
    std::lock_guard lock(mutex_);
    if (!keep(localAgent, options->notifMsg)) return request.status = NIXL_ERR_BACKEND;
  }
  return request.status = NIXL_SUCCESS;
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
  return guarded("looking at a transfer", [&] {
    Request &request = *static_cast<Request *>(handle);
    std::lock_guard lock(mutex_);
    // It stays active, since its memory may be in use: releasing it waits.
    if (request.is_active && take_events() != KVF_OK && request.is_active) request.status = NIXL_ERR_BACKEND;
    return request.status;
  });
}

nixl_status_t Engine::releaseReqH(nixlBackendReqH *handle) const {
  return guarded("releasing a transfer", [&] {
    // NIXL's as long as this does not succeed. Whoever takes its end meanwhile still finds it by in_flight_.
    auto *request = static_cast<Request *>(handle);
    uint64_t transfer = 0;
    {
      std::lock_guard lock(mutex_);
      if (request->is_active) {
        transfer = request->transfer;
        request->is_cancelled = true;
        // One that is over needs no cancelling.
        library().agent_cancel(agent_, transfer);
      }
    }
    // NIXL's user may free the memory when this returns.
    if (transfer && wait_until_over(*request, transfer) != KVF_OK) {
      std::lock_guard lock(mutex_);
      if (request->is_active) {
        if (std::exchange(request->is_refused, true)) {
          say("giving up releasing a transfer with agent " + request->agent +
              ": its memory must stay allocated until the process ends");
          request->is_abandoned = true;
        }
        return NIXL_ERR_REPOST_ACTIVE;
      }
    }
    {
      std::lock_guard lock(mutex_);
      if (transfer) in_flight_.erase(transfer);
    }
    delete request;
    return NIXL_SUCCESS;
  });
}

// NIXL takes the second release of a request for one that succeeds, so that one is tried again.
int32_t Engine::wait_until_over(const Request &request, uint64_t transfer) const {
  int32_t code = KVF_TIMEOUT;
  for (int tries = request.is_refused ? TRIES : 1; code == KVF_TIMEOUT && tries > 0; tries--) {
    code = library().agent_wait_transfer(agent_, transfer, RELEASE_MS);
    if (code != KVF_OK) say_failed("releasing a transfer with agent " + request.agent);
  }
  return code;
}

nixl_status_t Engine::getNotifs(Notifications &out) {
  return guarded("taking notifications", [&] {
    std::lock_guard lock(mutex_);
    if (const int32_t code = take_events(); code != KVF_OK) return status_of(code);
    for (auto &notification : notifications_) out.push_back(std::move(notification));
    notifications_.clear();
    notification_bytes_ = 0;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::genNotif(const std::string &name, const std::string &message) const {
  return guarded("sending a notification", [&] {
    const std::string wrapped = wrap(message);
    std::unique_lock lock(mutex_);
    if (name == localAgent) {
      return keep(localAgent, message) ? NIXL_SUCCESS : NIXL_ERR_BACKEND;
    }
    const SharedConnection connection = find(name).connection;
    if (!connection) {
      say("the metadata of agent " + name + " is not loaded");
      return NIXL_ERR_NOT_FOUND;
    }
    const auto attempt = [&] {
      const auto *bytes = reinterpret_cast<const uint8_t *>(wrapped.data());
      return library().agent_send(agent_, connection->peer, bytes, wrapped.size());
    };
    int32_t code = connection->is_connected ? attempt() : KVF_NOT_FOUND;
    if (code == KVF_NOT_FOUND) {
      const nixl_status_t status = reconnect(name, *connection, lock);
      if (status != NIXL_SUCCESS) return reconnect_status(status);
      code = attempt();
    }
    if (code != KVF_OK) send_line_.say(failed("sending a notification to agent " + name));
    return code == KVF_NOT_FOUND ? NIXL_ERR_REMOTE_DISCONNECT : status_of(code);
  });
}

}  // namespace kvferry
