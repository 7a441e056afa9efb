#include "version.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "library.h"

namespace kvferry {
namespace {

// Each is compared with abi.h by tests/python/nixl/test_nixl_abi.py. The number of NIXL's plug-in API does not tell
// versions apart: it stayed the same when the classes changed. python/kvferry/nixl.py has the same list.
const char *const KNOWN[] = {"1.3.0", "1.3.1", "1.3.2", "1.4.0", "1.4.1", "1.5.0", "1.5.1"};

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

bool is_known(const Nixl &nixl) {
  if (!nixl.stated.empty() && nixl.stated != nixl.version) {
    say("KVFERRY_NIXL_VERSION is " + nixl.stated + ", but NIXL " + nixl.version + " is installed (" + nixl.library.string() +
        "); unset the variable, which is for a NIXL built from source");
    return false;
  }
  if (std::find(std::begin(KNOWN), std::end(KNOWN), nixl.version) != std::end(KNOWN)) return true;
  std::string known;
  for (const char *one : KNOWN) known += std::string(known.empty() ? "" : ", ") + one;
  if (nixl.version.empty()) {
    say("the version of the NIXL in " + nixl.library.string() + " cannot be told; known are " + known +
        ". If it is a build of one of these, set KVFERRY_NIXL_VERSION to that version");
  } else {
    say("NIXL " + nixl.version + " (" + nixl.library.string() + ") is not known to this plug-in; known are " + known +
        ". Install one of these, or a newer kvferry");
  }
  return false;
}

}  // namespace kvferry
