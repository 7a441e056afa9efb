/* Virtual memory management: physical handles, reservations and what is mapped where. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define FABRIC_MAGIC 0x6366616272696363u

struct location {
    int type, id;
};
struct properties {
    int type;
    int handle_types;
    struct location location;
    void *win32;
    unsigned char compression, gpu_direct;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access {
    struct location location;
    int flags;
};

static CUresult check(const struct properties *properties) {
    if (properties == NULL || properties->type != 1) return INVALID_VALUE;
    if (properties->location.type != 1) return NOT_SUPPORTED;
    if (properties->location.id < 0 || properties->location.id >= cd_device_count) return INVALID_DEVICE;
    /* As without the service that fabric handles need. */
    if (properties->handle_types & ~(HANDLE_POSIX_FD | (cd_fabric ? HANDLE_FABRIC : 0))) return NOT_PERMITTED;
    return OK;
}

static struct block *block_of(CUhandle handle) {
    struct block *block = (struct block *)handle;
    return block != NULL && block->magic == BLOCK_MAGIC && block->handles > 0 ? block : NULL;
}

API CUresult cuMemGetAllocationGranularity(size_t *out, const struct properties *properties, int option) {
    ENTER("cuMemGetAllocationGranularity");
    if (out == NULL || (option != 0 && option != 1)) return INVALID_VALUE;
    CUresult result = check(properties);
    if (result == OK) *out = GRANULARITY;
    return result;
}

API CUresult cuMemCreate(CUhandle *handle, size_t size, const struct properties *properties, unsigned long long flags) {
    ENTER("cuMemCreate");
    LOCKED;
    UNSAFE;
    CUresult result = check(properties);
    if (result != OK) return result;
    if (handle == NULL || flags != 0 || size == 0 || size % GRANULARITY != 0) return INVALID_VALUE;
    if (size > DEVICE_MEMORY) return OUT_OF_MEMORY;
    struct block *block = cd_block_new(size, properties->location.id, (unsigned)properties->handle_types);
    if (block == NULL) return OUT_OF_MEMORY;
    block->handles = 1;
    *handle = (CUhandle)block;
    return OK;
}

API CUresult cuMemRelease(CUhandle handle) {
    ENTER("cuMemRelease");
    LOCKED;
    UNSAFE;
    struct block *block = block_of(handle);
    if (block == NULL) return INVALID_VALUE;
    block->handles--;
    cd_block_settle(block);
    return OK;
}

API CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address) {
    ENTER("cuMemRetainAllocationHandle");
    LOCKED;
    struct range *range = cd_find((uint64_t)address);
    if (handle == NULL || range == NULL || range->kind != VMM) return INVALID_VALUE;
    range->block->handles++;
    *handle = (CUhandle)range->block;
    return OK;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(struct properties *out, CUhandle handle) {
    ENTER("cuMemGetAllocationPropertiesFromHandle");
    LOCKED;
    struct block *block = block_of(handle);
    if (out == NULL || block == NULL) return INVALID_VALUE;
    memset(out, 0, sizeof *out);
    out->type = 1;
    out->handle_types = (int)(block->handle_types & SHAREABLE);
    out->location = (struct location){1, block->device};
    return OK;
}

API CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags) {
    ENTER("cuMemExportToShareableHandle");
    LOCKED;
    struct block *block = block_of(handle);
    if (out == NULL || block == NULL || flags != 0) return INVALID_VALUE;
    if (type != HANDLE_POSIX_FD && type != HANDLE_FABRIC) return INVALID_VALUE;
    if (!(block->handle_types & (unsigned)type)) return INVALID_VALUE;
    if (type == HANDLE_FABRIC) {
        struct shared_handle named = {.magic = FABRIC_MAGIC, .token = block->token, .size = block->size,
                                      .pid = getpid(), .fd = block->fd};
        memcpy(out, &named, sizeof named);
        return OK;
    }
    int fd = fcntl(block->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return OPERATING_SYSTEM;
    *(int *)out = fd;
    return OK;
}

/* A fabric handle is for as long as the process that exported it has the memory. */
static CUresult open_fabric(const struct shared_handle *handle, struct block **out) {
    struct shared_handle named;
    if (!cd_fabric || handle == NULL) return INVALID_VALUE;
    memcpy(&named, handle, sizeof named);
    return named.magic == FABRIC_MAGIC && cd_block_open(&named, out) == OK ? OK : INVALID_VALUE;
}

/* A descriptor stays the caller's. */
static CUresult open_descriptor(int descriptor, struct block **out) {
    int fd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    *out = fd < 0 ? NULL : cd_block_adopt(fd);
    return *out == NULL ? INVALID_VALUE : OK;
}

API CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *shared, int type) {
    ENTER("cuMemImportFromShareableHandle");
    LOCKED;
    UNSAFE;
    if (handle == NULL || (type != HANDLE_POSIX_FD && type != HANDLE_FABRIC)) return INVALID_VALUE;
    struct block *block;
    CUresult result = type == HANDLE_FABRIC ? open_fabric(shared, &block)
                                            : open_descriptor((int)(intptr_t)shared, &block);
    if (result != OK) return result;
    block->handles = 1;
    if (!(block->handle_types & (unsigned)type) || block->device < 0) {
        result = block->device < 0 ? INVALID_DEVICE : INVALID_VALUE;
        block->handles = 0;
        cd_block_settle(block);
        return result;
    }
    *handle = (CUhandle)block;
    return OK;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr wish,
                                 unsigned long long flags) {
    ENTER("cuMemAddressReserve");
    LOCKED;
    UNSAFE;
    if (out == NULL || size == 0 || size % GRANULARITY != 0 || flags != 0) return INVALID_VALUE;
    if (align & (align - 1)) return INVALID_VALUE;
    uint64_t base = cd_arena_take(size, align < GRANULARITY ? GRANULARITY : align, wish);
    if (base == 0) return OUT_OF_MEMORY;
    cd_arena_reserved(base, size, NULL);
    *out = base;
    return OK;
}

