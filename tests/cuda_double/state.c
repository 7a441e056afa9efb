/* Settings, cuInit, failures to inject, and what every other source uses. */
#define _GNU_SOURCE
#include "cuda_double.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t cd_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t cd_changed;
int cd_device_count;
int cd_physical[MAX_DEVICES];
int cd_version = 12080;
uint64_t cd_delay_ns = 1000000;
bool cd_peer = true;
bool cd_htod_waits;
bool cd_calls_wait;
bool cd_fabric;
bool cd_mig;
int cd_rdma_order;
char cd_machine[33];
__thread bool cd_in_callback;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static volatile bool initialized;
static volatile bool forked;
static int calls_fd = -1;

enum { MAX_RULES = 32, INSTANCES = 2 };
static struct rule {
    char name[64];
    long from, seen;
    bool and_later;
    CUresult result;
} rules[MAX_RULES];
static int rule_count;
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;

void cd_die(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "cuda double: %s\n", text);
    fflush(stderr);
    abort();
}

void *cd_new(size_t size) {
    void *memory = calloc(1, size ? size : 1);
    if (memory == NULL) cd_die("no memory for %zu bytes", size);
    return memory;
}

/* What is kept is reachable, so that a leak checker of the program under test has nothing to say. */
void *cd_keep(size_t size) {
    static struct kept {
        _Alignas(16) struct kept *next;
    } *all;
    struct kept *kept = cd_new(sizeof *kept + size);
    kept->next = all;
    all = kept;
    return kept + 1;
}

uint64_t cd_number(void) {
    static uint64_t last;
    return ++last;
}

uint64_t cd_random(void) {
    static uint64_t state;
    if (state == 0 && getrandom(&state, sizeof state, 0) != sizeof state) state = cd_now_ns() | 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

uint64_t cd_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void cd_unlock(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&cd_lock);
}

/* The same in every process, as peers compare them. */
void cd_uuid(int number, bool instance, unsigned char out[16]) {
    memcpy(out, "kvferry\0double\0", 15);
    if (instance) out[14] = 'M';
    out[15] = (unsigned char)number;
}

int cd_card(int physical) { return cd_mig ? 0 : physical; }

static int device_of_uuid(const char *name, size_t len, int machine) {
    bool instance = cd_mig && strncasecmp(name, "MIG-", 4) == 0;
    for (int device = 0; device < machine; device++) {
        unsigned char uuid[16];
        char text[41] = "GPU-";
        size_t at = 4;
        if (instance) memcpy(text, "MIG-", 4);
        cd_uuid(instance ? device : cd_card(device), instance, uuid);
        for (int i = 0; i < 16; i++) {
            if (i == 4 || i == 6 || i == 8 || i == 10) text[at++] = '-';
            at += (size_t)sprintf(text + at, "%02x", uuid[i]);
        }
        if (len > 4 && len <= at && strncasecmp(name, text, len) == 0) return device;
    }
    return -1;
}

/* As the driver does: the first entry that names no device, or one a second time, ends the list. Of instances a process
 * sees one, and a card's number or UUID stands for its first. */
static void choose_devices(int machine) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int most = cd_mig ? 1 : machine;
    if (visible == NULL) {
        for (int i = 0; i < most; i++) cd_physical[cd_device_count++] = i;
        return;
    }
    while (*visible != '\0' && cd_device_count < most) {
        while (*visible == ' ') visible++;
        size_t len = strcspn(visible, ", ");
        char *end;
        long device = strtol(visible, &end, 10);
        if (end == visible || end != visible + len) device = device_of_uuid(visible, len, machine);
        else if (cd_mig && device != 0) return;
        if (device < 0 || device >= machine) return;
        for (int i = 0; i < cd_device_count; i++) {
            if (cd_physical[i] == device) return;
        }
        cd_physical[cd_device_count++] = (int)device;
        visible += len;
        while (*visible == ',' || *visible == ' ') visible++;
    }
}

static void read_rules(const char *text) {
    while (*text != '\0' && rule_count < MAX_RULES) {
        struct rule *rule = &rules[rule_count];
        char plus = 0;
        int result = 0, used = 0;
        int read = sscanf(text, "%63[A-Za-z0-9_]:%ld%n", rule->name, &rule->from, &used);
        if (read != 2) cd_die("bad FAIL rule: %s", text);
        text += used;
        if (*text == '+') plus = *text++;
        if (sscanf(text, ":%d%n", &result, &used) != 1) cd_die("bad FAIL rule for %s", rule->name);
        text += used;
        rule->and_later = plus == '+';
        rule->result = result;
        rule_count++;
        if (*text == ',') text++;
        else if (*text != '\0') cd_die("bad FAIL rules at: %s", text);
    }
}

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text == NULL || *text == '\0' ? otherwise : strtol(text, NULL, 0);
}

