// Which NIXL has loaded the plug-in, and whether its classes are those of abi.h.
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
  // What KVFERRY_NIXL_VERSION says, which is for a build from source.
  std::string stated;
};

// The NIXL whose code `caller` is in.
Nixl find_nixl(const void *caller);

// Whether its plug-in interface is known. Says on standard error if not.
bool is_known(const Nixl &nixl);

}  // namespace kvferry
