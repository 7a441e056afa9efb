#include "ucx.h"

#include <cstdlib>
#include <fstream>

namespace kvferry {
namespace {

bool is_libucp(const std::string &name) {
  const bool begins = name.compare(0, 7, "libucp-") == 0 || name.compare(0, 7, "libucp.") == 0;
  return begins && name.find(".so") != std::string::npos;
}

bool is_any_loaded() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.rfind('/');
    if (slash != std::string::npos && is_libucp(line.substr(slash + 1))) return true;
  }
  return false;
}

}  // namespace

std::string preferred_ucx(const Nixl &nixl) {
  const char *named = std::getenv("KVFERRY_UCX_LIB");
  if (nixl.site.empty() || (named && *named) || is_any_loaded()) return "";
  std::error_code error;
  for (const auto &entry : std::filesystem::directory_iterator(nixl.site / (nixl.package + ".libs"), error)) {
    if (is_libucp(entry.path().filename())) return entry.path();
  }
  return "";
}

}  // namespace kvferry
