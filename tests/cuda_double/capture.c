/* Stream capture: which calls it forbids to whom, and what becomes of work for a stream that is captured.
 *
 * Recorded work is checked as any other and counted, and never runs. As documented, a call that a capture forbids makes
 * that capture invalid: its streams then take no work, and cuStreamEndCapture gives no graph. */
#include "cuda_double.h"

enum mode { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NOT_CAPTURED, CAPTURED, INVALIDATED };

struct capture {
    struct stream *stream;
    enum mode mode;
    uint64_t thread, id;
    bool invalid;
    size_t recorded;
    struct capture *next;
};

struct graph {
    int magic;
    size_t nodes;
};

static struct capture *captures; /* active ones, invalid ones too */
static __thread enum mode thread_mode;

/* Locked. A number that no later thread has. */
static uint64_t self(void) {
    static __thread uint64_t number;
    if (number == 0) number = cd_number();
    return number;
}

CUresult cd_capture_forbids(void) {
    CUresult result = OK;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        bool own = capture->thread == self();
        bool forbids = own ? capture->mode != RELAXED && thread_mode != RELAXED
                           : capture->mode == GLOBAL && thread_mode == GLOBAL;
        if (!forbids) continue;
        capture->invalid = true;
        result = STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* Locked. A context stands for all its streams, in every mode. */
CUresult cd_capture_forbids_context(const struct context *context) {
    CUresult result = cd_capture_forbids();
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        if (capture->stream->context != context) continue;
        capture->invalid = true;
        result = STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* Locked. A capture that the legacy stream would have to wait for. */
static struct capture *blocking_capture(const struct context *context) {
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        if (capture->stream->context == context && !(capture->stream->flags & NON_BLOCKING)) return capture;
    }
    return NULL;
}

static CUresult forbids_legacy(const struct context *context) {
    struct capture *blocking = blocking_capture(context);
    if (blocking != NULL) {
        blocking->invalid = true;
        return STREAM_CAPTURE_IMPLICIT;
    }
    return cd_capture_forbids();
}

CUresult cd_may_submit(struct stream *stream) {
    if (stream == stream->context->legacy) return forbids_legacy(stream->context);
    return stream->capture != NULL && stream->capture->invalid ? STREAM_CAPTURE_INVALIDATED : OK;
}

CUresult cd_may_look(struct stream *stream) {
    if (stream->capture != NULL) {
        stream->capture->invalid = true;
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream == stream->context->legacy) return forbids_legacy(stream->context);
    return cd_capture_forbids();
}

CUresult cd_capture_refuse(struct stream *stream, CUresult why) {
    if (stream->capture != NULL) stream->capture->invalid = true;
    return why;
}

void cd_capture_record(struct stream *stream) { stream->capture->recorded++; }

uint64_t cd_capture_id(const struct stream *stream) { return stream->capture != NULL ? stream->capture->id : 0; }

CUresult cd_event_captured(uint64_t id) {
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        if (capture->id == id) capture->invalid = true;
    }
    return CAPTURED_EVENT;
}

void cd_capture_drop(struct stream *stream) {
    for (struct capture **at = &captures; stream->capture != NULL && *at != NULL; at = &(*at)->next) {
        if (*at == stream->capture) {
            *at = stream->capture->next;
            break;
        }
    }
    stream->capture = NULL;
}

static CUresult begin(CUstream handle, unsigned mode) {
    struct stream *stream;
    CUresult result = cd_stream(handle, false, &stream);
    if (result != OK) return result;
    if (mode > RELAXED) return INVALID_VALUE;
    if (stream == stream->context->legacy) return STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != NULL) return cd_capture_refuse(stream, ILLEGAL_STATE);
    struct capture *capture = cd_keep(sizeof *capture);
    *capture = (struct capture){.stream = stream, .mode = mode, .thread = self(), .id = cd_number(), .next = captures};
    captures = stream->capture = capture;
    return OK;
}

