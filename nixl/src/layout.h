// Whether a NIXL's own plug-ins have the layouts of abi.h.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace kvferry {

using Report = std::function<void(const std::string &)>;

// Reports each difference between abi.h and the plug-in NAME in the file `path`: the fields of an engine that it makes, and
// the function in each virtual slot. Such an engine may differ so much that looking at it ends the process.
void compare_plugin(const std::string &path, const std::string &name, const Report &report);

// The same for one class of the file's that is an engine: the functions that its table names.
void compare_class(const std::string &path, const std::string &name, const Report &report);

// The differences between abi.h and a NIXL with its plug-ins in `folder`: of the plug-in POSIX, which every NIXL has, and of
// the lists that libnixl_build.so makes. Empty if there are none. Looks in a process that is forked off and gone when this
// returns, within half a minute; that it could not is a difference too.
std::vector<std::string> find_differences(const std::filesystem::path &folder);

}  // namespace kvferry
