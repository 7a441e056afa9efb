/* Streams, events and the threads that run what was submitted.
 *
 * An operation has a number in its stream and a list of (stream, number) that must have ended before it may begin: the
 * rules of the legacy default stream and cuStreamWaitEvent are such lists. They name only what was submitted earlier,
 * so no cycle can form. A stream's thread starts with its first operation and ends when the stream has ended and is
 * empty. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LEGACY ((CUstream)1)
#define PER_THREAD ((CUstream)2)

bool cd_is_default(CUstream handle) { return handle == NULL || handle == LEGACY || handle == PER_THREAD; }

struct stream *cd_stream_new(struct context *context, unsigned flags, int priority) {
    struct stream *stream = cd_keep(sizeof *stream);
    stream->magic = STREAM_MAGIC;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = cd_number();
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

CUresult cd_stream(CUstream handle, bool current_needed, struct stream **out) {
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK && (current_needed || cd_is_default(handle))) return result;
    if (handle == NULL || handle == LEGACY) {
        *out = current->legacy;
        return OK;
    }
    if (handle == PER_THREAD) {
        pthread_t self = pthread_self();
        for (struct stream *stream = current->streams; stream != NULL; stream = stream->next) {
            if (stream->per_thread && pthread_equal(stream->owner, self)) {
                *out = stream;
                return OK;
            }
        }
        *out = cd_stream_new(current, 0, 0);
        (*out)->per_thread = true;
        (*out)->owner = self;
        return OK;
    }
    if (handle->magic != STREAM_MAGIC || !cd_context_lives(handle->context)) return INVALID_HANDLE;
    *out = handle;
    return OK;
}

struct op *cd_op(enum work work) {
    struct op *op = cd_new(sizeof *op);
    op->work = work;
    return op;
}

static void after(struct op *op, struct stream *stream, uint64_t number) {
    if (stream->ended >= number) return;
    op->after = realloc(op->after, (op->after_count + 1) * sizeof *op->after);
    if (op->after == NULL) cd_die("no memory");
    op->after[op->after_count++] = (struct after){stream, number};
}

static bool may_begin(const struct op *op) {
    for (size_t i = 0; i < op->after_count; i++) {
        if (op->after[i].stream->ended < op->after[i].number) return false;
    }
    return true;
}

static void run(struct stream *stream, struct op *op) {
    switch (op->work) {
    case NOTHING: break;
    case COPY:
    case SET: cd_run_copies(stream, op); break;
    case KERNEL: cd_run_kernel(stream, op); break;
    case FREE: cd_run_free(op); break;
    case CALL:
        cd_in_callback = true;
        if (op->call != NULL) op->call(op->user);
        else op->callback(stream == stream->context->legacy ? NULL : stream, OK, op->user);
        cd_in_callback = false;
        break;
    }
}

static void op_free(struct op *op) {
    for (size_t i = 0; i < op->copy_count; i++) free(op->copies[i].staged);
    free(op->copies);
    free(op->after);
    free(op);
}

static void *executor(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&cd_lock);
    for (;;) {
        struct op *op = stream->head;
        if (op == NULL) {
            if (stream->magic != STREAM_MAGIC) break;
            pthread_cond_wait(&cd_changed, &cd_lock);
            continue;
        }
        if (!may_begin(op)) {
            pthread_cond_wait(&cd_changed, &cd_lock);
            continue;
        }
        if (cd_now_ns() < op->not_before) {
            struct timespec until = {(time_t)(op->not_before / 1000000000u), (long)(op->not_before % 1000000000u)};
            pthread_cond_timedwait(&cd_changed, &cd_lock, &until);
            continue;
        }
        pthread_mutex_unlock(&cd_lock);
        run(stream, op);
        pthread_mutex_lock(&cd_lock);
        stream->head = op->next;
        if (stream->head == NULL) stream->tail = NULL;
        stream->ended = op->number;
        op_free(op);
        pthread_cond_broadcast(&cd_changed);
    }
    stream->started = false;
    pthread_mutex_unlock(&cd_lock);
    return NULL;
}

static void start(struct stream *stream) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &attributes, executor, stream) != 0) cd_die("no thread for a stream");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    stream->started = true;
}

static bool blocking(const struct stream *stream) { return !(stream->flags & NON_BLOCKING); }

uint64_t cd_submit(struct stream *stream, struct op *op) {
    struct context *context = stream->context;
    if (stream->capture != NULL) {
        cd_capture_record(stream);
        op_free(op);
        return 0;
    }
    if (stream == context->legacy) {
        for (struct stream *other = context->streams; other != NULL; other = other->next) {
            if (other != stream && blocking(other)) after(op, other, other->submitted);
        }
    } else if (blocking(stream)) {
        after(op, context->legacy, context->legacy->submitted);
    }
    /* What is waited for begins at once: if all were equally late, a test that looks at memory by such a copy would never be
     * there before copies on other streams that it does not wait for. */
    bool late = !op->waited && (op->work == COPY || op->work == SET || op->work == KERNEL);
    op->not_before = cd_now_ns() + (late ? cd_delay_ns : 0);
    op->number = ++stream->submitted;
    if (stream->tail != NULL) stream->tail->next = op;
    else stream->head = op;
    stream->tail = op;
    if (!stream->started) start(stream);
    pthread_cond_broadcast(&cd_changed);
    return op->number;
}

