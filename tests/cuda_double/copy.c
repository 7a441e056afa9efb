/* Copies, fills and the kernel: checked when they are submitted, and again, with the same outcome or the end of the
 * process, when they run. */
#include "cuda_double.h"

#include <stdlib.h>
#include <string.h>

/* What an address may be: bits. */
enum { DEVICE_OK = 1, PINNED_OK = 2, PAGEABLE_OK = 4, ANY = 7 };

/* Locked. Whether `device` may read or write [address, address+len), and in `print` which ranges that are: another
 * value at another time means that one of them was freed meanwhile. Pageable host memory has the print 0. */
static bool usable(uint64_t address, size_t len, unsigned kinds, bool write, CUdevice device, uint64_t *print) {
    *print = 0;
    if (address == 0 || address + len < address) return false;
    struct range *range = cd_find(address);
    if (range == NULL) return (kinds & PAGEABLE_OK) && !cd_in_arena(address) && !cd_in_arena(address + len - 1);
    if (!cd_is_device(range)) {
        bool whole = address + len <= range->base + range->size;
        if (range->kind == HOST_REGISTERED && !whole) return kinds & PAGEABLE_OK;
        /* Registered memory stays usable after cuMemHostUnregister, so it is not held to be there. */
        if (range->kind == HOST_ALLOCATED) *print = range->id;
        return whole && (kinds & PINNED_OK);
    }
    if (range->kind == POOLED && range->device != device) return false;
    if (!(kinds & DEVICE_OK)) return range->kind == MANAGED && address + len <= range->base + range->size;
    *print = 1469598103934665603u;
    for (uint64_t at = address;;) {
        if (range->kind == VMM && !(range->access[device] & (write ? 2 : 1))) return false;
        *print = (*print ^ range->id) * 1099511628211u;
        at = range->base + range->size;
        if (at >= address + len) return true;
        struct range *next = cd_next(range);
        if (range->kind != VMM || next == NULL || next->kind != VMM || next->base != at) return false;
        range = next;
    }
}

/* Locked. The same for new work: none for memory that a stream is going to free. */
static bool takes(uint64_t address, size_t len, unsigned kinds, bool write, CUdevice device, uint64_t *print) {
    struct range *range = cd_find(address);
    return usable(address, len, kinds, write, device, print) && (range == NULL || !range->freed);
}

/* Locked. In stream order memory is there once its allocation has ended. */
static void is_there(const char *what, const struct range *range) {
    if (range == NULL || range->kind != POOLED || range->stream->ended >= range->ready) return;
    cd_die("%s uses memory at %#lx that the stream of its allocation has not got to", what, range->base);
}

/* Locked. Where the double finds the byte at `address`, and how many follow it there. */
static uint8_t *place(uint64_t address, size_t *len, struct range **range) {
    *range = cd_find(address);
    if (*range == NULL) return (uint8_t *)address;
    size_t offset = address - (*range)->base;
    if (!cd_is_device(*range)) return (uint8_t *)address;
    if (*len > (*range)->size - offset) *len = (*range)->size - offset;
    return (*range)->bytes + offset;
}

static void hold(struct range *range, int change) {
    if (range != NULL) range->busy += change;
}

/* Without the lock, which is let go while bytes move. */
static void move(const char *what, CUdevice device, const struct copy *copy, const struct op *fill) {
    uint64_t print;
    pthread_mutex_lock(&cd_lock);
    if (!usable(copy->dst, copy->len, ANY, true, device, &print) || print != copy->dst_print) {
        cd_die("%s writes %zu bytes at %#lx, which were freed or unmapped after it was submitted", what, copy->len,
               copy->dst);
    }
    if (fill == NULL && copy->staged == NULL &&
        (!usable(copy->src, copy->len, ANY, false, device, &print) || print != copy->src_print)) {
        cd_die("%s reads %zu bytes at %#lx, which were freed or unmapped after it was submitted", what, copy->len,
               copy->src);
    }
    for (size_t done = 0; done < copy->len;) {
        struct range *from = NULL, *to;
        size_t len = copy->len - done;
        uint8_t *dst = place(copy->dst + done, &len, &to);
        uint8_t *src = fill != NULL ? NULL
                       : copy->staged != NULL ? copy->staged + done
                                              : place(copy->src + done, &len, &from);
        is_there(what, to);
        is_there(what, from);
        hold(to, 1);
        hold(from, 1);
        pthread_mutex_unlock(&cd_lock);
        if (src != NULL) memmove(dst, src, len);
        else {
            for (size_t i = 0; i < len; i++) dst[i] = fill->value[(done + i) % fill->value_size];
        }
        pthread_mutex_lock(&cd_lock);
        hold(to, -1);
        hold(from, -1);
        done += len;
        if (done < copy->len && ((cd_find(copy->dst + done) == NULL && cd_in_arena(copy->dst + done)) ||
                                 (src != NULL && copy->staged == NULL && cd_find(copy->src + done) == NULL &&
                                  cd_in_arena(copy->src + done)))) {
            cd_die("%s lost memory while it ran", what);
        }
    }
    pthread_mutex_unlock(&cd_lock);
}

