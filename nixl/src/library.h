// libkvferry, opened at run time, and what this plug-in says on standard error.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "abi.h"
#include "kvferry.h"

namespace kvferry {

// The functions of the C ABI that the plug-in calls.
struct Library {
  decltype(&kvf_abi_version) abi_version;
  decltype(&kvf_version) version;
  decltype(&kvf_last_error) last_error;
  decltype(&kvf_buffer_free) buffer_free;
  decltype(&kvf_agent_start) agent_start;
  decltype(&kvf_agent_shutdown) agent_shutdown;
  decltype(&kvf_agent_free) agent_free;
  decltype(&kvf_agent_register) agent_register;
  decltype(&kvf_agent_deregister) agent_deregister;
  decltype(&kvf_agent_metadata) agent_metadata;
  decltype(&kvf_agent_region_metadata) agent_region_metadata;
  decltype(&kvf_agent_add_region) agent_add_region;
  decltype(&kvf_agent_remove_region) agent_remove_region;
  decltype(&kvf_agent_connect) agent_connect;
  decltype(&kvf_agent_transfer) agent_transfer;
  decltype(&kvf_agent_transfer_and_send) agent_transfer_and_send;
  decltype(&kvf_agent_cancel) agent_cancel;
  decltype(&kvf_agent_wait_transfer) agent_wait_transfer;
  decltype(&kvf_agent_send) agent_send;
  decltype(&kvf_agent_poll) agent_poll;
  decltype(&kvf_agent_recv) agent_recv;
};

// Opens libkvferry: the file that KVFERRY_LIBRARY names, else the one beside this plug-in. Null when there is none that
// fits, after a line that says why.
const Library *open_library();

// Lines that others can cause are limited in rate, so that nobody fills a disk from outside.
class LineLimit {
 public:
  // Says the line if it is the first or ten seconds have passed since the last one.
  void say(const std::string &line);

 private:
  std::chrono::steady_clock::time_point last_{};
  bool has_last_ = false;
  uint64_t left_out_ = 0;
};

// After open_library() has returned one.
const Library &library();

// One line on standard error. Control characters in it, which may come from peers, are escaped.
void say(const std::string &line);

// Which call failed, and the library's reason.
std::string failed(const std::string &what);

// Says that.
void say_failed(const std::string &what);

// A buffer of the library as a string; frees it.
std::string take(kvf_buffer &buffer);

nixl_status_t status_of(int32_t code);

}  // namespace kvferry
