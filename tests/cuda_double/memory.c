/* Which addresses have memory behind them, and ordinary allocations.
 *
 * All device addresses come from one arena that no process may touch: a page there that holds memory is told from one
 * that does not by the ranges alone, and an address in the arena without a range is never taken for host memory. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ARENA_SIZE ((size_t)512 << 30)
/* The same in every process where it is free: as with a GPU, one process's address often means something in another. */
#define ARENA_BASE ((void *)0x302000000000)

static uint64_t arena;

/* Taken parts of the arena, by address. */
struct span {
    uint64_t base;
    size_t size;
    bool reservation;
};
static struct span *spans;
static size_t span_count, span_room;

static struct range **ranges; /* by address */
static size_t range_count, range_room;

static size_t used[MAX_DEVICES]; /* by this process */

static void arena_make(void) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *at = mmap(ARENA_BASE, ARENA_SIZE, PROT_NONE, flags, -1, 0);
    if (at != MAP_FAILED && at != ARENA_BASE) {
        munmap(at, ARENA_SIZE);
        at = MAP_FAILED;
    }
    if (at == MAP_FAILED) {
        at = mmap(NULL, ARENA_SIZE + GRANULARITY, PROT_NONE, flags, -1, 0);
    }
    if (at == MAP_FAILED) cd_die("no address space for device memory");
    arena = ((uint64_t)at + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
}

bool cd_in_arena(uint64_t address) { return arena != 0 && address - arena < ARENA_SIZE; }

static void *grow(void *array, size_t count, size_t *room, size_t each) {
    if (count < *room) return array;
    *room = *room == 0 ? 64 : *room * 2;
    array = realloc(array, *room * each);
    if (array == NULL) cd_die("no memory");
    return array;
}

/* The first gap that is large enough, or `wish` where that is free; 0 where there is none. */
uint64_t cd_arena_take(size_t size, size_t align, uint64_t wish) {
    if (arena == 0) arena_make();
    uint64_t at = arena;
    size_t index = 0, chosen = 0;
    bool found = false;
    for (int pass = wish == 0; pass < 2 && !found; pass++) {
        at = arena;
        for (index = 0; index <= span_count; index++) {
            uint64_t from = (at + align - 1) / align * align;
            uint64_t until = index < span_count ? spans[index].base : arena + ARENA_SIZE;
            if (pass == 0 && wish >= from && wish % align == 0) from = wish;
            if (from <= until && until - from >= size && (pass == 1 || from == wish)) {
                at = from;
                chosen = index;
                found = true;
                break;
            }
            if (index < span_count) at = spans[index].base + spans[index].size;
        }
    }
    if (!found) return 0;
    spans = grow(spans, span_count, &span_room, sizeof *spans);
    memmove(spans + chosen + 1, spans + chosen, (span_count - chosen) * sizeof *spans);
    spans[chosen] = (struct span){at, size, false};
    span_count++;
    return at;
}

static size_t span_of(uint64_t address) {
    for (size_t i = 0; i < span_count; i++) {
        if (address - spans[i].base < spans[i].size) return i;
    }
    return SIZE_MAX;
}

void cd_arena_give(uint64_t base) {
    size_t i = span_of(base);
    if (i == SIZE_MAX) return;
    span_count--;
    memmove(spans + i, spans + i + 1, (span_count - i) * sizeof *spans);
}

/* A span becomes a reservation by cuMemAddressReserve alone, which passes `whole` null to say so. */
bool cd_arena_reserved(uint64_t base, size_t size, size_t *whole) {
    size_t i = span_of(base);
    if (i == SIZE_MAX) return false;
    if (whole == NULL) spans[i].reservation = true;
    else *whole = spans[i].base == base ? spans[i].size : 0;
    return spans[i].reservation && size <= spans[i].size - (base - spans[i].base);
}

/* The reservation, or other span of addresses, that holds an address. */
void cd_arena_span(uint64_t address, uint64_t *base, uint64_t *size) {
    size_t i = span_of(address);
    if (i == SIZE_MAX) return;
    *base = spans[i].base;
    *size = spans[i].size;
}

/* Index of the first range that ends after `address`. */
static size_t lower(uint64_t address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->base + ranges[middle]->size > address) high = middle;
        else low = middle + 1;
    }
    return low;
}

struct range *cd_find(uint64_t address) {
    size_t i = lower(address);
    return i < range_count && ranges[i]->base <= address ? ranges[i] : NULL;
}

struct range *cd_next(const struct range *range) {
    size_t i = lower(range->base + range->size);
    return i < range_count ? ranges[i] : NULL;
}

bool cd_is_device(const struct range *range) { return range->kind <= MANAGED; }