/* The pieces of a batch run in no particular order. */
void cd_run_copies(struct stream *stream, struct op *op) {
    for (size_t i = op->copy_count; i > 1; i--) {
        pthread_mutex_lock(&cd_lock);
        size_t other = cd_random() % i;
        pthread_mutex_unlock(&cd_lock);
        struct copy kept = op->copies[i - 1];
        op->copies[i - 1] = op->copies[other];
        op->copies[other] = kept;
    }
    const char *what = op->work == SET ? "a fill" : op->copy_count > 1 ? "a batch of copies" : "a copy";
    for (size_t i = 0; i < op->copy_count; i++) {
        move(what, stream->context->device, &op->copies[i], op->work == SET ? op : NULL);
    }
}

static const char kernel_name[] = "kvferry_copy_pieces", fetch_name[] = "kvferry_fetch_table";

/* Without the lock. What a kernel reads at `address`, which must still be what had this print when it was launched, if it
 * had one. To be freed. */
static void *kernel_reads(CUdevice device, uint64_t address, size_t bytes, const uint64_t *print) {
    struct copy whole = {.len = bytes, .src = address};
    pthread_mutex_lock(&cd_lock);
    bool good = usable(address, bytes, DEVICE_OK | PINNED_OK, false, device, &whole.src_print);
    pthread_mutex_unlock(&cd_lock);
    if (!good || (print != NULL && *print != whole.src_print)) {
        cd_die("%s reads its table at %#lx, which is no memory of the device or was freed after the launch", kernel_name,
               address);
    }
    void *found = cd_new(bytes);
    whole.dst = (uint64_t)found;
    move(kernel_name, device, &whole, NULL);
    return found;
}

/* A kernel sees device memory and pinned host memory; anything else is what a GPU calls an illegal address. */
void cd_run_kernel(struct stream *stream, struct op *op) {
    struct stretch {
        uint64_t src, dst, src_stride, dst_stride, len;
        uint32_t first, parts, pairs, unused;
    };
    struct pair {
        uint32_t src, dst;
    };
    CUdevice device = stream->context->device;
    size_t bytes = op->stretch_count * sizeof(struct stretch);
    struct stretch *stretches = kernel_reads(device, op->stretches, bytes, &op->copies[0].src_print);
    for (uint32_t i = 0; i < op->stretch_count; i++) {
        struct stretch *s = &stretches[i];
        uint32_t end = i + 1 < op->stretch_count ? stretches[i + 1].first : op->items;
        uint32_t count = s->parts == 0 ? 0 : (end - s->first) / s->parts;
        if ((i == 0 && s->first != 0) || s->parts != (s->len + 4095) / 4096 || end < s->first || count * s->parts != end - s->first) {
            cd_die("%s: stretch %u of %u has items from %u to %u, %u a block of %lu bytes", kernel_name, i,
                   op->stretch_count, s->first, end, s->parts, s->len);
        }
        struct pair *pairs = kernel_reads(device, op->pairs + 8ul * s->pairs, count * sizeof(struct pair), NULL);
        for (uint32_t k = 0; k < count; k++) {
            struct copy copy = {.dst = s->dst + s->dst_stride * pairs[k].dst,
                                .src = s->src + s->src_stride * pairs[k].src,
                                .len = s->len};
            pthread_mutex_lock(&cd_lock);
            bool good = usable(copy.dst, copy.len, DEVICE_OK | PINNED_OK, true, device, &copy.dst_print) &&
                        usable(copy.src, copy.len, DEVICE_OK | PINNED_OK, false, device, &copy.src_print);
            pthread_mutex_unlock(&cd_lock);
            if (!good) {
                cd_die("%s: block %u of stretch %u: %zu bytes from %#lx to %#lx, an illegal address", kernel_name, k, i,
                       copy.len, copy.src, copy.dst);
            }
            move(kernel_name, device, &copy, NULL);
        }
        free(pairs);
    }
    free(stretches);
}