API CUresult cuStreamBeginCapture_v2(CUstream handle, unsigned mode) {
    ENTER("cuStreamBeginCapture_v2");
    LOCKED;
    return begin(handle, mode);
}

API CUresult cuStreamBeginCapture(CUstream handle) {
    ENTER("cuStreamBeginCapture");
    LOCKED;
    return begin(handle, GLOBAL);
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    ENTER("cuStreamEndCapture");
    LOCKED;
    struct stream *stream;
    if (graph == NULL) return INVALID_VALUE;
    *graph = NULL;
    CUresult result = cd_stream(handle, false, &stream);
    if (result != OK) return result;
    struct capture *capture = stream->capture;
    if (capture == NULL) return ILLEGAL_STATE;
    if (capture->mode != RELAXED && capture->thread != self()) {
        return cd_capture_refuse(stream, STREAM_CAPTURE_WRONG_THREAD);
    }
    cd_capture_drop(stream);
    if (capture->invalid) return STREAM_CAPTURE_INVALIDATED;
    *graph = cd_keep(sizeof **graph);
    **graph = (struct graph){GRAPH_MAGIC, capture->recorded};
    return OK;
}

/* Locked. The legacy stream cannot be captured, but asking about it can be an error. */
static CUresult ask(CUstream handle, int *status, unsigned long long *id) {
    struct stream *stream;
    if (status == NULL) return INVALID_VALUE;
    CUresult result = cd_stream(handle, false, &stream);
    if (result != OK) return result;
    bool legacy = stream == stream->context->legacy;
    if (legacy && blocking_capture(stream->context) != NULL) return STREAM_CAPTURE_IMPLICIT;
    struct capture *capture = stream->capture;
    *status = capture == NULL ? NOT_CAPTURED : capture->invalid ? INVALIDATED : CAPTURED;
    if (id != NULL && capture != NULL) *id = capture->id;
    return OK;
}

API CUresult cuStreamIsCapturing(CUstream handle, int *status) {
    ENTER("cuStreamIsCapturing");
    LOCKED;
    return ask(handle, status, NULL);
}

API CUresult cuStreamGetCaptureInfo(CUstream handle, int *status, unsigned long long *id) {
    ENTER("cuStreamGetCaptureInfo");
    LOCKED;
    return ask(handle, status, id);
}

/* Status and number only: a graph that is being recorded has no handle here. */
API CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int *status, unsigned long long *id, CUgraph *graph,
                                       const void **nodes, size_t *count) {
    ENTER("cuStreamGetCaptureInfo_v2");
    LOCKED;
    if (graph != NULL || nodes != NULL || count != NULL) return NOT_SUPPORTED;
    return ask(handle, status, id);
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int *status, unsigned long long *id, CUgraph *graph,
                                       const void **nodes, const void **edges, size_t *count) {
    ENTER("cuStreamGetCaptureInfo_v3");
    LOCKED;
    if (graph != NULL || nodes != NULL || edges != NULL || count != NULL) return NOT_SUPPORTED;
    return ask(handle, status, id);
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    if (mode == NULL || *mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
    enum mode before = thread_mode;
    thread_mode = (enum mode)*mode;
    *mode = (int)before;
    return OK;
}

/* How many operations were recorded; the nodes themselves cannot be asked for. */
API CUresult cuGraphGetNodes(CUgraph graph, void **nodes, size_t *count) {
    ENTER("cuGraphGetNodes");
    LOCKED;
    if (graph == NULL || graph->magic != GRAPH_MAGIC || count == NULL) return INVALID_VALUE;
    if (nodes != NULL) return NOT_SUPPORTED;
    *count = graph->nodes;
    return OK;
}

API CUresult cuGraphDestroy(CUgraph graph) {
    ENTER("cuGraphDestroy");
    LOCKED;
    if (graph == NULL || graph->magic != GRAPH_MAGIC) return INVALID_VALUE;
    graph->magic = DEAD;
    return OK;
}
