// Copies of device memory within this process, by the CUDA driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry {

// A copy of which one side or both are device memory.
struct DeviceCopy {
  void *to;
  const void *from;
  size_t len;
  uint32_t device;
};

// Makes the copies on their devices and returns when all bytes are there. Empty, or why it failed; some may be made then.
std::string copy_on_devices(const std::vector<DeviceCopy> &copies);

}  // namespace kvferry