void cd_wait(struct stream *stream, uint64_t number) {
    while (stream->ended < number) pthread_cond_wait(&cd_changed, &cd_lock);
}

void cd_wait_context(struct context *context) {
    for (struct stream *stream = context->streams; stream != NULL; stream = stream->next) {
        cd_wait(stream, stream->submitted);
    }
}

void cd_call_waits(void) {
    struct context *current;
    if (cd_calls_wait && cd_current(&current) == OK) cd_wait_context(current);
}

/* What stands for "all of this stream's work": in the legacy stream that includes the work it would wait for. */
static bool idle(const struct stream *stream) {
    if (stream->ended < stream->submitted) return false;
    if (stream != stream->context->legacy) return true;
    for (struct stream *other = stream->context->streams; other != NULL; other = other->next) {
        if (blocking(other) && other->ended < other->submitted) return false;
    }
    return true;
}

static CUresult create(CUstream *out, unsigned flags, int priority) {
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || flags > NON_BLOCKING) return INVALID_VALUE;
    *out = cd_stream_new(current, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
    return OK;
}

API CUresult cuStreamCreate(CUstream *out, unsigned flags) {
    ENTER("cuStreamCreate");
    LOCKED;
    return create(out, flags, 0);
}

API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority");
    LOCKED;
    return create(out, flags, priority);
}

/* Work that was submitted still runs. */
API CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER("cuStreamDestroy_v2");
    LOCKED;
    struct stream *stream;
    if (cd_is_default(handle)) return INVALID_HANDLE;
    CUresult result = cd_stream(handle, false, &stream);
    if (result != OK) return result;
    cd_capture_drop(stream);
    stream->magic = DEAD;
    pthread_cond_broadcast(&cd_changed);
    return OK;
}

API CUresult cuStreamSynchronize(CUstream handle) {
    ENTER("cuStreamSynchronize");
    LOCKED;
    struct stream *stream;
    CUresult result = cd_stream(handle, false, &stream);
    if (result == OK) result = cd_may_look(stream);
    if (result != OK) return result;
    cd_wait(stream, stream == stream->context->legacy ? cd_submit(stream, cd_op(NOTHING)) : stream->submitted);
    return OK;
}

API CUresult cuStreamQuery(CUstream handle) {
    ENTER("cuStreamQuery");
    LOCKED;
    struct stream *stream;
    CUresult result = cd_stream(handle, false, &stream);
    if (result == OK) result = cd_may_look(stream);
    if (result != OK) return result;
    return idle(stream) ? OK : NOT_READY;
}

