#include "plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_map>

namespace kvferry {
namespace {

using Key = std::array<uint64_t, 3>;

struct Hash {
  size_t operator()(const Key &key) const {
    uint64_t mix = 0;
    for (uint64_t word : key) mix = (mix ^ word) * 0x9e3779b97f4a7c15u, mix ^= mix >> 29;
    return mix;
  }
};

// Ranges of one length in one pair of regions, as offsets in these.
struct Group {
  const LocalRegion *local;
  const RemoteRegion *remote;
  uint64_t len;
  std::vector<uint64_t> local_offsets, remote_offsets;
};

// Evenly spaced places that all `offsets` are among. Where it can be, they lie one length apart, so that the numbers of
// neighbours follow each other.
struct Grid {
  uint64_t base, stride;

  Grid(const std::vector<uint64_t> &offsets, uint64_t len) : base(*std::min_element(offsets.begin(), offsets.end())) {
    uint64_t common = 0;
    for (uint64_t offset : offsets) {
      const uint64_t distance = offset - base;
      if (common && distance % common == 0) continue;
      common = std::gcd(common, distance);
      if (common == 1) break;
    }
    stride = common == 0 || common % len == 0 ? len : common;
  }

  bool holds(const std::vector<uint64_t> &offsets) const {
    const uint64_t last = *std::max_element(offsets.begin(), offsets.end());
    return (last - base) / stride <= UINT32_MAX;
  }

  uint32_t number(uint64_t offset) const { return static_cast<uint32_t>((offset - base) / stride); }
};

std::vector<Group> group(const Ranges &local, const Ranges &remote) {
  std::vector<Group> groups;
  std::unordered_map<Key, size_t, Hash> places;
  Group *last = nullptr;
  for (size_t i = 0; i < local.size(); i++) {
    const auto *ours = static_cast<const LocalRegion *>(local[i].metadataP);
    const auto *theirs = static_cast<const RemoteRegion *>(remote[i].metadataP);
    const uint64_t len = local[i].len;
    if (len == 0) continue;
    if (!last || last->local != ours || last->remote != theirs || last->len != len) {
      const Key key = {reinterpret_cast<uintptr_t>(ours), reinterpret_cast<uintptr_t>(theirs), len};
      const auto [place, is_new] = places.try_emplace(key, groups.size());
      if (is_new) groups.push_back({ours, theirs, len, {}, {}});
      last = &groups[place->second];
    }
    last->local_offsets.push_back(local[i].addr - ours->base);
    last->remote_offsets.push_back(remote[i].addr - theirs->base);
  }
  return groups;
}

}  // namespace

bool are_pairs(const Ranges &local, const Ranges &remote) {
  if (local.size() != remote.size() || local.size() == 0) return false;
  for (size_t i = 0; i < local.size(); i++) {
    if (local[i].len != remote[i].len || !local[i].metadataP || !remote[i].metadataP) return false;
  }
  return true;
}

Plan make_plan(const Ranges &local, const Ranges &remote) {
  Plan plan;
  plan.local_ids.reserve(local.size());
  plan.remote_ids.reserve(local.size());
  plan.list_offsets.push_back(0);
  const auto end_list = [&] { plan.list_offsets.push_back(plan.local_ids.size()); };
  // The list with block 0 on either side, which all ranges that are alone share.
  uint32_t single = UINT32_MAX;
  const auto add_alone = [&](kvf_segment segment, uint64_t local_offset, uint64_t remote_offset) {
    if (single == UINT32_MAX) {
      single = static_cast<uint32_t>(plan.list_offsets.size() - 1);
      plan.local_ids.push_back(0);
      plan.remote_ids.push_back(0);
      end_list();
    }
    segment.list = single;
    segment.local_offset = local_offset;
    segment.remote_offset = remote_offset;
    segment.local_stride = segment.remote_stride = segment.length;
    plan.segments.push_back(segment);
  };
  for (const Group &group : group(local, remote)) {
    kvf_segment segment{};
    segment.local_region = group.local->index;
    segment.remote_region = group.remote->index;
    segment.length = group.len;
    const size_t count = group.local_offsets.size();
    const Grid ours(group.local_offsets, group.len), theirs(group.remote_offsets, group.len);
    if (count == 1 || !ours.holds(group.local_offsets) || !theirs.holds(group.remote_offsets)) {
      for (size_t i = 0; i < count; i++) add_alone(segment, group.local_offsets[i], group.remote_offsets[i]);
      continue;
    }
    segment.list = static_cast<uint32_t>(plan.list_offsets.size() - 1);
    segment.local_offset = ours.base;
    segment.remote_offset = theirs.base;
    segment.local_stride = ours.stride;
    segment.remote_stride = theirs.stride;
    for (size_t i = 0; i < count; i++) {
      plan.local_ids.push_back(ours.number(group.local_offsets[i]));
      plan.remote_ids.push_back(theirs.number(group.remote_offsets[i]));
    }
    end_list();
    plan.segments.push_back(segment);
  }
  return plan;
}

}  // namespace kvferry