/* Locked. Reads the source now: what a driver does where a copy's source may be used again at once. */
static void stage(struct copy *copy) {
    copy->staged = cd_new(copy->len);
    for (size_t done = 0; done < copy->len;) {
        struct range *range;
        size_t len = copy->len - done;
        const uint8_t *src = place(copy->src + done, &len, &range);
        memcpy(copy->staged + done, src, len);
        done += len;
    }
}

enum { WAIT = 1, STAGE = 2, WAIT_IF_SYNC_MEMOPS = 4 };

static bool sync_memops(const struct context *context, uint64_t address) {
    struct range *range = cd_find(address);
    return (context->flags & SYNC_MEMOPS) || (range != NULL && range->sync_memops);
}

/* Locked. */
static CUresult copy(uint64_t dst, unsigned dst_kinds, uint64_t src, unsigned src_kinds, size_t len, CUstream handle,
                     unsigned how) {
    struct stream *stream;
    CUresult result = cd_stream(handle, true, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK || len == 0) return result;
    struct copy one = {.dst = dst, .src = src, .len = len};
    CUdevice device = stream->context->device;
    if (!takes(dst, len, dst_kinds, true, device, &one.dst_print)) return INVALID_VALUE;
    if (!takes(src, len, src_kinds, false, device, &one.src_print)) return INVALID_VALUE;
    bool pinned = cd_find(src) != NULL;
    if ((how & STAGE) && (pinned || cd_htod_waits)) how = WAIT;
    if (how & STAGE) {
        /* As documented: earlier work ends first, then the bytes are taken, and the copy itself may be late. */
        cd_wait(stream, cd_submit(stream, cd_op(NOTHING)));
        stage(&one);
    }
    bool waited = how & WAIT;
    bool sync = sync_memops(stream->context, dst) || sync_memops(stream->context, src);
    if ((how & WAIT_IF_SYNC_MEMOPS) && sync) how |= WAIT;
    struct op *op = cd_op(COPY);
    op->copies = cd_new(sizeof one);
    op->copies[0] = one;
    op->copy_count = 1;
    op->waited = waited;
    uint64_t number = cd_submit(stream, op);
    if (how & WAIT) cd_wait(stream, number);
    return OK;
}

#define COPY_FUNCTION(name, dst_type, dst_kinds, src_type, src_kinds, how) \
    API CUresult name(dst_type dst, src_type src, size_t len) { \
        ENTER(#name); \
        LOCKED; \
        return copy((uint64_t)dst, dst_kinds, (uint64_t)src, src_kinds, len, NULL, how); \
    }
#define COPY_FUNCTION_ASYNC(name, dst_type, dst_kinds, src_type, src_kinds) \
    API CUresult name(dst_type dst, src_type src, size_t len, CUstream stream) { \
        ENTER(#name); \
        LOCKED; \
        return copy((uint64_t)dst, dst_kinds, (uint64_t)src, src_kinds, len, stream, 0); \
    }
COPY_FUNCTION(cuMemcpy, CUdeviceptr, ANY, CUdeviceptr, ANY, WAIT)
COPY_FUNCTION(cuMemcpyDtoH_v2, void *, PINNED_OK | PAGEABLE_OK, CUdeviceptr, DEVICE_OK | PINNED_OK, WAIT)
COPY_FUNCTION(cuMemcpyHtoD_v2, CUdeviceptr, DEVICE_OK | PINNED_OK, const void *, PINNED_OK | PAGEABLE_OK,
              STAGE | WAIT_IF_SYNC_MEMOPS)
COPY_FUNCTION(cuMemcpyDtoD_v2, CUdeviceptr, DEVICE_OK | PINNED_OK, CUdeviceptr, DEVICE_OK | PINNED_OK,
              WAIT_IF_SYNC_MEMOPS)
COPY_FUNCTION_ASYNC(cuMemcpyAsync, CUdeviceptr, ANY, CUdeviceptr, ANY)
COPY_FUNCTION_ASYNC(cuMemcpyDtoHAsync_v2, void *, PINNED_OK | PAGEABLE_OK, CUdeviceptr, DEVICE_OK | PINNED_OK)
COPY_FUNCTION_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, DEVICE_OK | PINNED_OK, const void *, PINNED_OK | PAGEABLE_OK)
COPY_FUNCTION_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, DEVICE_OK | PINNED_OK, CUdeviceptr, DEVICE_OK | PINNED_OK)

