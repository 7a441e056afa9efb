#include "layout.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <typeinfo>

#include "abi.h"

namespace kvferry {

// The fields that NIXL's inlined code reads.
struct EngineFields {
  static void compare(nixlBackendEngine &engine, const nixlBackendInitParams &given, const Report &report) {
    const auto check = [&](bool holds, const char *field) {
      if (!holds) report(std::string("the field ") + field + " is elsewhere");
    };
    check(engine.backendType == given.type, "backendType");
    check(engine.customParams.size() == given.customParams->size() && engine.customParams.count("a key"), "customParams");
    check(engine.telemetryEvents_.empty(), "telemetryEvents_");
    const bool was_free = engine.telemetryEventsMutex_.try_lock();
    check(was_free, "telemetryEventsMutex_");
    if (was_free) engine.telemetryEventsMutex_.unlock();
    // An engine that did not start, for want of what a container forbids, sets it.
    unsigned char byte;
    std::memcpy(&byte, &engine.initErr, 1);
    check(byte <= 1, "initErr");
    check(engine.localAgent == given.localAgent, "localAgent");
    std::memcpy(&byte, &engine.enableTelemetry_, 1);
    check(byte == given.enableTelemetry_, "enableTelemetry_");
  }
};

namespace {

// What the child writes last.
constexpr char END[] = ".\n";
constexpr char POSIX[] = "libplugin_POSIX.so";
constexpr auto LIMIT = std::chrono::seconds(30);

std::string demangled(const char *symbol) {
  char *name = abi::__cxa_demangle(symbol, nullptr, nullptr, nullptr);
  const std::string text = name ? name : symbol;
  std::free(name);
  return text;
}

// A virtual function: its name, and its parameters in parentheses.
struct Function {
  std::string name, parameters;
};

template <class Method>
Function declared(const char *name, Method) {
  const std::string type = demangled(typeid(Method).name());
  return {name, type.substr(type.find(")(") + 1)};
}

// By slot, as abi.h declares them. Two destructors come first: one that frees and one that does not.
const std::vector<Function> &slots() {
  using E = nixlBackendEngine;
  using Prepare = nixl_status_t (E::*)(const RemoteRanges &, void *&, const nixlBackendOptionalArgs *) const;
  using PrepareLocal = nixl_status_t (E::*)(const Ranges &, void *&, const nixlBackendOptionalArgs *) const;
#define DECLARED(name) declared(#name, &E::name)
  static const std::vector<Function> all = {
      {"~", "()"},
      {"~", "()"},
      DECLARED(supportsRemote),
      DECLARED(supportsLocal),
      DECLARED(supportsNotif),
      DECLARED(getSupportedMems),
      DECLARED(registerMem),
      DECLARED(deregisterMem),
      DECLARED(connect),
      DECLARED(disconnect),
      DECLARED(unloadMD),
      DECLARED(prepXfer),
      DECLARED(postXfer),
      DECLARED(checkXfer),
      DECLARED(releaseReqH),
      declared("prepMemView", static_cast<Prepare>(&E::prepMemView)),
      declared("prepMemView", static_cast<PrepareLocal>(&E::prepMemView)),
      DECLARED(releaseMemView),
      DECLARED(getPublicData),
      DECLARED(getConnInfo),
      DECLARED(loadRemoteConnInfo),
      DECLARED(loadRemoteMD),
      DECLARED(loadLocalMD),
      DECLARED(getNotifs),
      DECLARED(genNotif),
      DECLARED(queryMem),
      DECLARED(estimateXferCost),
  };
#undef DECLARED
  return all;
}

// Offset and type information come before the functions of a table.
constexpr size_t BEFORE_SLOTS = 2;

// The function that lies at an address; without a name where the library does not export it, or where it is pure.
Function function_at(void *address) {
  Dl_info info;
  if (!dladdr(address, &info) || !info.dli_sname || info.dli_saddr != address) return {};
  if (std::strcmp(info.dli_sname, "__cxa_pure_virtual") == 0) return {};
  const std::string text = demangled(info.dli_sname);
  const size_t parameters = text.find('('), colons = text.rfind("::", parameters);
  if (parameters == std::string::npos) return {text, ""};
  std::string name = text.substr(colons == std::string::npos ? 0 : colons + 2, parameters - colons - 2);
  // The tag of a return type that has GNU's C++11 strings.
  name = name.substr(0, name.find('['));
  return {name[0] == '~' ? "~" : name, text.substr(parameters)};
}

// Compares the functions of a table, and notes which slots have the one that is expected.
void compare_slots(void **table, const std::string &whose, std::vector<bool> &confirmed, const Report &report) {
  for (size_t i = 0; i < slots().size(); i++) {
    const Function found = function_at(table[i]), &expected = slots()[i];
    if (found.name.empty()) continue;
    if (found.name == expected.name && found.parameters == expected.parameters) {
      confirmed[i] = true;
    } else if (found.name != expected.name) {
      report("slot " + std::to_string(i) + " of " + whose + " is " + found.name + ", expected " + expected.name);
    } else {
      report("slot " + std::to_string(i) + " of " + whose + " is " + found.name + found.parameters + ", expected " +
             expected.parameters);
    }
  }
}

// The table of a class and how many slots it has; null where the library does not export it.
std::pair<void **, size_t> table_of(void *handle, const std::string &name) {
  void *table = dlsym(handle, ("_ZTV" + std::to_string(name.size()) + name).c_str());
  Dl_info info;
  const ElfW(Sym) *symbol = nullptr;
  if (!table || !dladdr1(table, &info, reinterpret_cast<void **>(const_cast<ElfW(Sym) **>(&symbol)), RTLD_DL_SYMENT) ||
      !symbol || symbol->st_size < BEFORE_SLOTS * sizeof(void *)) {
    return {nullptr, 0};
  }
  return {static_cast<void **>(table) + BEFORE_SLOTS, symbol->st_size / sizeof(void *) - BEFORE_SLOTS};
}

void *open_file(const std::string &path, const Report &report) {
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) report(dlerror());
  return handle;
}

// A list as NIXL's own code makes it. `symbol` is its constructor, from a kind of memory and a number of ranges.
template <class T>
void compare_list(void *handle, const char *symbol, const std::string &whose, const Report &report) {
  // So many that a range of another size changes their number.
  constexpr int COUNT = 64;
  const auto construct = reinterpret_cast<void (*)(void *, const nixl_mem_t &, const int &)>(dlsym(handle, symbol));
  if (!construct) return report("there is no constructor of " + whose + " to compare with");
  alignas(nixlDescList<T>) unsigned char memory[2 * sizeof(nixlDescList<T>)] = {};
  construct(memory, FILE_SEG, COUNT);
  const auto &list = *reinterpret_cast<const nixlDescList<T> *>(memory);
  if (list.mem() != FILE_SEG || list.size() != COUNT) report(whose + " has another layout");
}

void compare_lists(const std::string &path, const Report &report) {
  void *handle = open_file(path, report);
  if (!handle) return;
  compare_list<nixlMetaDesc>(handle, "_ZN12nixlDescListI12nixlMetaDescEC1ERK10nixl_mem_tRKi", "a list of nixlMetaDesc", report);
  compare_list<nixlBlobDesc>(handle, "_ZN12nixlDescListI12nixlBlobDescEC1ERK10nixl_mem_tRKi", "a list of nixlBlobDesc", report);
}

[[noreturn]] void compare_in_child(const std::filesystem::path &folder, int out) {
  const auto write_text = [&](const std::string &text) {
    for (size_t done = 0; done < text.size();) {
      const ssize_t written = write(out, text.data() + done, text.size() - done);
      if (written <= 0) _exit(1);
      done += static_cast<size_t>(written);
    }
  };
  try {
    const Report report = [&](const std::string &difference) { write_text("- " + difference + "\n"); };
    compare_plugin(folder / POSIX, "POSIX", report);
    compare_lists(folder.parent_path() / "libnixl_build.so", report);
  } catch (const std::exception &error) {
    write_text(std::string("- ") + error.what() + "\n");
  }
  write_text(END);
  _exit(0);
}

// What a crash in the child would do in the host: nothing of that here, and no file with the host's memory.
void leave_the_host() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_DUMPABLE, 0);
  for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE, SIGTERM, SIGALRM}) std::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // What it prints is nobody's.
  const int nowhere = open("/dev/null", O_RDWR);
  for (int stream = 0; stream <= 2 && nowhere >= 0; stream++) dup2(nowhere, stream);
}