static void child_of_fork(void) { forked = true; }

static void start(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&cd_changed, &attributes);
    pthread_atfork(NULL, NULL, child_of_fork);
    cd_version = (int)setting("KVFERRY_CUDA_DOUBLE_VERSION", 12080);
    cd_delay_ns = (uint64_t)setting("KVFERRY_CUDA_DOUBLE_DELAY_US", 1000) * 1000;
    cd_peer = setting("KVFERRY_CUDA_DOUBLE_PEER", 1) != 0;
    cd_htod_waits = setting("KVFERRY_CUDA_DOUBLE_HTOD_WAITS", 0) != 0;
    cd_rdma_order = (int)setting("KVFERRY_CUDA_DOUBLE_RDMA_ORDER", 100);
    cd_calls_wait = setting("KVFERRY_CUDA_DOUBLE_CALLS_WAIT", 0) != 0;
    cd_fabric = setting("KVFERRY_CUDA_DOUBLE_FABRIC", 0) != 0;
    cd_mig = setting("KVFERRY_CUDA_DOUBLE_MIG", 0) != 0;
    long machine = cd_mig ? INSTANCES : setting("KVFERRY_CUDA_DOUBLE_DEVICES", 1);
    choose_devices(machine < 0 ? 0 : machine > MAX_DEVICES ? MAX_DEVICES : (int)machine);
    const char *machine_name = getenv("KVFERRY_CUDA_DOUBLE_MACHINE");
    if (machine_name != NULL) snprintf(cd_machine, sizeof cd_machine, "%.32s", machine_name);
    for (char *c = cd_machine; *c != '\0'; c++) {
        if (!isalnum((unsigned char)*c)) *c = '_';
    }
    const char *calls = getenv("KVFERRY_CUDA_DOUBLE_CALLS");
    if (calls != NULL && *calls != '\0') calls_fd = open(calls, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    const char *fail = getenv("KVFERRY_CUDA_DOUBLE_FAIL");
    if (fail != NULL) read_rules(fail);
}

static CUresult injected(const char *name) {
    CUresult result = OK;
    if (rule_count == 0) return OK;
    pthread_mutex_lock(&rules_lock);
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        size_t len = strlen(rule->name);
        /* A rule for a name without its version suffix holds for all versions. */
        if (strncmp(rule->name, name, len) != 0 || (name[len] != '\0' && strncmp(name + len, "_v", 2) != 0)) continue;
        rule->seen++;
        if (rule->seen == rule->from || (rule->and_later && rule->seen > rule->from)) result = rule->result;
    }
    pthread_mutex_unlock(&rules_lock);
    return result;
}

static void log_call(const char *name) {
    if (calls_fd < 0) return;
    char line[96];
    int len = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), name);
    if (write(calls_fd, line, (size_t)len) != len) cd_die("the calls cannot be logged");
}

CUresult cd_enter_any(const char *name) {
    pthread_once(&once, start);
    log_call(name);
    return injected(name);
}

CUresult cd_enter(const char *name) {
    if (!initialized || forked) return NOT_INITIALIZED;
    if (cd_in_callback) return NOT_PERMITTED;
    log_call(name);
    return injected(name);
}

API CUresult cuInit(unsigned flags) {
    if (forked) return NOT_INITIALIZED;
    CUresult result = cd_enter_any("cuInit");
    if (result != OK) return result;
    if (flags != 0) return INVALID_VALUE;
    if (cd_device_count == 0) return NO_DEVICE;
    initialized = true;
    return OK;
}

API CUresult cuDriverGetVersion(int *version) {
    CUresult result = cd_enter_any("cuDriverGetVersion");
    if (result != OK) return result;
    if (version == NULL) return INVALID_VALUE;
    *version = cd_version;
    return OK;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NOT_MAPPABLE, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {PRIMARY_CONTEXT_ACTIVE, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work"},
    {STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capture"},
    {STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult error, const char **out, bool name) {
    if (out == NULL) return INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) *out = name ? errors[i].name : errors[i].text;
    }
    return *out == NULL ? INVALID_VALUE : OK;
}

API CUresult cuGetErrorString(CUresult error, const char **out) { return describe(error, out, false); }
API CUresult cuGetErrorName(CUresult error, const char **out) { return describe(error, out, true); }