struct location {
    int type, id;
};
struct copy_attributes {
    int order; /* 1: in stream order, 2: read during the call, 3: whenever */
    struct location src, dst;
    unsigned flags;
};

static CUresult batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,
                      const struct copy_attributes *attributes, const size_t *indices, size_t attribute_count,
                      size_t *failed, CUstream handle) {
    struct stream *stream;
    *failed = SIZE_MAX;
    if (cd_version < 12080) return NOT_SUPPORTED;
    if (cd_is_default(handle)) return INVALID_VALUE;
    CUresult result = cd_stream(handle, true, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK) return result;
    if (dsts == NULL || srcs == NULL || sizes == NULL || count == 0) return INVALID_VALUE;
    if (attributes == NULL || indices == NULL || attribute_count == 0 || attribute_count > count) return INVALID_VALUE;
    if (indices[0] != 0) return INVALID_VALUE;
    for (size_t i = 0; i < attribute_count; i++) {
        if (attributes[i].order < 1 || attributes[i].order > 3 || attributes[i].flags > 1) return INVALID_VALUE;
        if (indices[i] >= count || (i > 0 && indices[i] <= indices[i - 1])) return INVALID_VALUE;
    }
    struct op *op = cd_op(COPY);
    op->copies = cd_new(count * sizeof *op->copies);
    size_t attribute = 0;
    for (size_t i = 0; i < count; i++) {
        struct copy *one = &op->copies[i];
        if (attribute + 1 < attribute_count && indices[attribute + 1] == i) attribute++;
        *one = (struct copy){.dst = dsts[i], .src = srcs[i], .len = sizes[i]};
        CUdevice device = stream->context->device;
        if (one->len == 0 || !takes(one->dst, one->len, ANY, true, device, &one->dst_print) ||
            !takes(one->src, one->len, ANY, false, device, &one->src_print)) {
            *failed = i;
            for (size_t j = 0; j < i; j++) free(op->copies[j].staged);
            free(op->copies);
            free(op);
            return INVALID_VALUE;
        }
        /* "Whenever" is now or late by chance: a caller that needs one of them is wrong. */
        int order = attributes[attribute].order;
        if (order == 2 || (order == 3 && cd_random() % 2)) stage(one);
    }
    op->copy_count = count;
    cd_submit(stream, op);
    return OK;
}

API CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                struct copy_attributes *attributes, size_t *indices, size_t attribute_count,
                                size_t *failed, CUstream stream) {
    ENTER("cuMemcpyBatchAsync");
    LOCKED;
    size_t at;
    CUresult result = batch(dsts, srcs, sizes, count, attributes, indices, attribute_count, &at, stream);
    if (result != OK && failed != NULL) *failed = at;
    return result;
}

API CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t count,
                                   const struct copy_attributes *attributes, const size_t *indices,
                                   size_t attribute_count, CUstream stream) {
    ENTER("cuMemcpyBatchAsync_v2");
    LOCKED;
    size_t at;
    return batch(dsts, srcs, sizes, count, attributes, indices, attribute_count, &at, stream);
}

static CUresult fill(CUdeviceptr dst, unsigned value, unsigned value_size, size_t count, CUstream handle) {
    struct stream *stream;
    CUresult result = cd_stream(handle, true, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK || count == 0) return result;
    struct copy one = {.dst = dst, .len = count * value_size};
    if (count > SIZE_MAX / 4 || dst % value_size != 0) return INVALID_VALUE;
    CUdevice device = stream->context->device;
    if (!takes(dst, one.len, DEVICE_OK | PINNED_OK, true, device, &one.dst_print)) return INVALID_VALUE;
    struct op *op = cd_op(SET);
    op->copies = cd_new(sizeof one);
    op->copies[0] = one;
    op->copy_count = 1;
    memcpy(op->value, &value, sizeof value);
    op->value_size = value_size;
    cd_submit(stream, op);
    return OK;
}

