/* Functions by name, and those that callers link to but that no device here has. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Which symbol a name means from which version of CUDA on, the latest first. */
static const struct versioned {
    const char *name, *symbol;
    int from;
} versions[] = {
    {"cuDeviceGetDefaultMemPool", "cuDeviceGetDefaultMemPool", 11020},
    {"cuDeviceGetMemPool", "cuDeviceGetMemPool", 11020},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuDeviceGetUuid", "cuDeviceGetUuid", 9020},
    {"cuDeviceSetMemPool", "cuDeviceSetMemPool", 11020},
    {"cuGraphDestroy", "cuGraphDestroy", 10000},
    {"cuGraphGetNodes", "cuGraphGetNodes", 10000},
    {"cuMemAllocAsync", "cuMemAllocAsync", 11020},
    {"cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync", 11020},
    {"cuMemFreeAsync", "cuMemFreeAsync", 11020},
    {"cuMemPoolCreate", "cuMemPoolCreate", 11020},
    {"cuMemPoolDestroy", "cuMemPoolDestroy", 11020},
    {"cuMemPoolGetAttribute", "cuMemPoolGetAttribute", 11020},
    {"cuMemPoolSetAttribute", "cuMemPoolSetAttribute", 11020},
    {"cuMemPoolTrimTo", "cuMemPoolTrimTo", 11020},
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000},
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12080},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10010},
    {"cuStreamBeginCapture", "cuStreamBeginCapture", 10000},
    {"cuStreamEndCapture", "cuStreamEndCapture", 10000},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", 12030},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", 11030},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo", 10010},
    {"cuStreamIsCapturing", "cuStreamIsCapturing", 10000},
    {"cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", 10010},
};

/* Other names mean their second version where there is one. `late`: a later version of CUDA has the name. */
static void *look_up(const char *name, int version, bool *late) {
    static void *self;
    Dl_info info;
    char second[128];
    *late = false;
    if (self == NULL && dladdr((void *)cd_uuid, &info) != 0) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (self == NULL || name[0] != 'c' || name[1] != 'u') return NULL;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        if (strcmp(versions[i].name, name) != 0) continue;
        if (versions[i].from <= version) return dlsym(self, versions[i].symbol);
        *late = true;
    }
    if (*late) return NULL;
    snprintf(second, sizeof second, "%s_v2", name);
    void *found = dlsym(self, second);
    return found != NULL ? found : dlsym(self, name);
}

API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    CUresult result = cd_enter_any("cuGetProcAddress_v2");
    if (result != OK) return result;
    if (name == NULL || out == NULL || flags > 2) return INVALID_VALUE;
    bool late = version > cd_version;
    *out = late ? NULL : look_up(name, version, &late);
    if (status != NULL) *status = *out != NULL ? 0 : late ? 2 : 1;
    return *out == NULL ? NOT_FOUND : OK;
}

API CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

API CUresult cuGetExportTable(const void **out, const void *id) {
    (void)id;
    if (out == NULL) return INVALID_VALUE;
    *out = NULL;
    return NOT_SUPPORTED;
}

#define UNSUPPORTED(name) \
    API CUresult name(void) { \
        ENTER(#name); \
        return NOT_SUPPORTED; \
    }
UNSUPPORTED(cuMemGetHandleForAddressRange)
UNSUPPORTED(cuMemPoolExportPointer)
UNSUPPORTED(cuMemPoolExportToShareableHandle)
UNSUPPORTED(cuMemPoolImportFromShareableHandle)
UNSUPPORTED(cuMemPoolImportPointer)
UNSUPPORTED(cuMemPoolSetAccess)
