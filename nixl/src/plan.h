// A list of pairs of ranges as kvferry's segments and block lists.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "abi.h"
#include "kvferry.h"

namespace kvferry {

struct Connection;
using SharedConnection = std::shared_ptr<Connection>;

// A range that this agent has registered.
struct LocalRegion : nixlBackendMD {
  LocalRegion() : nixlBackendMD(true) {}
  uint64_t id = 0;
  uint32_t index = 0;
  uintptr_t base = 0;
  size_t len = 0;
  uint32_t kind = 0;
  uint32_t device = 0;
};

// A range of a peer's, or of this agent as the target of its own transfers.
struct RemoteRegion : nixlBackendMD {
  RemoteRegion() : nixlBackendMD(false) {}
  uint32_t index = 0;
  uintptr_t base = 0;
  // The life of the peer that has it, as this agent counts them, and how that is reached.
  uint64_t life = 0;
  SharedConnection connection;
  // In this agent: the id of the registration.
  uint64_t own_id = 0;
};

struct Plan {
  std::vector<kvf_segment> segments;
  std::vector<uint32_t> local_ids, remote_ids;
  std::vector<uint64_t> list_offsets;
};

// Whether ranges pair up: as many on both sides, each pair of one length, and each in a registered region.
bool are_pairs(const Ranges &local, const Ranges &remote);

// Ranges of equal length in the same two regions become one segment over one pair of block lists, so that neighbours
// merge and nothing is kept per range but two numbers.
Plan make_plan(const Ranges &local, const Ranges &remote);

}  // namespace kvferry
