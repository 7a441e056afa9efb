/* Devices and contexts. */
#include "cuda_double.h"

#include <stdio.h>
#include <string.h>

enum { STACK = 64 };
static __thread struct context *stack[STACK];
static __thread int depth;

static struct context *primaries[MAX_DEVICES];
static unsigned primary_flags[MAX_DEVICES];
static bool peer_enabled[MAX_DEVICES][MAX_DEVICES];

bool cd_context_lives(const struct context *context) { return context != NULL && context->magic == CONTEXT_MAGIC; }

CUresult cd_current(struct context **out) {
    *out = NULL;
    if (depth == 0) return INVALID_CONTEXT;
    if (!cd_context_lives(stack[depth - 1])) return CONTEXT_IS_DESTROYED;
    *out = stack[depth - 1];
    return OK;
}

static bool device_exists(CUdevice device) { return device >= 0 && device < cd_device_count; }

API CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    if (count == NULL) return INVALID_VALUE;
    *count = cd_device_count;
    return OK;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (device == NULL) return INVALID_VALUE;
    if (!device_exists(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice device) {
    ENTER("cuDeviceGetName");
    if (name == NULL || len <= 0) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    snprintf(name, (size_t)len, "kvferry CUDA double");
    return OK;
}

/* The first version gives an instance's card, the second the instance itself. */
API CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid");
    if (uuid == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    cd_uuid(cd_card(cd_physical[device]), false, uuid);
    return OK;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
    ENTER("cuDeviceGetUuid_v2");
    if (uuid == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    cd_uuid(cd_physical[device], cd_mig, uuid);
    return OK;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER("cuDeviceTotalMem_v2");
    if (bytes == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    *bytes = DEVICE_MEMORY;
    return OK;
}

API CUresult cuDeviceGetPCIBusId(char *text, int len, CUdevice device) {
    ENTER("cuDeviceGetPCIBusId");
    if (text == NULL || len < 13) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    snprintf(text, (size_t)len, "0000:%02X:00.0", 0x40 + cd_card(cd_physical[device]));
    return OK;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    ENTER("cuDeviceGetByPCIBusId");
    unsigned domain, bus;
    if (device == NULL || text == NULL) return INVALID_VALUE;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2) return INVALID_VALUE;
    for (int i = 0; i < cd_device_count; i++) {
        if (domain == 0 && bus == 0x40u + (unsigned)cd_card(cd_physical[i])) {
            *device = i;
            return OK;
        }
    }
    return INVALID_DEVICE;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER("cuDeviceCanAccessPeer");
    if (can == NULL) return INVALID_VALUE;
    if (!device_exists(device) || !device_exists(peer)) return INVALID_DEVICE;
    *can = device != peer && cd_peer;
    return OK;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute");
    if (value == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    static const struct {
        int attribute, value;
    } table[] = {
        {1, 1024},  /* threads per block */
        {2, 1024}, {3, 1024}, {4, 64}, /* block dimensions */
        {5, 0x7fffffff}, {6, 65535}, {7, 65535}, /* grid dimensions */
        {8, 49152}, /* shared memory per block */
        {10, 32},   /* warp */
        {16, 132},  /* multiprocessors */
        {19, 1},    /* can map host memory */
        {31, 1},    /* concurrent kernels */
        {39, 2048}, /* threads per multiprocessor */
        {40, 3},    /* copy engines */
        {41, 1},    /* unified addressing */
        {75, 9}, {76, 0}, /* compute capability */
        {78, 1},    /* stream priorities */
        {83, 1},    /* managed memory */
        {91, 1},    /* the host pointer of registered memory works on the device */
        {99, 1},    /* cuMemHostRegister */
        {102, 1},   /* virtual memory management */
        {103, 1},   /* POSIX descriptors as handles */
        {115, 1},   /* memory pools; none of their handles (119) */
    };
    *value = 0;
    if (attribute < 1 || attribute > 200) return INVALID_VALUE;
    if (attribute == 116) *value = 1; /* GPUDirect RDMA */
    if (attribute == 117) *value = 1; /* RDMA writes can be flushed from the host */
    if (attribute == 118) *value = cd_rdma_order;
    if (attribute == 128) *value = cd_fabric;
    if (attribute == 33) *value = 0x40 + cd_card(cd_physical[device]); /* PCI bus; domain (50) and slot (34) are 0 */
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (table[i].attribute == attribute) *value = table[i].value;
    }
    return OK;
}

API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER("cuFlushGPUDirectRDMAWrites");
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    return target == 0 && (scope == 100 || scope == 200) ? OK : INVALID_VALUE;
}

API CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer) {
    ENTER("cuDeviceGetP2PAttribute");
    if (value == NULL || attribute < 1 || attribute > 4) return INVALID_VALUE;
    if (!device_exists(device) || !device_exists(peer) || device == peer) return INVALID_DEVICE;
    *value = attribute == 2 && cd_peer;
    return OK;
}

