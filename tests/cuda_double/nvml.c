/* The part of NVML that UCX asks for: devices, their PCI places and how many NVLinks they have; and their names, with
 * those of a card's instances. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, MAX_DEVICES = 16, INSTANCES = 2,
       UNSIGNED_INT = 1, NVLINK_LINK_COUNT = 91 };

typedef struct device {
    int number;
} *nvmlDevice_t;
static struct device devices[MAX_DEVICES], instances[INSTANCES];

struct pci {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};
struct field {
    unsigned id, scope;
    long long timestamp, latency;
    int type;
    int result;
    union {
        unsigned as_unsigned;
        double as_double;
    } value;
};

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text == NULL || *text == '\0' ? otherwise : strtol(text, NULL, 0);
}

static bool mig(void) { return setting("KVFERRY_CUDA_DOUBLE_MIG", 0) != 0; }

static unsigned device_count(void) {
    if (mig()) return 1;
    long count = setting("KVFERRY_CUDA_DOUBLE_DEVICES", 1);
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (unsigned)count;
}

API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInit(void) { return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }

API const char *nvmlErrorString(int error) {
    switch (error) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    default: return "Unknown Error";
    }
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
    if (count == NULL) return INVALID_ARGUMENT;
    *count = device_count();
    return SUCCESS;
}
API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (device == NULL || index >= device_count()) return INVALID_ARGUMENT;
    devices[index].number = (int)index;
    *device = &devices[index];
    return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static bool is_instance(nvmlDevice_t device) { return device >= instances && device < instances + INSTANCES; }

API int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    if (device == NULL || current == NULL || pending == NULL) return INVALID_ARGUMENT;
    *current = *pending = mig();
    return SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    if (device == NULL || count == NULL) return INVALID_ARGUMENT;
    *count = mig() ? INSTANCES : 0;
    return SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    if (device == NULL || instance == NULL) return INVALID_ARGUMENT;
    if (!mig() || index >= INSTANCES) return NOT_FOUND;
    instances[index].number = (int)index;
    *instance = &instances[index];
    return SUCCESS;
}

/* As cuDeviceGetUuid and cuDeviceGetUuid_v2 give them. */
API int nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned len) {
    if (device == NULL || text == NULL || len < 41) return INVALID_ARGUMENT;
    bool instance = is_instance(device);
    snprintf(text, len, "%s-6b766665-7272-7900-646f-75626c65%s%02x", instance ? "MIG" : "GPU", instance ? "4d" : "00",
             (unsigned)device->number);
    return SUCCESS;
}

static void place(struct pci *pci, unsigned bus) {
    memset(pci, 0, sizeof *pci);
    pci->bus = bus;
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", bus & 0xff);
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", bus & 0xff);
}

API int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci *pci) {
    if (device == NULL || pci == NULL) return INVALID_ARGUMENT;
    place(pci, 0x40u + (is_instance(device) ? 0 : (unsigned)device->number));
    return SUCCESS;
}

/* Without NVLinks UCX reads no remote memory through CUDA IPC, it only writes. */
static long nvlinks(void) { return setting("KVFERRY_CUDA_DOUBLE_NVLINKS", 18); }

API int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, struct field *fields) {
    if (device == NULL || fields == NULL || count < 0) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) {
        fields[i].result = fields[i].id == NVLINK_LINK_COUNT ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = UNSIGNED_INT;
        fields[i].value.as_unsigned = (unsigned)nvlinks();
    }
    return SUCCESS;
}

/* All links lead to one switch. */
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, struct pci *pci) {
    if (device == NULL || pci == NULL || link >= (unsigned long)nvlinks()) return INVALID_ARGUMENT;
    place(pci, 0x80);
    return SUCCESS;
}
API int nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link, struct pci *pci) {
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

API int nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, void *info) {
    (void)info;
    return device == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
}
API int nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, void *info) {
    (void)info;
    return device == NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
}
