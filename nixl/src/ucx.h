// The UCX that agents use in a process of NIXL's.
#pragma once

#include <string>

#include "version.h"

namespace kvferry {

// The libucp that an agent is to open: the one inside NIXL's wheel, so that NIXL's own backend UCX in the same process uses
// the same, whichever comes first. Empty where the choice is left to the library: one is loaded or named already, or NIXL's
// wheel has none.
std::string preferred_ucx(const Nixl &nixl);

}  // namespace kvferry