/* Whether any mapped piece lies in [base, base+size). */
static bool anything(uint64_t base, size_t size) {
    struct range *range = cd_find(base);
    if (range != NULL) return true;
    struct range before = {.base = base, .size = 0};
    range = cd_next(&before);
    return range != NULL && range->base < base + size;
}

API CUresult cuMemAddressFree(CUdeviceptr base, size_t size) {
    ENTER("cuMemAddressFree");
    LOCKED;
    UNSAFE;
    size_t whole = 0;
    if (!cd_arena_reserved(base, size, &whole) || whole != size) return INVALID_VALUE;
    if (anything(base, size)) return INVALID_VALUE;
    cd_arena_give(base);
    return OK;
}

API CUresult cuMemMap(CUdeviceptr base, size_t size, size_t offset, CUhandle handle, unsigned long long flags) {
    ENTER("cuMemMap");
    LOCKED;
    UNSAFE;
    struct block *block = block_of(handle);
    size_t whole;
    if (block == NULL || flags != 0 || size == 0 || base % GRANULARITY != 0 || size % GRANULARITY != 0) {
        return INVALID_VALUE;
    }
    /* The documentation allows no other offset than 0. */
    if (offset != 0 || size > block->size) return INVALID_VALUE;
    if (!cd_arena_reserved(base, size, &whole) || anything(base, size)) return INVALID_VALUE;
    cd_add(VMM, base, size, block, 0, NULL);
    return OK;
}

/* Whether whole pieces cover [base, base+size) without a hole. */
static bool covered(uint64_t base, size_t size) {
    struct range *range = cd_find(base);
    uint64_t at = base;
    while (range != NULL && range->kind == VMM && range->base == at && at < base + size) {
        at += range->size;
        range = cd_next(range);
    }
    return size > 0 && at == base + size;
}

API CUresult cuMemUnmap(CUdeviceptr base, size_t size) {
    ENTER("cuMemUnmap");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    if (!covered(base, size)) return INVALID_VALUE;
    for (uint64_t at = base; at < base + size;) {
        struct range *range = cd_find(at);
        at += range->size;
        cd_remove(range, "cuMemUnmap");
    }
    return OK;
}

API CUresult cuMemSetAccess(CUdeviceptr base, size_t size, const struct access *access, size_t count) {
    ENTER("cuMemSetAccess");
    LOCKED;
    UNSAFE;
    if (access == NULL || count == 0 || !covered(base, size)) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        int device = access[i].location.id;
        if (access[i].location.type != 1 || device < 0 || device >= cd_device_count) return INVALID_DEVICE;
        if (access[i].flags != 0 && access[i].flags != 1 && access[i].flags != 3) return INVALID_VALUE;
        for (uint64_t at = base; at < base + size;) {
            struct range *range = cd_find(at);
            if (device != range->device && !cd_peer) return INVALID_DEVICE;
            range->access[device] = (uint8_t)access[i].flags;
            at += range->size;
        }
    }
    return OK;
}

API CUresult cuMemGetAccess(unsigned long long *flags, const struct location *location, CUdeviceptr address) {
    ENTER("cuMemGetAccess");
    LOCKED;
    struct range *range = cd_find(address);
    if (flags == NULL || location == NULL || range == NULL || range->kind != VMM) return INVALID_VALUE;
    if (location->type != 1 || location->id < 0 || location->id >= cd_device_count) return INVALID_DEVICE;
    *flags = range->access[location->id];
    return OK;
}
