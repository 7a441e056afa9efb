// Which NIXL has loaded the plug-in, and whether that is accepted.
#pragma once

#include <filesystem>
#include <string>

namespace kvferry {

// A NIXL from a wheel; without one, all is empty but the library.
struct Nixl {
  // The file that has loaded the plug-in.
  std::filesystem::path library;
  // Where Python packages are, and which of them this one is, such as nixl_cu12.
  std::filesystem::path site;
  std::string package;
  std::string version;
  // What KVFERRY_NIXL_VERSION says: the version of a build from source, or one that its user vouches for.
  std::string stated;
};

// The NIXL whose code `caller` is in.
Nixl find_nixl(const void *caller);

// Whether its plug-in interface is that of abi.h: of a tested version, of one that is found to be the same, or of one that the
// user vouches for. Says on standard error if it is not, or is no tested one.
bool is_accepted(const Nixl &nixl);

}  // namespace kvferry
