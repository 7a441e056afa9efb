// The UCX that agents use in a process of NIXL's.
#pragma once

#include <string>

#include "version.h"

namespace kvferry {

// Tells the library of the Python packages with a UCX that are installed beside NIXL.
void hint_ucx(const Nixl &nixl);

// The libucp inside NIXL's wheel; empty where there is none.
std::string bundled_ucx(const Nixl &nixl);

}  // namespace kvferry
