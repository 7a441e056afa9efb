// The configuration of an agent from what NIXL's user gives the backend.
#pragma once

#include <string>

#include "abi.h"

namespace kvferry {

// A msgpack map for kvf_agent_start: the agent's name and the parameters. A value that reads as a number or as true or
// false is passed as that.
std::string agent_config(const std::string &name, const Params &params);

}  // namespace kvferry