struct range *cd_add(enum kind kind, uint64_t base, size_t size, struct block *block, size_t offset,
                     struct context *context) {
    struct range *range = cd_new(sizeof *range);
    *range = (struct range){.base = base, .size = size, .kind = kind, .block = block, .context = context};
    range->block_offset = offset;
    range->id = cd_number();
    range->device = block != NULL ? block->device : context != NULL ? context->device : 0;
    range->bytes = block != NULL ? block->alias + offset : (uint8_t *)base;
    range->opens = 1;
    if (block != NULL) block->mappings++;
    size_t i = lower(base);
    ranges = grow(ranges, range_count, &range_room, sizeof *ranges);
    memmove(ranges + i + 1, ranges + i, (range_count - i) * sizeof *ranges);
    ranges[i] = range;
    range_count++;
    return range;
}

void cd_remove(struct range *range, const char *how) {
    if (range->busy > 0) cd_die("%s of %#lx while a copy uses it", how, range->base);
    size_t i = lower(range->base);
    range_count--;
    memmove(ranges + i, ranges + i + 1, (range_count - i) * sizeof *ranges);
    if (range->block != NULL) {
        range->block->mappings--;
        cd_block_settle(range->block);
    }
    free(range);
}

static struct block *block_of(int fd, size_t size, CUdevice device, unsigned handle_types, uint64_t token) {
    void *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) {
        close(fd);
        return NULL;
    }
    madvise(alias, size, MADV_DONTFORK);
    struct block *block = cd_keep(sizeof *block);
    *block = (struct block){BLOCK_MAGIC, fd, size, alias, device, handle_types, token, 0, 0};
    return block;
}

/* The memfd's name carries what an importing process must know, and the token. */
struct block *cd_block_new(size_t size, CUdevice device, unsigned handle_types) {
    char name[128];
    if (used[device] + size > DEVICE_MEMORY) return NULL;
    uint64_t token = cd_random();
    snprintf(name, sizeof name, "cuda-double-%016lx-%d-%u-%s", token, cd_physical[device], handle_types,
             cd_machine);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) return NULL;
    if (ftruncate(fd, (off_t)size) != 0) {
        close(fd);
        return NULL;
    }
    struct block *block = block_of(fd, size, device, handle_types, token);
    if (block != NULL) used[device] += size;
    return block;
}

/* An imported block counts to no device's memory; `device` is -1 where this process does not see the device. */
struct block *cd_block_adopt(int fd) {
    char link[64], target[160] = {0};
    uint64_t token;
    int physical;
    unsigned handle_types;
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, target, sizeof target - 1) <= 0 || fstat(fd, &status) != 0 ||
        sscanf(target, "/memfd:cuda-double-%16lx-%d-%u", &token, &physical, &handle_types) != 3) {
        close(fd);
        return NULL;
    }
    CUdevice device = -1;
    for (int i = 0; i < cd_device_count; i++) {
        if (cd_physical[i] == physical) device = i;
    }
    return block_of(fd, (size_t)status.st_size, device, handle_types | 1u << 31, token);
}

void cd_block_settle(struct block *block) {
    if (block->handles > 0 || block->mappings > 0 || block->magic != BLOCK_MAGIC) return;
    block->magic = DEAD;
    if (!(block->handle_types >> 31)) used[block->device] -= block->size;
    munmap(block->alias, block->size);
    close(block->fd);
}

static size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

void cd_release(struct range *range, const char *how) {
    uint64_t base = range->base;
    size_t size = range->size;
    enum kind kind = range->kind;
    cd_remove(range, how);
    if (kind == MANAGED) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap((void *)base, round_up(size, 4096), PROT_NONE, flags, -1, 0);
    }
    if (kind == HOST_ALLOCATED) munmap((void *)base, size);
    else if (kind != HOST_REGISTERED) cd_arena_give(base);
}

void cd_free_of_context(struct context *context) {
    for (size_t i = range_count; i-- > 0;) {
        if (ranges[i]->context == context) cd_release(ranges[i], "end of the context");
    }
}

/* The range has the length that was asked for; the rest of its last page and a page behind it belong to nobody, so that
 * no copy runs from one allocation into the next. A small one does not begin where its block does, as a driver's that
 * comes out of a larger block: callers may not count on a page's alignment, nor on an offset of 0 over IPC. */
CUresult cd_allocate(size_t size, enum kind kind, CUdevice device, struct context *context, struct range **out) {
    if (size > DEVICE_MEMORY) return OUT_OF_MEMORY;
    size_t offset = kind != MANAGED && size < GRANULARITY / 2 ? 512 : 0;
    size_t whole = round_up(offset + size, 4096);
    struct block *block = cd_block_new(whole, device, 0);
    if (block == NULL) return OUT_OF_MEMORY;
    uint64_t base = cd_arena_take(whole + 4096, whole < GRANULARITY ? 4096 : GRANULARITY, 0);
    if (base == 0) {
        cd_block_settle(block);
        return OUT_OF_MEMORY;
    }
    if (kind == MANAGED) {
        void *at = mmap((void *)base, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, block->fd, 0);
        if (at == MAP_FAILED) cd_die("managed memory could not be mapped");
    }
    *out = cd_add(kind, base + offset, size, block, offset, context);
    return OK;
}

