/* Shared by the sources of the CUDA driver double.
 *
 * One lock (cd_lock) guards all state; cd_changed is broadcast when an operation is submitted or ends. Functions whose
 * comment says "locked" are called with the lock held. Handles (contexts, streams, events, blocks) are never freed, so
 * that a handle used after its end is always recognized. */
#ifndef CUDA_DOUBLE_H
#define CUDA_DOUBLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct graph *CUgraph;
typedef struct pool *CUmemoryPool;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef uint64_t CUhandle; /* of a physical allocation: the address of its struct block */

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_MAPPABLE = 205,
    PEER_ACCESS_UNSUPPORTED = 217,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    PRIMARY_CONTEXT_ACTIVE = 708,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum { MAX_DEVICES = 16, GRANULARITY = 2 << 20, NON_BLOCKING = 1, SYNC_MEMOPS = 0x80 };
enum { HANDLE_POSIX_FD = 1, HANDLE_FABRIC = 8, SHAREABLE = HANDLE_POSIX_FD | HANDLE_FABRIC };
#define DEVICE_MEMORY ((size_t)16 << 30) /* bytes of each device */

/* Magic numbers: a handle of another kind, or one that has ended, is told by them. */
enum { CONTEXT_MAGIC = 0x43747831, STREAM_MAGIC = 0x53747231, EVENT_MAGIC = 0x45767431, BLOCK_MAGIC = 0x426c6b31,
       MODULE_MAGIC = 0x4d6f6431, FUNCTION_MAGIC = 0x46756e31, GRAPH_MAGIC = 0x47726131, POOL_MAGIC = 0x506f6f31,
       DEAD = 0x44656164 };

/* A context; a primary one gets a new struct each time its device's count rises from zero. */
struct context {
    int magic;
    CUdevice device;
    unsigned flags;
    bool primary;
    int retained; /* of a primary context */
    uint64_t id;
    struct stream *streams; /* live and draining ones */
    struct stream *legacy;
};

/* Physical memory: a memfd, which `alias` maps for the double alone. */
struct block {
    int magic;
    int fd;
    size_t size;
    uint8_t *alias;
    CUdevice device;
    unsigned handle_types;
    uint64_t token; /* part of the memfd's name; tells a reused descriptor from the right one */
    int handles;    /* references by handle (VMM) */
    int mappings;   /* references by address */
};

enum kind { DEVICE, VMM, IPC, POOLED, MANAGED, HOST_ALLOCATED, HOST_REGISTERED };

/* Addresses with memory behind them. */
struct range {
    uint64_t base;
    size_t size;
    enum kind kind;
    uint64_t id; /* never used twice in a process */
    uint8_t *bytes; /* where the double reads and writes */
    struct block *block;
    size_t block_offset;
    struct context *context; /* none for VMM and pools */
    CUdevice device;
    uint8_t access[MAX_DEVICES]; /* of VMM: 0, 1 (read) or 3 (read and write) */
    int busy;  /* copies that use it at this moment */
    int opens; /* of an IPC handle */
    unsigned sync_memops;
    /* Of a pool's memory. It is there once `ready` of `stream` has ended; `freed`: a stream is going to free it. */
    struct pool *pool;
    struct stream *stream;
    uint64_t ready;
    bool freed;
};

struct after {
    struct stream *stream;
    uint64_t number;
};

struct copy {
    uint64_t dst, src;
    size_t len;
    uint64_t dst_print, src_print; /* which ranges the addresses belonged to when the copy was submitted */
    uint8_t *staged;               /* the source's bytes, where they were taken at submission */
};

enum work { NOTHING, COPY, SET, CALL, KERNEL, FREE };

struct op {
    struct op *next;
    enum work work;
    uint64_t number;     /* in its stream, from 1 */
    uint64_t not_before; /* CLOCK_MONOTONIC, ns */
    bool waited;         /* its caller waits for it, so it need not be late */
    struct after *after; /* all must have ended */
    size_t after_count;
    struct copy *copies;
    size_t copy_count;
    unsigned char value[4]; /* SET: a pattern of this size */
    unsigned value_size;
    void (*call)(void *);
    void (*callback)(CUstream, CUresult, void *);
    void *user;
    uint64_t pairs, stretches; /* KERNEL */
    uint32_t stretch_count, items;
    uint64_t address; /* FREE */
};

struct stream {
    int magic;
    struct context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    pthread_t owner; /* of a per-thread default stream */
    bool per_thread;
    bool started; /* its executor thread runs */
    struct capture *capture;
    uint64_t submitted, ended;
    struct op *head, *tail;
    struct stream *next;
};

struct event {
    int magic;
    struct context *context;
    unsigned flags;
    struct stream *stream; /* none: never recorded */
    uint64_t number;
    uint64_t capture; /* which it was recorded in; 0: none */
};

