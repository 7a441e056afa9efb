/* Functions by name, and those that callers link to but that no device here has. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <dlfcn.h>
#include <stdio.h>

/* Where there is a second version under the plain name's meaning, that is the one; the batch copy's needs CUDA 13. */
static void *look_up(const char *name, int version) {
    static void *self;
    Dl_info info;
    char second[128];
    if (self == NULL && dladdr((void *)cd_uuid, &info) != 0) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (self == NULL || name[0] != 'c' || name[1] != 'u') return NULL;
    snprintf(second, sizeof second, "%s_v2", name);
    void *found = dlsym(self, second);
    if (found != NULL && (version >= 13000 || dlsym(self, "cuMemcpyBatchAsync_v2") != found)) return found;
    return dlsym(self, name);
}

API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    CUresult result = cd_enter_any("cuGetProcAddress_v2");
    if (result != OK) return result;
    if (name == NULL || out == NULL || flags > 2) return INVALID_VALUE;
    *out = version > cd_version ? NULL : look_up(name, version);
    if (status != NULL) *status = *out != NULL ? 0 : version > cd_version ? 2 : 1;
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
UNSUPPORTED(cuMemPoolDestroy)
UNSUPPORTED(cuMemPoolExportPointer)
UNSUPPORTED(cuMemPoolExportToShareableHandle)
UNSUPPORTED(cuMemPoolImportFromShareableHandle)
UNSUPPORTED(cuMemPoolImportPointer)
UNSUPPORTED(cuMemPoolSetAccess)
