/* Legacy IPC: a handle names the exporter's memfd by process and descriptor, with a token that a reused process or
 * descriptor number does not have. It works between processes of one user and one PID namespace. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define HANDLE_MAGIC 0x6376666570697063u

CUresult cd_block_open(const struct shared_handle *handle, struct block **out) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID_VALUE;
    struct block *block = cd_block_adopt(fd);
    if (block == NULL) return NOT_MAPPABLE;
    if (block->token != handle->token || handle->size > block->size || handle->offset > block->size - handle->size) {
        cd_block_settle(block);
        return NOT_MAPPABLE;
    }
    *out = block;
    return OK;
}

API CUresult cuIpcGetMemHandle(struct shared_handle *handle, CUdeviceptr address) {
    ENTER("cuIpcGetMemHandle");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    struct range *range = cd_find(address);
    if (handle == NULL || range == NULL || range->kind != DEVICE) return INVALID_VALUE;
    *handle = (struct shared_handle){.magic = HANDLE_MAGIC, .token = range->block->token, .offset = range->block_offset,
                                     .size = range->size, .pid = getpid(), .fd = range->block->fd};
    return OK;
}

static struct range *opened(uint64_t token, const struct context *context) {
    struct range before = {0};
    for (struct range *range = cd_next(&before); range != NULL; range = cd_next(range)) {
        if (range->kind == IPC && range->block->token == token && range->context == context) return range;
    }
    return NULL;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct shared_handle handle, unsigned flags) {
    ENTER("cuIpcOpenMemHandle_v2");
    LOCKED;
    UNSAFE;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || flags != 1 || handle.magic != HANDLE_MAGIC) return INVALID_VALUE;
    /* A driver refuses a handle of the same process so. */
    if (handle.pid == getpid()) return INVALID_CONTEXT;
    struct range *range = opened(handle.token, current);
    if (range != NULL) {
        range->opens++;
        *out = range->base;
        return OK;
    }
    struct block *block;
    uint64_t base = 0;
    result = cd_block_open(&handle, &block);
    if (result != OK) return result;
    /* No memory is shared between instances; which error that is, is not documented. */
    if (cd_mig && block->device < 0) result = INVALID_DEVICE;
    else if (block->device != current->device && !cd_peer) result = PEER_ACCESS_UNSUPPORTED;
    else if ((base = cd_arena_take(block->size + 4096, GRANULARITY, 0)) == 0) result = NOT_MAPPABLE;
    if (result != OK) {
        cd_block_settle(block);
        return result;
    }
    /* Memory of a device that is hidden here counts as the opening context's. */
    if (block->device < 0) block->device = current->device;
    *out = cd_add(IPC, base + handle.offset, handle.size, block, handle.offset, current)->base;
    return OK;
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *out, struct shared_handle handle, unsigned flags) {
    return cuIpcOpenMemHandle_v2(out, handle, flags);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER("cuIpcCloseMemHandle");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    struct range *range = cd_find(address);
    if (range == NULL || range->kind != IPC) return INVALID_VALUE;
    if (--range->opens > 0) return OK;
    uint64_t base = range->base;
    cd_remove(range, "cuIpcCloseMemHandle");
    cd_arena_give(base);
    return OK;
}
