/* Memory pools: allocation and freeing in stream order.
 *
 * A pool's memory has no handle for other processes, and only its own device reaches it. Work that takes it before the
 * stream has got to its allocation ends the process, as does work that comes after it is freed. */
#include "cuda_double.h"

struct location {
    int type, id;
};
struct properties {
    int type, handle_types;
    struct location location;
    void *win32;
    size_t most;
    unsigned short usage;
    unsigned char reserved[54];
};
struct pool {
    int magic;
    CUdevice device;
    bool by_default; /* never ends */
    uint64_t threshold;
    int reuse[3];
};
enum { THRESHOLD = 4 };

static struct pool defaults[MAX_DEVICES], *current_pools[MAX_DEVICES];

static bool lives(const struct pool *pool) { return pool != NULL && pool->magic == POOL_MAGIC; }

static struct pool *default_pool(CUdevice device) {
    struct pool *pool = &defaults[device];
    if (!lives(pool)) *pool = (struct pool){POOL_MAGIC, device, true, 0, {1, 1, 1}};
    return pool;
}

static struct pool *current_pool(CUdevice device) {
    return lives(current_pools[device]) ? current_pools[device] : default_pool(device);
}

static bool device_exists(CUdevice device) { return device >= 0 && device < cd_device_count; }

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER("cuDeviceGetDefaultMemPool");
    LOCKED;
    if (out == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    *out = default_pool(device);
    return OK;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
    ENTER("cuDeviceGetMemPool");
    LOCKED;
    if (out == NULL) return INVALID_VALUE;
    if (!device_exists(device)) return INVALID_DEVICE;
    *out = current_pool(device);
    return OK;
}

API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    ENTER("cuDeviceSetMemPool");
    LOCKED;
    if (!device_exists(device)) return INVALID_DEVICE;
    if (!lives(pool) || pool->device != device) return INVALID_VALUE;
    current_pools[device] = pool;
    return OK;
}

API CUresult cuMemPoolCreate(CUmemoryPool *out, const struct properties *properties) {
    ENTER("cuMemPoolCreate");
    LOCKED;
    if (out == NULL || properties == NULL || properties->type != 1) return INVALID_VALUE;
    if (properties->location.type != 1 || properties->handle_types != 0) return NOT_SUPPORTED;
    if (!device_exists(properties->location.id)) return INVALID_DEVICE;
    *out = cd_keep(sizeof **out);
    **out = (struct pool){POOL_MAGIC, properties->location.id, false, 0, {1, 1, 1}};
    return OK;
}

/* Memory of it stays good until it is freed. */
API CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTER("cuMemPoolDestroy");
    LOCKED;
    if (!lives(pool) || pool->by_default) return INVALID_VALUE;
    pool->magic = DEAD;
    return OK;
}

/* Freed memory is given back at once, whatever the threshold. */
API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
    ENTER("cuMemPoolSetAttribute");
    LOCKED;
    if (!lives(pool) || value == NULL || attribute < 1 || attribute > THRESHOLD) return INVALID_VALUE;
    if (attribute == THRESHOLD) pool->threshold = *(uint64_t *)value;
    else pool->reuse[attribute - 1] = *(int *)value;
    return OK;
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    ENTER("cuMemPoolGetAttribute");
    LOCKED;
    if (!lives(pool) || value == NULL || attribute < 1 || attribute > THRESHOLD) return INVALID_VALUE;
    if (attribute == THRESHOLD) *(uint64_t *)value = pool->threshold;
    else *(int *)value = pool->reuse[attribute - 1];
    return OK;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    ENTER("cuMemPoolTrimTo");
    LOCKED;
    (void)keep;
    return lives(pool) ? OK : INVALID_VALUE;
}

/* Locked. Memory of graphs is not served. */
static CUresult may_use(CUstream handle, struct stream **stream) {
    CUresult result = cd_stream(handle, true, stream);
    if (result == OK) result = cd_may_submit(*stream);
    if (result == OK && (*stream)->capture != NULL) result = cd_capture_refuse(*stream, NOT_SUPPORTED);
    return result;
}

static CUresult allocate(CUdeviceptr *out, size_t size, struct pool *pool, struct stream *stream) {
    struct range *range;
    if (out == NULL || size == 0 || !lives(pool)) return INVALID_VALUE;
    CUresult result = cd_allocate(size, POOLED, pool->device, NULL, &range);
    if (result != OK) return result;
    range->pool = pool;
    range->stream = stream;
    range->ready = cd_submit(stream, cd_op(NOTHING));
    *out = range->base;
    return OK;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream handle) {
    ENTER("cuMemAllocAsync");
    LOCKED;
    struct stream *stream;
    CUresult result = may_use(handle, &stream);
    return result != OK ? result : allocate(out, size, current_pool(stream->context->device), stream);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream handle) {
    ENTER("cuMemAllocFromPoolAsync");
    LOCKED;
    struct stream *stream;
    CUresult result = may_use(handle, &stream);
    return result != OK ? result : allocate(out, size, pool, stream);
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    ENTER("cuMemFreeAsync");
    LOCKED;
    struct stream *stream;
    CUresult result = may_use(handle, &stream);
    if (result != OK) return result;
    struct range *range = cd_find(address);
    if (range == NULL || range->base != address || range->kind != POOLED || range->freed) return INVALID_VALUE;
    range->freed = true;
    struct op *op = cd_op(FREE);
    op->address = address;
    cd_submit(stream, op);
    return OK;
}

void cd_run_free(struct op *op) {
    LOCKED;
    struct range *range = cd_find(op->address);
    if (range->stream->ended < range->ready) {
        cd_die("cuMemFreeAsync of %#lx in a stream that does not wait for its allocation", op->address);
    }
    cd_release(range, "cuMemFreeAsync");
}