extern pthread_mutex_t cd_lock;
extern pthread_cond_t cd_changed;
extern int cd_device_count;          /* visible devices */
extern int cd_physical[MAX_DEVICES]; /* their numbers in the machine */
extern int cd_version;
extern uint64_t cd_delay_ns;
extern bool cd_peer;
extern bool cd_htod_waits;
extern bool cd_calls_wait;
extern bool cd_fabric;
extern bool cd_mig;
extern int cd_rdma_order;
extern char cd_machine[33];
extern __thread bool cd_in_callback;

/* state.c */
CUresult cd_enter(const char *name);    /* initialized? not forked? no failure to inject? */
CUresult cd_enter_any(const char *name); /* the same for calls that need no cuInit */
#define ENTER(name) do { CUresult entered_ = cd_enter(name); if (entered_ != OK) return entered_; } while (0)
__attribute__((noreturn, format(printf, 1, 2))) void cd_die(const char *format, ...);
void *cd_new(size_t size);  /* zeroed; dies when there is no memory */
void *cd_keep(size_t size); /* the same for what is never freed; locked */
uint64_t cd_number(void);  /* 1, 2, ...; locked */
uint64_t cd_random(void);  /* locked */
uint64_t cd_now_ns(void);
void cd_uuid(int number, bool instance, unsigned char out[16]); /* of a card, or of an instance of one */
int cd_card(int physical); /* the card that a device, or instance, is of */
/* The rest of a function runs with the lock held; `return` gives it back. */
#define LOCKED int locked_ __attribute__((cleanup(cd_unlock))) = pthread_mutex_lock(&cd_lock); (void)locked_
void cd_unlock(int *unused);

/* context.c */
CUresult cd_current(struct context **out); /* locked */
bool cd_context_lives(const struct context *context);

/* memory.c (all locked) */
bool cd_in_arena(uint64_t address);
uint64_t cd_arena_take(size_t size, size_t align, uint64_t wish);
void cd_arena_give(uint64_t base);
void cd_arena_span(uint64_t address, uint64_t *base, uint64_t *size);
bool cd_arena_reserved(uint64_t base, size_t size, size_t *whole); /* one VMM reservation holds it */
struct range *cd_find(uint64_t address);
struct range *cd_next(const struct range *range); /* by address */
struct range *cd_add(enum kind kind, uint64_t base, size_t size, struct block *block, size_t offset,
                     struct context *context);
void cd_remove(struct range *range, const char *how);
struct block *cd_block_new(size_t size, CUdevice device, unsigned handle_types);
struct block *cd_block_adopt(int fd); /* takes a descriptor of another block's memfd; null when it is none */
void cd_block_settle(struct block *block); /* frees it when nothing refers to it */
void cd_free_of_context(struct context *context);
void cd_release(struct range *range, const char *how); /* takes its memory back, by whatever means it was made */
CUresult cd_allocate(size_t size, enum kind kind, CUdevice device, struct context *context, struct range **out);
bool cd_is_device(const struct range *range);

/* stream.c */
CUresult cd_stream(CUstream handle, bool current_needed, struct stream **out); /* locked */
struct stream *cd_stream_new(struct context *context, unsigned flags, int priority); /* locked */
bool cd_is_default(CUstream handle);
struct op *cd_op(enum work work);
/* Locked. The op belongs to the stream from here on. 0, which has ended, where the stream is captured. */
uint64_t cd_submit(struct stream *stream, struct op *op);
void cd_wait(struct stream *stream, uint64_t number);     /* locked; lets go of the lock meanwhile */
void cd_wait_context(struct context *context);            /* locked, likewise */
void cd_call_waits(void); /* locked, likewise: for calls that a driver may let wait for the device */

/* capture.c (all locked) */
/* What to say to a call that a capture may forbid, OK where none does. The captures that do become invalid. */
CUresult cd_capture_forbids(void); /* to one that is potentially unsafe */
#define UNSAFE do { CUresult unsafe_ = cd_capture_forbids(); if (unsafe_ != OK) return unsafe_; } while (0)
CUresult cd_capture_forbids_context(const struct context *context); /* to one that waits for a whole context */
CUresult cd_may_submit(struct stream *stream);
CUresult cd_may_look(struct stream *stream); /* whether its work is done */
CUresult cd_capture_refuse(struct stream *stream, CUresult why); /* returns `why`; a capture of the stream is invalid */
void cd_capture_record(struct stream *stream);
uint64_t cd_capture_id(const struct stream *stream); /* 0: not captured */
CUresult cd_event_captured(uint64_t id); /* to one that looks at an event of this capture */
void cd_capture_drop(struct stream *stream); /* ends a capture of the stream */

/* ipc.c */
/* What the handles that go between processes say: a memfd by process and descriptor, and its token. */
struct shared_handle {
    uint64_t magic, token, offset, size;
    int32_t pid, fd;
    char reserved[24];
};
_Static_assert(sizeof(struct shared_handle) == 64, "the size that CUDA gives it");
CUresult cd_block_open(const struct shared_handle *handle, struct block **out); /* locked */

/* pool.c */
void cd_run_free(struct op *op); /* without the lock */

/* copy.c */
/* Runs an op without the lock held. */
void cd_run_copies(struct stream *stream, struct op *op);
void cd_run_kernel(struct stream *stream, struct op *op);

#endif
