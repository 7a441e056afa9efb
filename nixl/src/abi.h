// What crosses between NIXL and a backend plug-in, declared anew: layouts and virtual slots as in the wheels of the
// versions in version.cpp. Nothing here may change without tests/python/nixl/test_nixl_abi.py, which compares it with the
// plug-ins of every wheel. Itanium C++ ABI; standard types are those of libstdc++ with C++11 strings.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// Class names are part of the mangled type information, which dynamic_cast compares: they are NIXL's.

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t {
  NIXL_IN_PROG = 1,
  NIXL_SUCCESS = 0,
  NIXL_ERR_NOT_POSTED = -1,
  NIXL_ERR_INVALID_PARAM = -2,
  NIXL_ERR_BACKEND = -3,
  NIXL_ERR_NOT_FOUND = -4,
  NIXL_ERR_MISMATCH = -5,
  NIXL_ERR_NOT_ALLOWED = -6,
  NIXL_ERR_REPOST_ACTIVE = -7,
  NIXL_ERR_UNKNOWN = -8,
  NIXL_ERR_NOT_SUPPORTED = -9,
  NIXL_ERR_REMOTE_DISCONNECT = -10,
  NIXL_ERR_CANCELED = -11,
};
enum class nixl_thread_sync_t { NONE, STRICT, RW };
enum class nixl_cost_t { ANALYTICAL_BACKEND };
struct nixlAgentOptionalArgs;

using Params = std::unordered_map<std::string, std::string>;
using Mems = std::vector<nixl_mem_t>;
// Sender and text.
using Notifications = std::vector<std::pair<std::string, std::string>>;

struct nixlBasicDesc {
  uintptr_t addr;
  size_t len;
  uint64_t devId;
};

// A range with the other side's metadata.
struct nixlBlobDesc : nixlBasicDesc {
  std::string metaInfo;
};

// A plug-in's own record of a range.
class nixlBackendMD {
 protected:
  bool isPrivateMD;

 public:
  explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
  virtual ~nixlBackendMD() = default;
};

// A range inside one that is registered.
struct nixlMetaDesc : nixlBasicDesc {
  nixlBackendMD *metadataP;
};

// Only read here, so that its virtual functions need no names.
template <class T>
class nixlDescList {
  void *virtual_functions;
  nixl_mem_t type;
  std::vector<T> descs;

 public:
  nixl_mem_t mem() const { return type; }
  size_t size() const { return descs.size(); }
  const T &operator[](size_t i) const { return descs[i]; }
};
struct nixlRemoteMetaDesc;
using Ranges = nixlDescList<nixlMetaDesc>;
using RemoteRanges = nixlDescList<nixlRemoteMetaDesc>;
using Blobs = nixlDescList<nixlBlobDesc>;

struct nixlBackendOptionalArgs {
  std::string notifMsg;
  bool hasNotif;
  std::string customParam;
};

// A plug-in's record of a transfer.
class nixlBackendReqH {
 public:
  virtual ~nixlBackendReqH() = default;
};

struct nixlBackendInitParams {
  std::string localAgent;
  std::string type;
  Params *customParams;
  bool enableProgTh;
  uint64_t pthrDelay;
  nixl_thread_sync_t syncMode;
  bool enableTelemetry_;
};

struct nixlTelemetryEvent {
  uint64_t words[2];
};

namespace kvferry {
struct EngineFields;
}

// NIXL reads the fields by inlined code, so their order counts as much as that of the virtual functions.
class nixlBackendEngine {
  friend struct kvferry::EngineFields;

  std::string backendType;
  Params customParams;
  std::vector<nixlTelemetryEvent> telemetryEvents_;
  std::mutex telemetryEventsMutex_;

 protected:
  bool initErr = false;
  const std::string localAgent;
  const bool enableTelemetry_;

 public:
  explicit nixlBackendEngine(const nixlBackendInitParams &params)
      : backendType(params.type),
        customParams(*params.customParams),
        localAgent(params.localAgent),
        enableTelemetry_(params.enableTelemetry_) {}
  nixlBackendEngine(const nixlBackendEngine &) = delete;
  nixlBackendEngine &operator=(const nixlBackendEngine &) = delete;

  virtual ~nixlBackendEngine() = default;
  virtual bool supportsRemote() const = 0;
  virtual bool supportsLocal() const = 0;
  virtual bool supportsNotif() const = 0;
  virtual Mems getSupportedMems() const = 0;
  virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
  virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
  virtual nixl_status_t connect(const std::string &) = 0;
  virtual nixl_status_t disconnect(const std::string &) = 0;
  virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
  virtual nixl_status_t prepXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &,
                                 nixlBackendReqH *&, const nixlBackendOptionalArgs *) const = 0;
  virtual nixl_status_t postXfer(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &,
                                 nixlBackendReqH *&, const nixlBackendOptionalArgs *) const = 0;
  virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
  virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
  virtual nixl_status_t prepMemView(const RemoteRanges &, void *&, const nixlBackendOptionalArgs *) const {
    return NIXL_ERR_NOT_SUPPORTED;
  }
  virtual nixl_status_t prepMemView(const Ranges &, void *&, const nixlBackendOptionalArgs *) const {
    return NIXL_ERR_NOT_SUPPORTED;
  }
  virtual void releaseMemView(void *) const {}
  virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const = 0;
  virtual nixl_status_t getConnInfo(std::string &) const = 0;
  virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) = 0;
  virtual nixl_status_t loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) = 0;
  virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) = 0;
  virtual nixl_status_t getNotifs(Notifications &) = 0;
  virtual nixl_status_t genNotif(const std::string &, const std::string &) const = 0;
  virtual nixl_status_t queryMem(const Blobs &, std::vector<std::optional<Params>> &) const {
    return NIXL_ERR_NOT_SUPPORTED;
  }
  virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &, const Ranges &, const Ranges &, const std::string &,
                                         nixlBackendReqH *const &, std::chrono::microseconds &,
                                         std::chrono::microseconds &, nixl_cost_t &, const nixlAgentOptionalArgs *) const {
    return NIXL_ERR_NOT_SUPPORTED;
  }
};

// What nixl_plugin_init returns.
struct nixlBackendPlugin {
  int api_version;
  nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
  void (*destroy_engine)(nixlBackendEngine *);
  const char *(*get_plugin_name)();
  const char *(*get_plugin_version)();
  Params (*get_backend_options)();
  Mems (*get_backend_mems)();
};

// nixlBackendPlugin::api_version of every version in version.cpp.
constexpr int NIXL_PLUGIN_API = 1;

static_assert(sizeof(nixlBasicDesc) == 24 && sizeof(nixlMetaDesc) == 32 && sizeof(nixlBlobDesc) == 56);
static_assert(sizeof(nixlBackendMD) == 16 && sizeof(nixlBackendReqH) == 8 && sizeof(Ranges) == 40);
static_assert(sizeof(nixlBackendEngine) == 208 && sizeof(nixlBackendPlugin) == 56);
static_assert(sizeof(nixlBackendInitParams) == 96 && sizeof(nixlBackendOptionalArgs) == 72);
