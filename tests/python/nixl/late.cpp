// A libkvferry whose two functions that wait say KVF_TIMEOUT so many times before they are called, as where a transfer
// does not end in time.
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

std::atomic<int> deregistrations, waits;

}  // namespace

extern "C" int32_t kvf_agent_deregister(kvf_agent *agent, uint64_t region) {
  if (is_late(deregistrations, "KVFERRY_TEST_LATE_DEREGISTER")) return KVF_TIMEOUT;
  return real<decltype(kvf_agent_deregister)>("kvf_agent_deregister")(agent, region);
}

extern "C" int32_t kvf_agent_wait_transfer(kvf_agent *agent, uint64_t transfer, uint32_t timeout_ms) {
  if (is_late(waits, "KVFERRY_TEST_LATE_WAIT")) return KVF_TIMEOUT;
  return real<decltype(kvf_agent_wait_transfer)>("kvf_agent_wait_transfer")(agent, transfer, timeout_ms);
}