#define FILL_FUNCTIONS(bits, type) \
    API CUresult cuMemsetD##bits##_v2(CUdeviceptr dst, type value, size_t count) { \
        ENTER("cuMemsetD" #bits "_v2"); \
        LOCKED; \
        return fill(dst, value, sizeof value, count, NULL); \
    } \
    API CUresult cuMemsetD##bits##Async(CUdeviceptr dst, type value, size_t count, CUstream stream) { \
        ENTER("cuMemsetD" #bits "Async"); \
        LOCKED; \
        return fill(dst, value, sizeof value, count, stream); \
    }
FILL_FUNCTIONS(8, unsigned char)
FILL_FUNCTIONS(16, unsigned short)
FILL_FUNCTIONS(32, unsigned)

/* Modules: any image will do, and holds the one kernel that exists. */
struct module {
    int magic;
    struct context *context;
};
struct function {
    int magic;
    struct module *module;
    bool fetches;
};

API CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    ENTER("cuModuleLoadData");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || image == NULL) return INVALID_VALUE;
    *out = cd_keep(sizeof **out);
    **out = (struct module){MODULE_MAGIC, current};
    return OK;
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, int *options, void **values) {
    (void)options, (void)values, (void)count;
    return cuModuleLoadData(out, image);
}

static bool module_lives(const struct module *module) {
    return module != NULL && module->magic == MODULE_MAGIC && cd_context_lives(module->context);
}

API CUresult cuModuleUnload(CUmodule module) {
    ENTER("cuModuleUnload");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    if (!module_lives(module)) return INVALID_HANDLE;
    module->magic = DEAD;
    return OK;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    ENTER("cuModuleGetFunction");
    LOCKED;
    if (out == NULL || name == NULL) return INVALID_VALUE;
    if (!module_lives(module)) return INVALID_HANDLE;
    if (strcmp(name, kernel_name) != 0 && strcmp(name, fetch_name) != 0) return NOT_FOUND;
    *out = cd_keep(sizeof **out);
    **out = (struct function){FUNCTION_MAGIC, module, strcmp(name, fetch_name) == 0};
    return OK;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream handle, void **arguments,
                            void **extra) {
    ENTER("cuLaunchKernel");
    LOCKED;
    struct stream *stream;
    CUresult result = cd_stream(handle, true, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK) return result;
    if (function == NULL || function->magic != FUNCTION_MAGIC || !module_lives(function->module)) return INVALID_HANDLE;
    if (function->module->context != stream->context) return INVALID_HANDLE;
    if (arguments == NULL || extra != NULL || shared > 49152) return INVALID_VALUE;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_y > 65535 || grid_z > 65535) return INVALID_VALUE;
    if (block_x == 0 || block_y == 0 || block_z == 0) return INVALID_VALUE;
    if ((uint64_t)block_x * block_y > 1024 || (uint64_t)block_x * block_y * block_z > 1024) return INVALID_VALUE;
    if (function->fetches) {
        uint64_t from, to;
        uint32_t words;
        memcpy(&from, arguments[0], sizeof from);
        memcpy(&to, arguments[1], sizeof to);
        memcpy(&words, arguments[2], sizeof words);
        if ((uint64_t)grid_x * block_x < words) return INVALID_VALUE;
        return copy(to, DEVICE_OK, from, DEVICE_OK | PINNED_OK, words * (size_t)8, handle, 0);
    }
    struct op *op = cd_op(KERNEL);
    memcpy(&op->pairs, arguments[0], sizeof op->pairs);
    memcpy(&op->stretches, arguments[1], sizeof op->stretches);
    memcpy(&op->stretch_count, arguments[2], sizeof op->stretch_count);
    memcpy(&op->items, arguments[3], sizeof op->items);
    op->copies = cd_new(sizeof *op->copies);
    size_t bytes = op->stretch_count * (size_t)56;
    if (bytes > 0 && !takes(op->stretches, bytes, DEVICE_OK | PINNED_OK, false, stream->context->device,
                            &op->copies[0].src_print)) {
        free(op->copies);
        free(op);
        return INVALID_VALUE;
    }
    if (bytes == 0) op->work = NOTHING;
    cd_submit(stream, op);
    return OK;
}
