/* What the driver says about an address. */
#include "cuda_double.h"

#include <string.h>

enum {
    CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC, BUFFER_ID, IS_MANAGED, ORDINAL,
    LEGACY_IPC, RANGE_START, RANGE_SIZE, MAPPED, HANDLE_TYPES, GPU_DIRECT, ACCESS_FLAGS, POOL, MAPPING_SIZE,
    MAPPING_BASE, BLOCK_ID, DECOMPRESS,
};

/* How many bytes an attribute's value has; 0 for those that are not served. */
static size_t width(int attribute) {
    switch (attribute) {
    case CONTEXT: case DEVICE_POINTER: case HOST_POINTER: case BUFFER_ID: case RANGE_START: case RANGE_SIZE:
    case HANDLE_TYPES: case POOL: case MAPPING_SIZE: case MAPPING_BASE: case BLOCK_ID:
        return 8;
    case MEMORY_TYPE: case SYNC: case IS_MANAGED: case ORDINAL: case LEGACY_IPC: case MAPPED: case GPU_DIRECT:
    case ACCESS_FLAGS: case DECOMPRESS:
        return 4;
    default:
        return 0;
    }
}

/* Locked. The value for an address that lies in `range`. */
static CUresult value(const struct range *range, int attribute, uint64_t address, uint64_t *out) {
    bool device = cd_is_device(range);
    *out = 0;
    switch (attribute) {
    case CONTEXT: *out = (uint64_t)range->context; break;
    case MEMORY_TYPE: *out = device ? 2 : 1; break;
    case DEVICE_POINTER: *out = address; break;
    case HOST_POINTER:
        if (device && range->kind != MANAGED) return INVALID_VALUE;
        *out = address;
        break;
    case SYNC: *out = range->sync_memops; break;
    case BUFFER_ID: *out = range->id; break;
    case IS_MANAGED: *out = range->kind == MANAGED; break;
    case ORDINAL: *out = (uint32_t)range->device; break;
    case LEGACY_IPC: *out = range->kind == DEVICE; break;
    /* Of memory of virtual memory management, a driver calls the whole reservation the range (seen with CUDA 13 on an H100). */
    case RANGE_START: case RANGE_SIZE: {
        uint64_t base = range->base, size = range->size;
        if (range->kind == VMM) cd_arena_span(range->base, &base, &size);
        *out = attribute == RANGE_START ? base : size;
        break;
    }
    case MAPPING_BASE: *out = range->base; break;
    case MAPPING_SIZE: *out = range->size; break;
    case MAPPED: *out = 1; break;
    case POOL: *out = (uint64_t)range->pool; break;
    case HANDLE_TYPES: *out = range->kind == VMM ? range->block->handle_types & SHAREABLE : 0; break;
    case ACCESS_FLAGS: *out = range->kind == VMM ? range->access[range->device] : 3; break;
    case BLOCK_ID: *out = range->block != NULL ? range->block->token : range->id; break;
    default: break;
    }
    return OK;
}

API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address) {
    ENTER("cuPointerGetAttribute");
    LOCKED;
    uint64_t is;
    size_t bytes = width(attribute);
    struct range *range = cd_find(address);
    if (out == NULL || bytes == 0 || range == NULL) return INVALID_VALUE;
    CUresult result = value(range, attribute, address, &is);
    if (result == OK) memcpy(out, &is, bytes);
    return result;
}

/* Unlike cuPointerGetAttribute it succeeds for any address. */
API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out, CUdeviceptr address) {
    ENTER("cuPointerGetAttributes");
    LOCKED;
    if (count == 0 || attributes == NULL || out == NULL) return INVALID_VALUE;
    struct range *range = cd_find(address);
    for (unsigned i = 0; i < count; i++) {
        if (width(attributes[i]) == 0 || out[i] == NULL) return INVALID_VALUE;
    }
    for (unsigned i = 0; i < count; i++) {
        uint64_t is = 0;
        if (range != NULL) value(range, attributes[i], address, &is);
        else if (attributes[i] == ORDINAL) is = (uint32_t)-2; /* no device */
        memcpy(out[i], &is, width(attributes[i]));
    }
    return OK;
}

API CUresult cuPointerSetAttribute(const void *in, int attribute, CUdeviceptr address) {
    ENTER("cuPointerSetAttribute");
    LOCKED;
    struct range *range = cd_find(address);
    if (in == NULL || attribute != SYNC || range == NULL) return INVALID_VALUE;
    if (range->context == NULL || !cd_is_device(range)) return INVALID_VALUE;
    memcpy(&range->sync_memops, in, sizeof range->sync_memops);
    return OK;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER("cuMemGetAddressRange_v2");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    struct range *range = cd_find(address);
    if (range == NULL || !cd_is_device(range)) return NOT_FOUND;
    if (base != NULL) *base = range->base;
    if (size != NULL) *size = range->size;
    return OK;
}

API CUresult cuMemRangeGetAttribute(void *out, size_t bytes, int attribute, CUdeviceptr address, size_t size) {
    ENTER("cuMemRangeGetAttribute");
    LOCKED;
    struct range *range = cd_find(address);
    if (out == NULL || bytes != 4 || range == NULL || range->kind != MANAGED) return INVALID_VALUE;
    if (size == 0 || size > range->size - (address - range->base)) return INVALID_VALUE;
    if (attribute != 1 && attribute != 2 && attribute != 4) return INVALID_VALUE;
    int is = attribute == 1 ? 0 : -2; /* not read mostly; no preferred and no prefetched location */
    memcpy(out, &is, sizeof is);
    return OK;
}
