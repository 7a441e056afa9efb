// A libkvferry whose functions that wait say KVF_TIMEOUT so many times before they are called, as where a transfer does not
// end in time, or for ever after the first connection.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

#include "kvferry.h"

namespace {

bool is_late(std::atomic<int> &count, const char *variable) {
  const char *times = std::getenv(variable);
  return times && count++ < std::atoi(times);
}

template <class F>
F *real(const char *name) {
  return reinterpret_cast<F *>(dlsym(dlopen("libkvferry.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

std::atomic<int> deregistrations, waits, connections;

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

extern "C" int32_t kvf_agent_connect(kvf_agent *agent, const uint8_t *metadata, size_t metadata_len, uint64_t *peer) {
  if (connections++ && std::getenv("KVFERRY_TEST_LATE_RECONNECT")) return KVF_TIMEOUT;
  return real<decltype(kvf_agent_connect)>("kvf_agent_connect")(agent, metadata, metadata_len, peer);
}