// Whether the child has told all. Another process that the host forks off may keep the pipe open.
bool is_whole(const std::string &text) {
  const std::string end = std::string("\n") + END;
  return text == END || (text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0);
}

// All that comes out of a pipe until the child's end; false if that takes longer than LIMIT.
bool read_all(int in, std::string &text) {
  const auto deadline = std::chrono::steady_clock::now() + LIMIT;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waited{in, POLLIN, 0};
    const int ready = left.count() > 0 ? poll(&waited, 1, static_cast<int>(left.count())) : 0;
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    std::array<char, 4096> bytes;
    const ssize_t count = read(in, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return true;
    text.append(bytes.data(), static_cast<size_t>(count));
    if (is_whole(text)) return true;
  }
}

std::string reason() { return std::strerror(errno); }

}  // namespace

void compare_plugin(const std::string &path, const std::string &name, const Report &report) {
  size_t differences = 0;
  const Report counted = [&](const std::string &line) { differences++, report(line); };
  void *handle = open_file(path, counted);
  if (!handle) return;
  const auto init = reinterpret_cast<nixlBackendPlugin *(*)()>(dlsym(handle, "nixl_plugin_init"));
  nixlBackendPlugin *plugin = init ? init() : nullptr;
  if (!plugin) return counted(path + " is no plug-in of NIXL");
  if (plugin->api_version != NIXL_PLUGIN_API) {
    counted("the plug-in API is " + std::to_string(plugin->api_version) + ", expected " + std::to_string(NIXL_PLUGIN_API));
  }
  std::vector<bool> confirmed(slots().size());
  const auto [base, count] = table_of(handle, "nixlBackendEngine");
  if (!base) {
    counted(path + " does not export the table of nixlBackendEngine");
  } else {
    if (count != slots().size()) {
      counted("nixlBackendEngine has " + std::to_string(count) + " slots, expected " + std::to_string(slots().size()));
    }
    if (count >= slots().size()) compare_slots(base, "nixlBackendEngine", confirmed, counted);
  }
  // With other functions or another API, the plug-in's are not to be called.
  if (differences) return;
  if (plugin->get_plugin_name() != name) counted(std::string("the name is ") + plugin->get_plugin_name());
  const Mems mems = plugin->get_backend_mems();
  if (mems.empty() || mems[0] < DRAM_SEG || mems[0] > FILE_SEG) counted("no memories");
  Params params = plugin->get_backend_options();
  if (params.size() > 100) return counted("no options");
  params["a key"] = "a value";
  const nixlBackendInitParams given{"an agent with a long name", name, &params, true, 0, nixl_thread_sync_t::RW, false};
  nixlBackendEngine *engine = plugin->create_engine(&given);
  if (!engine) return counted("the plug-in " + name + " makes no engine");
  compare_slots(*reinterpret_cast<void ***>(engine), "the engine " + name, confirmed, counted);
  EngineFields::compare(*engine, given, counted);
  for (size_t i = 0; i < confirmed.size(); i++) {
    if (!confirmed[i]) counted("slot " + std::to_string(i) + " (" + slots()[i].name + ") has no name to compare");
  }
  if (differences) return;
  if (engine->getSupportedMems().empty()) counted("getSupportedMems gives nothing");
  plugin->destroy_engine(engine);
}

