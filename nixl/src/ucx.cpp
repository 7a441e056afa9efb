#include "ucx.h"

#include "library.h"

namespace kvferry {

void hint_ucx(const Nixl &nixl) {
  if (nixl.site.empty()) return;
  for (const char *package : {"kvferry_ucx", "libucx"}) {
    const std::string path = nixl.site / package / "lib" / "libucp.so.0";
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) library().ucx_hint(path.data(), path.size());
  }
}

std::string bundled_ucx(const Nixl &nixl) {
  if (nixl.site.empty()) return "";
  std::error_code error;
  for (const auto &entry : std::filesystem::directory_iterator(nixl.site / (nixl.package + ".libs"), error)) {
    const std::string name = entry.path().filename();
    if (name.compare(0, 7, "libucp-") == 0 && name.find(".so") != std::string::npos) return entry.path();
  }
  return "";
}

}  // namespace kvferry
