// Compares abi.h with plug-ins of a NIXL wheel, as layout.h does. Prints what differs; exits with 0 if nothing does.
//
//     abi_check PATH NAME CLASS...    of the plug-in NAME, which is made without parameters, or of the classes' tables alone
//     abi_check FOLDER                of NIXL's plug-ins in a folder, in a process of its own
#include <cstdio>

#include "../src/layout.h"

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  int wrong = 0;
  const auto report = [&](const std::string &line) {
    std::printf("%s\n", line.c_str());
    wrong++;
  };
  if (argc == 2) {
    for (const std::string &line : kvferry::find_differences(argv[1])) report(line);
  } else if (argc == 3) {
    kvferry::compare_plugin(argv[1], argv[2], report);
  } else {
    for (int i = 3; i < argc; i++) kvferry::compare_class(argv[1], argv[i], report);
  }
  return wrong ? 1 : 0;
}