void compare_class(const std::string &path, const std::string &name, const Report &report) {
  void *handle = open_file(path, report);
  if (!handle) return;
  const auto [table, count] = table_of(handle, name);
  if (!table || count < slots().size()) {
    return report(name + " has no table of " + std::to_string(slots().size()) + " slots");
  }
  std::vector<bool> confirmed(slots().size());
  compare_slots(table, name, confirmed, report);
}

std::vector<std::string> find_differences(const std::filesystem::path &folder) {
  std::error_code error;
  if (!std::filesystem::exists(folder / POSIX, error)) {
    return {"there is no " + (folder / POSIX).string() + " to compare with"};
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {"it could not be compared: pipe: " + reason()};
  const pid_t child = fork();
  if (child == 0) {
    leave_the_host();
    compare_in_child(folder, ends[1]);
  }
  const std::string failed_fork = child < 0 ? reason() : "";
  close(ends[1]);
  std::string text;
  bool has_ended = child > 0 && read_all(ends[0], text);
  close(ends[0]);
  if (child < 0) return {"it could not be compared: fork: " + failed_fork};
  if (!has_ended) kill(child, SIGKILL);
  int status = 0;
  pid_t waited;
  while ((waited = waitpid(child, &status, 0)) < 0 && errno == EINTR) {
  }
  std::vector<std::string> differences;
  for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
    const std::string line = text.substr(start, end - start);
    if (line.compare(0, 2, "- ") == 0) differences.push_back(line.substr(2));
  }
  if (!has_ended) {
    differences.push_back("comparing did not end within " + std::to_string(LIMIT.count()) + " s");
  } else if (!is_whole(text)) {
    const bool by_signal = waited == child && WIFSIGNALED(status);
    differences.push_back("comparing ended in the middle" +
                          (by_signal ? ", by " + std::string(strsignal(WTERMSIG(status))) : std::string()));
  }
  return differences;
}

}  // namespace kvferry