#define GETTER(name, type, expression) \
    API CUresult name(CUstream handle, type *out) { \
        ENTER(#name); \
        LOCKED; \
        struct stream *stream; \
        if (out == NULL) return INVALID_VALUE; \
        CUresult result = cd_stream(handle, false, &stream); \
        if (result == OK) *out = expression; \
        return result; \
    }
GETTER(cuStreamGetPriority, int, stream->priority)
GETTER(cuStreamGetFlags, unsigned, stream->flags)
GETTER(cuStreamGetId, unsigned long long, stream->id)
GETTER(cuStreamGetCtx, CUcontext, stream->context)

static CUresult call(CUstream handle, void (*host)(void *), void (*callback)(CUstream, CUresult, void *), void *user) {
    struct stream *stream;
    if (host == NULL && callback == NULL) return INVALID_VALUE;
    CUresult result = cd_stream(handle, false, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK) return result;
    struct op *op = cd_op(CALL);
    op->call = host;
    op->callback = callback;
    op->user = user;
    cd_submit(stream, op);
    return OK;
}

API CUresult cuLaunchHostFunc(CUstream handle, void (*host)(void *), void *user) {
    ENTER("cuLaunchHostFunc");
    LOCKED;
    return call(handle, host, NULL, user);
}

API CUresult cuStreamAddCallback(CUstream handle, void (*callback)(CUstream, CUresult, void *), void *user,
                                 unsigned flags) {
    ENTER("cuStreamAddCallback");
    LOCKED;
    if (flags != 0) return INVALID_VALUE;
    return call(handle, NULL, callback, user);
}

static bool event_lives(const struct event *event) {
    return event != NULL && event->magic == EVENT_MAGIC && cd_context_lives(event->context);
}

API CUresult cuEventCreate(CUevent *out, unsigned flags) {
    ENTER("cuEventCreate");
    LOCKED;
    struct context *current;
    CUresult result = cd_current(&current);
    if (result != OK) return result;
    if (out == NULL || flags > 7) return INVALID_VALUE;
    if (flags & 4) return NOT_SUPPORTED; /* between processes */
    *out = cd_keep(sizeof **out);
    (*out)->magic = EVENT_MAGIC;
    (*out)->context = current;
    (*out)->flags = flags;
    return OK;
}

API CUresult cuEventDestroy_v2(CUevent event) {
    ENTER("cuEventDestroy_v2");
    LOCKED;
    if (!event_lives(event)) return INVALID_HANDLE;
    event->magic = DEAD;
    return OK;
}

static CUresult record(CUevent event, CUstream handle) {
    struct stream *stream;
    if (!event_lives(event)) return INVALID_HANDLE;
    CUresult result = cd_stream(handle, false, &stream);
    if (result != OK) return result;
    if (stream->context != event->context) return INVALID_HANDLE;
    result = cd_may_submit(stream);
    if (result != OK) return result;
    event->stream = stream;
    event->capture = cd_capture_id(stream);
    event->number = cd_submit(stream, cd_op(NOTHING));
    return OK;
}

API CUresult cuEventRecord(CUevent event, CUstream handle) {
    ENTER("cuEventRecord");
    LOCKED;
    return record(event, handle);
}

API CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
    ENTER("cuEventRecordWithFlags");
    LOCKED;
    return flags > 1 ? INVALID_VALUE : record(event, handle);
}

API CUresult cuEventQuery(CUevent event) {
    ENTER("cuEventQuery");
    LOCKED;
    if (!event_lives(event)) return INVALID_HANDLE;
    if (event->capture != 0) return cd_event_captured(event->capture);
    UNSAFE;
    return event->stream == NULL || event->stream->ended >= event->number ? OK : NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event) {
    ENTER("cuEventSynchronize");
    LOCKED;
    if (!event_lives(event)) return INVALID_HANDLE;
    if (event->capture != 0) return cd_event_captured(event->capture);
    UNSAFE;
    if (event->stream != NULL) cd_wait(event->stream, event->number);
    return OK;
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    ENTER("cuStreamWaitEvent");
    LOCKED;
    struct stream *stream;
    if (flags > 1) return INVALID_VALUE;
    if (!event_lives(event)) return INVALID_HANDLE;
    CUresult result = cd_stream(handle, false, &stream);
    if (result == OK) result = cd_may_submit(stream);
    if (result != OK || event->stream == NULL) return result;
    if (event->capture != cd_capture_id(stream)) {
        /* A stream that waits for captured work would join the capture, which is not served. */
        if (event->capture == 0) return cd_capture_refuse(stream, STREAM_CAPTURE_ISOLATION);
        cd_event_captured(event->capture);
        return cd_capture_refuse(stream, NOT_SUPPORTED);
    }
    struct op *op = cd_op(NOTHING);
    if (event->capture == 0) after(op, event->stream, event->number);
    cd_submit(stream, op);
    return OK;
}
