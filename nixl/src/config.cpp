#include "config.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "library.h"

namespace kvferry {
namespace {

// The longest name of an agent, in bytes.
constexpr size_t NAME_BYTES = 256;

void big_endian(std::string &out, uint64_t number, int bytes) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out += static_cast<char>(number >> shift);
}

void text(std::string &out, const std::string &value) {
  out += static_cast<char>(0xdb);
  big_endian(out, value.size(), 4);
  out += value;
}

void scalar(std::string &out, const std::string &value) {
  if (value == "true" || value == "false") {
    out += static_cast<char>(value == "true" ? 0xc3 : 0xc2);
  } else if (!value.empty() && value.size() <= 18 && std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    out += static_cast<char>(0xcf);
    uint64_t number = 0;
    std::from_chars(value.data(), value.data() + value.size(), number);
    big_endian(out, number, 8);
  } else {
    text(out, value);
  }
}

// Parameters that frameworks give every backend, and that have no meaning here.
bool is_of_other_backends(const std::string &key) {
  return key == "num_threads" || key == "num_workers" || key == "device_list" || key == "engine_config" ||
         key == "ucx_devices" || key == "ucx_error_handling_mode" || key == "ucx_num_device_channels" ||
         key == "split_batch_size";
}

// Names are for logs and may be cut, but between characters: NIXL's may have any length.
std::string cut_name(const std::string &name) {
  if (name.empty()) return "nixl";
  if (name.size() <= NAME_BYTES) return name;
  size_t end = NAME_BYTES;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) end--;
  return name.substr(0, end);
}

}  // namespace

std::string agent_config(const std::string &name, const Params &params) {
  std::string entries;
  uint32_t count = 0;
  const auto add = [&](const std::string &key, const std::string &value, bool is_text) {
    text(entries, key);
    is_text ? text(entries, value) : scalar(entries, value);
    count++;
  };
  if (!params.count("name")) add("name", cut_name(name), true);
  for (const auto &[key, value] : params) {
    if (is_of_other_backends(key)) {
      say("the parameter " + key + " is for other backends and has no effect");
    } else {
      add(key, value, key == "name");
    }
  }
  std::string map(1, static_cast<char>(0xdf));
  big_endian(map, count, 4);
  return map + entries;
}

}  // namespace kvferry