static CUresult allocate(CUdeviceptr *out, size_t size, enum kind kind) {
    struct context *current;
    struct range *range;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || size == 0) return INVALID_VALUE;
    result = cd_allocate(size, kind, current->device, current, &range);
    if (result == OK) *out = range->base;
    return result;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) {
    ENTER("cuMemAlloc_v2");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    return allocate(out, size, DEVICE);
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned flags) {
    ENTER("cuMemAllocManaged");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    if (flags != 1 && flags != 2) return INVALID_VALUE;
    return allocate(out, size, MANAGED);
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER("cuMemFree_v2");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (address == 0) return OK;
    struct range *range = cd_find(address);
    if (range == NULL || range->base != address) return INVALID_VALUE;
    if (range->kind != DEVICE && range->kind != MANAGED && range->kind != POOLED) return INVALID_VALUE;
    if (range->freed) return INVALID_VALUE;
    cd_release(range, "cuMemFree");
    return OK;
}

/* What all processes use of a device: memory lives for as long as any of them has its memfd, so descriptors tell. */
static size_t used_by_all(CUdevice device) {
    uint64_t *seen = NULL;
    size_t seen_count = 0, seen_room = 0, sum = 0;
    glob_t found;
    if (glob("/proc/[0-9]*/fd/*", GLOB_NOSORT, NULL, &found) != 0) return used[device];
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char target[160] = {0}, machine[33] = {0};
        uint64_t token;
        int physical;
        struct stat status;
        if (readlink(found.gl_pathv[i], target, sizeof target - 1) <= 0) continue;
        if (sscanf(target, "/memfd:cuda-double-%16lx-%d-%*u-%32[A-Za-z0-9_]", &token, &physical, machine) < 2) continue;
        if (physical != cd_physical[device] || strcmp(machine, cd_machine) != 0) continue;
        bool again = false;
        for (size_t j = 0; j < seen_count; j++) again = again || seen[j] == token;
        if (again || stat(found.gl_pathv[i], &status) != 0) continue;
        seen = grow(seen, seen_count, &seen_room, sizeof *seen);
        seen[seen_count++] = token;
        sum += (size_t)status.st_size;
    }
    globfree(&found);
    free(seen);
    return sum > DEVICE_MEMORY ? DEVICE_MEMORY : sum;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER("cuMemGetInfo_v2");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (free_bytes != NULL) *free_bytes = DEVICE_MEMORY - used_by_all(current->device);
    if (total != NULL) *total = DEVICE_MEMORY;
    return OK;
}

static CUresult host_allocate(void **out, size_t size) {
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || size == 0 || size > SIZE_MAX / 2) return INVALID_VALUE;
    /* Its own mapping, so that a touch after cuMemFreeHost faults. */
    void *at = mmap(NULL, round_up(size, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    cd_add(HOST_ALLOCATED, (uint64_t)at, size, NULL, 0, current);
    *out = at;
    return OK;
}

API CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER("cuMemHostAlloc");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    if (flags > 7) return INVALID_VALUE;
    return host_allocate(out, size);
}

API CUresult cuMemAllocHost_v2(void **out, size_t size) {
    ENTER("cuMemAllocHost_v2");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    return host_allocate(out, size);
}

API CUresult cuMemFreeHost(void *address) {
    ENTER("cuMemFreeHost");
    LOCKED;
    UNSAFE;
    cd_call_waits();
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    struct range *range = cd_find((uint64_t)address);
    if (range == NULL || range->base != (uint64_t)address || range->kind != HOST_ALLOCATED) return INVALID_VALUE;
    cd_release(range, "cuMemFreeHost");
    return OK;
}

API CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    ENTER("cuMemHostRegister_v2");
    LOCKED;
    UNSAFE;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    uint64_t base = (uint64_t)address;
    if (address == NULL || size == 0 || base + size < base || flags > 15 || cd_in_arena(base)) return INVALID_VALUE;
    size_t i = lower(base);
    if (i < range_count && ranges[i]->base < base + size) return HOST_MEMORY_ALREADY_REGISTERED;
    cd_add(HOST_REGISTERED, base, size, NULL, 0, current);
    return OK;
}

API CUresult cuMemHostUnregister(void *address) {
    ENTER("cuMemHostUnregister");
    LOCKED;
    UNSAFE;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    struct range *range = cd_find((uint64_t)address);
    if (range == NULL || range->base != (uint64_t)address || range->kind != HOST_REGISTERED) {
        return HOST_MEMORY_NOT_REGISTERED;
    }
    cd_release(range, "cuMemHostUnregister");
    return OK;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags) {
    ENTER("cuMemHostGetDevicePointer_v2");
    LOCKED;
    struct range *range = cd_find((uint64_t)address);
    if (out == NULL || flags != 0 || range == NULL || cd_is_device(range)) return INVALID_VALUE;
    *out = (uint64_t)address;
    return OK;
}

API CUresult cuMemHostGetFlags(unsigned *flags, void *address) {
    ENTER("cuMemHostGetFlags");
    LOCKED;
    struct range *range = cd_find((uint64_t)address);
    if (flags == NULL || range == NULL || range->kind != HOST_ALLOCATED) return INVALID_VALUE;
    *flags = 0;
    return OK;
}
