// A libkvferry whose functions that wait say KVF_TIMEOUT so many times before they are called, as where a transfer does not
// end in time, or for ever after the first connection. A shutdown says so once it is over. Or they are held up, as by a progress thread that is busy.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "kvferry.h"

namespace {

bool is_late(std::atomic<int> &count, const char *variable) {
  const char *times = std::getenv(variable);
  return times && count++ < std::atoi(times);
}

// While the file that KVFERRY_TEST_HOLD names is there. Another one beside it says that the call is held up.
void hold() {
  const char *file = std::getenv("KVFERRY_TEST_HOLD");
  if (!file || !std::filesystem::exists(file)) return;
  std::ofstream(std::string(file) + ".held");
  while (std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

template <class F>
F *real(const char *name) {
  return reinterpret_cast<F *>(dlsym(dlopen("libkvferry.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

std::atomic<int> deregistrations, waits, shutdowns, connections;

}  // namespace

extern "C" int32_t kvf_agent_deregister(kvf_agent *agent, uint64_t region) {
  if (is_late(deregistrations, "KVFERRY_TEST_LATE_DEREGISTER")) return KVF_TIMEOUT;
  return real<decltype(kvf_agent_deregister)>("kvf_agent_deregister")(agent, region);
}

extern "C" int32_t kvf_agent_wait_transfer(kvf_agent *agent, uint64_t transfer, uint32_t timeout_ms) {
  const bool late = is_late(waits, "KVFERRY_TEST_LATE_WAIT");
  if (late && !std::getenv("KVFERRY_TEST_LATE_AT_THE_END")) return KVF_TIMEOUT;
  const int32_t code = real<decltype(kvf_agent_wait_transfer)>("kvf_agent_wait_transfer")(agent, transfer, timeout_ms);
  return late ? KVF_TIMEOUT : code;
}

extern "C" int32_t kvf_agent_shutdown(kvf_agent *agent, uint32_t timeout_ms) {
  const int32_t code = real<decltype(kvf_agent_shutdown)>("kvf_agent_shutdown")(agent, timeout_ms);
  return is_late(shutdowns, "KVFERRY_TEST_LATE_SHUTDOWN") ? KVF_TIMEOUT : code;
}

// Says that it was called, where the file is that KVFERRY_TEST_FREED names.
extern "C" int32_t kvf_agent_free(kvf_agent *agent) {
  if (const char *file = std::getenv("KVFERRY_TEST_FREED")) std::ofstream(file) << "freed";
  return real<decltype(kvf_agent_free)>("kvf_agent_free")(agent);
}

extern "C" int32_t kvf_agent_connect(kvf_agent *agent, const uint8_t *metadata, size_t metadata_len, uint64_t *peer) {
  if (connections++ && std::getenv("KVFERRY_TEST_LATE_RECONNECT")) return KVF_TIMEOUT;
  hold();
  return real<decltype(kvf_agent_connect)>("kvf_agent_connect")(agent, metadata, metadata_len, peer);
}

extern "C" int32_t kvf_agent_add_region(kvf_agent *agent, uint64_t peer, const uint8_t *metadata, size_t metadata_len,
                                        uint32_t *index) {
  hold();
  return real<decltype(kvf_agent_add_region)>("kvf_agent_add_region")(agent, peer, metadata, metadata_len, index);
}

// Says how a read of the region ends from then on, as a status, in the file that KVFERRY_TEST_REMOVED names.
extern "C" int32_t kvf_agent_remove_region(kvf_agent *agent, uint64_t peer, uint32_t region) {
  const int32_t code = real<decltype(kvf_agent_remove_region)>("kvf_agent_remove_region")(agent, peer, region);
  const char *file = std::getenv("KVFERRY_TEST_REMOVED");
  if (!file || code != KVF_OK) return code;
  kvf_segment segment{};
  segment.remote_region = region;
  segment.length = 1;
  const uint32_t id = 0;
  const uint64_t ends[] = {0, 1};
  uint64_t transfer = 0;
  int32_t status = kvf_agent_transfer(agent, peer, KVF_READ, &segment, 1, &id, &id, ends, 1, 0, &transfer);
  for (bool is_over = status != KVF_OK; !is_over;) {
    kvf_event event{};
    size_t count = 0;
    if (kvf_agent_poll(agent, &event, 1, &count) != KVF_OK) break;
    is_over = count && event.kind == KVF_EVENT_TRANSFER_DONE && event.transfer == transfer;
    status = event.status;
  }
  std::ofstream(file, std::ios::app) << region << ' ' << status << '\n';
  return code;
}
