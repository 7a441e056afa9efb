#include "version.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "layout.h"
#include "library.h"

namespace kvferry {
namespace {

// Each is compared with abi.h by tests/python/nixl/test_nixl_abi.py, others when they load the plug-in. The number of NIXL's
// plug-in API does not tell versions apart: it stayed the same when the classes changed. python/kvferry/nixl.py has the same
// list.
const char *const TESTED[] = {"1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1"};

// How many differences a line names.
constexpr size_t TOLD = 3;

bool ends_with(const std::string &text, const std::string &end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// A wheel has libnixl in SITE/.PACKAGE.mesonpy.libs, and its metadata in SITE/PACKAGE-VERSION.dist-info.
void find_wheel(Nixl &nixl) {
  const std::string folder = nixl.library.parent_path().filename(), end = ".mesonpy.libs", metadata = ".dist-info";
  if (folder.size() <= end.size() + 1 || folder[0] != '.' || !ends_with(folder, end)) return;
  nixl.package = folder.substr(1, folder.size() - 1 - end.size());
  nixl.site = nixl.library.parent_path().parent_path();
  const std::string begin = nixl.package + "-";
  std::error_code error;
  for (const auto &entry : std::filesystem::directory_iterator(nixl.site, error)) {
    const std::string name = entry.path().filename();
    if (name.size() > begin.size() + metadata.size() && name.compare(0, begin.size(), begin) == 0 &&
        ends_with(name, metadata)) {
      nixl.version = name.substr(begin.size(), name.size() - begin.size() - metadata.size());
    }
  }
}

}  // namespace

Nixl find_nixl(const void *caller) {
  Nixl nixl;
  if (Dl_info info; dladdr(caller, &info) && info.dli_fname) {
    std::error_code error;
    nixl.library = std::filesystem::absolute(info.dli_fname, error).lexically_normal();
    find_wheel(nixl);
  }
  if (const char *stated = std::getenv("KVFERRY_NIXL_VERSION"); stated && *stated) {
    nixl.stated = stated;
    if (nixl.version.empty()) nixl.version = stated;
  }
  return nixl;
}

bool is_accepted(const Nixl &nixl) {
  const std::string named =
      "NIXL " + (nixl.version.empty() ? "of an unknown version" : nixl.version) + " (" + nixl.library.string() + ")";
  if (!nixl.stated.empty() && nixl.stated != nixl.version) {
    say("KVFERRY_NIXL_VERSION is " + nixl.stated + ", but NIXL " + nixl.version + " is installed (" + nixl.library.string() +
        "); unset the variable");
    return false;
  }
  if (std::find(std::begin(TESTED), std::end(TESTED), nixl.version) != std::end(TESTED)) return true;
  if (!nixl.stated.empty()) {
    say(named + " is accepted because KVFERRY_NIXL_VERSION names it; its plug-in interface was not compared");
    return true;
  }
  std::string tested;
  for (const char *one : TESTED) tested += std::string(tested.empty() ? "" : ", ") + one;
  const std::vector<std::string> differences = find_differences(nixl.library.parent_path() / "plugins");
  if (differences.empty()) {
    say(named + " has the plug-in interface of the tested versions (" + tested + ") and is accepted");
    return true;
  }
  std::string told;
  for (size_t i = 0; i < std::min(differences.size(), TOLD); i++) told += (i ? "; " : "") + differences[i];
  if (differences.size() > TOLD) told += "; and " + std::to_string(differences.size() - TOLD) + " more";
  const std::string version = nixl.version.empty() ? "VERSION" : nixl.version;
  say(named + " is refused: its plug-in interface differs from that of the tested versions (" + tested + "): " + told +
      ". Install one of these, or a newer kvferry. To use it all the same, where you know that it fits, set KVFERRY_NIXL_VERSION=" +
      version);
  return false;
}

}  // namespace kvferry