static struct context *context_new(CUdevice device, unsigned flags, bool primary) {
    struct context *context = cd_keep(sizeof *context);
    context->magic = CONTEXT_MAGIC;
    context->device = device;
    context->flags = flags;
    context->primary = primary;
    context->id = cd_number();
    context->legacy = cd_stream_new(context, 0, 0);
    return context;
}

/* Locked. Work under way ends first, as the driver waits for it too. */
static void context_end(struct context *context) {
    if (context->primary) primaries[context->device] = NULL; /* first, as the wait lets go of the lock */
    cd_wait_context(context);
    context->magic = DEAD;
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next) {
        cd_capture_drop(stream);
        stream->magic = DEAD;
    }
    cd_free_of_context(context);
    pthread_cond_broadcast(&cd_changed);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain");
    LOCKED;
    if (context == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    if (primaries[device] == NULL) primaries[device] = context_new(device, primary_flags[device], true);
    primaries[device]->retained++;
    *context = primaries[device];
    return OK;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease_v2");
    LOCKED;
    if (!device_exists(device)) return INVALID_DEVICE;
    if (primaries[device] == NULL) return INVALID_CONTEXT;
    if (--primaries[device]->retained == 0) context_end(primaries[device]);
    return OK;
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxReset_v2");
    LOCKED;
    if (!device_exists(device)) return INVALID_DEVICE;
    if (primaries[device] != NULL) context_end(primaries[device]);
    return OK;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState");
    LOCKED;
    if (flags == NULL || active == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    *active = primaries[device] != NULL;
    *flags = *active ? primaries[device]->flags : primary_flags[device];
    return OK;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    ENTER("cuDevicePrimaryCtxSetFlags_v2");
    LOCKED;
    if (!device_exists(device)) return INVALID_DEVICE;
    primary_flags[device] = flags;
    if (primaries[device] != NULL) primaries[device]->flags = flags;
    return OK;
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    ENTER("cuCtxCreate_v2");
    LOCKED;
    if (context == NULL || depth == STACK) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    *context = context_new(device, flags, false);
    stack[depth++] = *context;
    return OK;
}

API CUresult cuCtxDestroy_v2(CUcontext context) {
    ENTER("cuCtxDestroy_v2");
    LOCKED;
    if (!cd_context_lives(context) || context->primary) return INVALID_CONTEXT;
    context_end(context);
    if (depth > 0 && stack[depth - 1] == context) depth--;
    return OK;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER("cuCtxPushCurrent_v2");
    LOCKED;
    if (depth == STACK) return INVALID_VALUE;
    if (!cd_context_lives(context)) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER("cuCtxPopCurrent_v2");
    if (depth == 0) return INVALID_CONTEXT;
    depth--;
    if (context != NULL) *context = stack[depth];
    return OK;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER("cuCtxSetCurrent");
    LOCKED;
    if (context == NULL) {
        if (depth > 0) depth--;
        return OK;
    }
    if (!cd_context_lives(context)) return INVALID_CONTEXT;
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER("cuCtxGetCurrent");
    if (context == NULL) return INVALID_VALUE;
    *context = depth == 0 ? NULL : stack[depth - 1];
    return OK;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER("cuCtxGetDevice");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (device == NULL) return INVALID_VALUE;
    *device = current->device;
    return OK;
}

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    ENTER("cuCtxGetId");
    LOCKED;
    struct context *current;
    if (id == NULL) return INVALID_VALUE;
    if (context == NULL) {
        CUresult result = cd_current(&current);
        if (result != OK) return result;
        context = current;
    }
    if (!cd_context_lives(context)) return INVALID_CONTEXT;
    *id = context->id;
    return OK;
}

API CUresult cuCtxGetFlags(unsigned *flags) {
    ENTER("cuCtxGetFlags");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (flags == NULL) return INVALID_VALUE;
    *flags = current->flags;
    return OK;
}

API CUresult cuCtxSetFlags(unsigned flags) {
    ENTER("cuCtxSetFlags");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    current->flags = flags;
    return OK;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
    ENTER("cuCtxGetApiVersion");
    if (version == NULL) return INVALID_VALUE;
    if (context != NULL && !cd_context_lives(context)) return INVALID_CONTEXT;
    *version = 3020;
    return OK;
}

API CUresult cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result == OK) result = cd_capture_forbids_context(current);
    if (result == OK) cd_wait_context(current);
    return result;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (least != NULL) *least = 0;
    if (greatest != NULL) *greatest = -5;
    return OK;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    ENTER("cuCtxEnablePeerAccess");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (flags != 0) return INVALID_VALUE;
    if (!cd_context_lives(peer) || peer->device == current->device) return INVALID_CONTEXT;
    if (!cd_peer) return PEER_ACCESS_UNSUPPORTED;
    bool *enabled = &peer_enabled[current->device][peer->device];
    if (*enabled) return PEER_ACCESS_ALREADY_ENABLED;
    *enabled = true;
    return OK;
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER("cuCtxDisablePeerAccess");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (!cd_context_lives(peer)) return INVALID_CONTEXT;
    bool *enabled = &peer_enabled[current->device][peer->device];
    if (!*enabled) return PEER_ACCESS_NOT_ENABLED;
    *enabled = false;
    return OK;
}
