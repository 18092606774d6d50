/* The driver's library, loaded by name.
 *
 * What is used of its interface stands here as the vendor documents it (NVML API reference): functions
 * return 0, or a number with a meaning; structures are passed by pointer.  A function the library lacks
 * and one that says "not supported" are the same: that sensor is not told.  Of the numbers of errors only
 * one matters, a card that is gone. */
#include "worker/nvml.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define NVML_NOT_SUPPORTED 3
#define NVML_GPU_IS_LOST   15

/* Arguments of the library's enumerations. */
#define NVML_TEMPERATURE_CORE   0
#define NVML_THRESHOLD_SLOWDOWN 1
#define NVML_THRESHOLD_MEMORY   2
#define NVML_CLOCK_SM           1
#define NVML_CLOCK_MEMORY       2
#define NVML_ECC_UNCORRECTED    1
#define NVML_ECC_SINCE_START    0
#define NVML_FIELD_MEMORY_C     82
#define NVML_EVENT_XID          0x8ULL
#define NVML_REASON_POWER_CAP   0x4ULL
#define NVML_REASON_HEAT        (0x20ULL | 0x40ULL) /* by the driver, by the card */
#define NVML_REASON_BRAKE       0x80ULL
#define NVML_VALUE_UNSIGNED     1
#define MILLI                   1e3
#define MEGA                    1e6

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_event {
    void *device;
    unsigned long long type;
    unsigned long long data; /* the Xid */
    unsigned int instance[2];
};

struct nvml_field {
    unsigned int id;
    unsigned int scope;
    long long timestamp;
    long long latency_us;
    unsigned int type; /* of the value */
    int status;
    union {
        double real;
        unsigned int number;
        unsigned long long wide;
    } value;
};

/* X(member, symbol, parameters); what stands first in NEEDED must be there. */
#define NEEDED(X)                                                                                  \
    X(init, "nvmlInit_v2", (void))                                                                 \
    X(shutdown, "nvmlShutdown", (void))                                                            \
    X(find, "nvmlDeviceGetHandleByPciBusId_v2", (const char *address, void **device))
#define OPTIONAL(X)                                                                                \
    X(temperature, "nvmlDeviceGetTemperature", (void *device, int sensor, unsigned int *c))        \
    X(threshold, "nvmlDeviceGetTemperatureThreshold", (void *device, int which, unsigned int *c))  \
    X(fields, "nvmlDeviceGetFieldValues", (void *device, int n, struct nvml_field *field))         \
    X(power, "nvmlDeviceGetPowerUsage", (void *device, unsigned int *mw))                          \
    X(power_limit, "nvmlDeviceGetEnforcedPowerLimit", (void *device, unsigned int *mw))            \
    X(clock, "nvmlDeviceGetClockInfo", (void *device, int which, unsigned int *mhz))               \
    X(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons",                                        \
      (void *device, unsigned long long *bits))                                                    \
    X(link_generation, "nvmlDeviceGetCurrPcieLinkGeneration", (void *device, unsigned int *n))     \
    X(link_width, "nvmlDeviceGetCurrPcieLinkWidth", (void *device, unsigned int *n))               \
    X(replays, "nvmlDeviceGetPcieReplayCounter", (void *device, unsigned int *n))                  \
    X(ecc, "nvmlDeviceGetTotalEccErrors",                                                          \
      (void *device, int type, int counter, unsigned long long *n))                                \
    X(memory, "nvmlDeviceGetMemoryInfo", (void *device, struct nvml_memory *memory))               \
    X(new_events, "nvmlEventSetCreate", (void **set))                                              \
    X(register_events, "nvmlDeviceRegisterEvents",                                                 \
      (void *device, unsigned long long types, void *set))                                         \
    X(wait_event, "nvmlEventSetWait_v2", (void *set, struct nvml_event *event, unsigned int ms))   \
    X(free_events, "nvmlEventSetFree", (void *set))

struct ds4_nvml {
    void *library;
    void *device;
    void *events; /* NULL: this driver tells no Xids */
#define MEMBER(name, symbol, parameters) int(*name) parameters;
    NEEDED(MEMBER)
    OPTIONAL(MEMBER)
#undef MEMBER
};

/* The library's address of a function into the member at `at`; ISO C has no cast between the two. */
static bool resolve(struct ds4_nvml *nvml, size_t at, const char *symbol)
{
    void *address = dlsym(nvml->library, symbol);

    memcpy((char *)nvml + at, &address, sizeof(address));
    return address != NULL;
}

static bool resolve_all(struct ds4_nvml *nvml)
{
    bool complete = true;

#define RESOLVE(name, symbol, parameters)                                                          \
    complete = resolve(nvml, offsetof(struct ds4_nvml, name), symbol) && complete;
    NEEDED(RESOLVE)
#undef RESOLVE
#define RESOLVE(name, symbol, parameters)                                                          \
    (void)resolve(nvml, offsetof(struct ds4_nvml, name), symbol);
    OPTIONAL(RESOLVE)
#undef RESOLVE
    return complete;
}

static void watch_xids(struct ds4_nvml *nvml)
{
    if (nvml->new_events == NULL || nvml->register_events == NULL || nvml->wait_event == NULL ||
        nvml->free_events == NULL || nvml->new_events(&nvml->events) != 0) {
        nvml->events = NULL;
        return;
    }
    if (nvml->register_events(nvml->device, NVML_EVENT_XID, nvml->events) != 0) {
        (void)nvml->free_events(nvml->events);
        nvml->events = NULL;
    }
}

struct ds4_nvml *ds4_nvml_open(const char *library, const char *pci_address, struct ds4_err *err)
{
    struct ds4_nvml *nvml = calloc(1, sizeof(*nvml));
    int status;

    if (nvml == NULL) {
        (void)ds4_fail(err, DS4_E_NOMEM, "no memory for the driver's library");
        return NULL;
    }
    nvml->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (nvml->library == NULL || !resolve_all(nvml)) {
        (void)ds4_fail(err, DS4_E_UNAVAILABLE, "there is no usable %s",
                       library == NULL ? DS4_NVML_LIBRARY : library);
        goto fail;
    }
    status = nvml->init();
    if (status != 0) {
        (void)ds4_fail(err, DS4_E_UNAVAILABLE, "the driver does not answer (%d)", status);
        goto fail;
    }
    status = nvml->find(pci_address, &nvml->device);
    if (status != 0) {
        (void)ds4_fail(err, DS4_E_UNAVAILABLE, "the driver knows no card at %s (%d)", pci_address,
                       status);
        (void)nvml->shutdown();
        goto fail;
    }
    watch_xids(nvml);
    return nvml;
fail:
    if (nvml->library != NULL)
        (void)dlclose(nvml->library);
    free(nvml);
    return NULL;
}

void ds4_nvml_close(struct ds4_nvml *nvml)
{
    if (nvml == NULL)
        return;
    if (nvml->events != NULL)
        (void)nvml->free_events(nvml->events);
    (void)nvml->shutdown();
    (void)dlclose(nvml->library);
    free(nvml);
}

/* ---- sensors ---- */

/* The value of a call that returned `status`. */
static double told(int status, unsigned long long value, double unit)
{
    return status == 0 ? (double)value * unit : DS4_CARD_NOT_TOLD;
}

static double number(const struct ds4_nvml *nvml, int (*get)(void *device, unsigned int *n),
                     double unit)
{
    unsigned int n = 0;
    int status = get == NULL ? NVML_NOT_SUPPORTED : get(nvml->device, &n);

    return told(status, n, unit);
}

static double number_of(const struct ds4_nvml *nvml,
                        int (*get)(void *device, int which, unsigned int *n), int which,
                        double unit)
{
    unsigned int n = 0;
    int status = get == NULL ? NVML_NOT_SUPPORTED : get(nvml->device, which, &n);

    return told(status, n, unit);
}

static double memory_temperature(const struct ds4_nvml *nvml)
{
    struct nvml_field field = {.id = NVML_FIELD_MEMORY_C};

    if (nvml->fields == NULL || nvml->fields(nvml->device, 1, &field) != 0 ||
        field.type != NVML_VALUE_UNSIGNED)
        return DS4_CARD_NOT_TOLD;
    return told(field.status, field.value.number, 1);
}

static void read_reasons(const struct ds4_nvml *nvml, double *value)
{
    unsigned long long bits = 0;

    if (nvml->reasons == NULL || nvml->reasons(nvml->device, &bits) != 0)
        return;
    value[DS4_CARD_SLOW_HEAT] = (bits & NVML_REASON_HEAT) != 0;
    value[DS4_CARD_SLOW_BRAKE] = (bits & NVML_REASON_BRAKE) != 0;
    value[DS4_CARD_SLOW_POWER] = (bits & NVML_REASON_POWER_CAP) != 0;
}

static void read_memory(const struct ds4_nvml *nvml, double *value)
{
    struct nvml_memory memory = {0};
    unsigned long long n = 0;
    int status;

    if (nvml->memory != NULL && nvml->memory(nvml->device, &memory) == 0) {
        value[DS4_CARD_FREE_BYTES] = (double)memory.free;
        value[DS4_CARD_USED_BYTES] = (double)memory.used;
    }
    if (nvml->ecc == NULL)
        return;
    status = nvml->ecc(nvml->device, NVML_ECC_UNCORRECTED, NVML_ECC_SINCE_START, &n);
    value[DS4_CARD_ECC_ERRORS] = told(status, n, 1);
}

int ds4_nvml_read(const struct ds4_nvml *nvml, double *value, struct ds4_err *err)
{
    unsigned int c = 0;

    for (int32_t i = 0; i < DS4_N_CARD_SENSOR; i++)
        value[i] = DS4_CARD_NOT_TOLD;
    if (nvml->temperature != NULL &&
        nvml->temperature(nvml->device, NVML_TEMPERATURE_CORE, &c) == NVML_GPU_IS_LOST)
        return ds4_fail(err, DS4_E_UNAVAILABLE, "the card has fallen off the bus");
    value[DS4_CARD_CORE_C] = number_of(nvml, nvml->temperature, NVML_TEMPERATURE_CORE, 1);
    value[DS4_CARD_MEMORY_C] = memory_temperature(nvml);
    value[DS4_CARD_CORE_LIMIT_C] = number_of(nvml, nvml->threshold, NVML_THRESHOLD_SLOWDOWN, 1);
    value[DS4_CARD_MEMORY_LIMIT_C] = number_of(nvml, nvml->threshold, NVML_THRESHOLD_MEMORY, 1);
    value[DS4_CARD_WATT] = number(nvml, nvml->power, 1 / MILLI);
    value[DS4_CARD_LIMIT_WATT] = number(nvml, nvml->power_limit, 1 / MILLI);
    value[DS4_CARD_SM_HZ] = number_of(nvml, nvml->clock, NVML_CLOCK_SM, MEGA);
    value[DS4_CARD_MEMORY_HZ] = number_of(nvml, nvml->clock, NVML_CLOCK_MEMORY, MEGA);
    value[DS4_CARD_LINK_GENERATION] = number(nvml, nvml->link_generation, 1);
    value[DS4_CARD_LINK_WIDTH] = number(nvml, nvml->link_width, 1);
    value[DS4_CARD_REPLAYS] = number(nvml, nvml->replays, 1);
    read_reasons(nvml, value);
    read_memory(nvml, value);
    return 0;
}

bool ds4_nvml_tells_xids(const struct ds4_nvml *nvml)
{
    return nvml->events != NULL;
}

uint64_t ds4_nvml_next_xid(const struct ds4_nvml *nvml, uint32_t wait_ms)
{
    struct nvml_event event = {0};

    if (nvml->events == NULL || nvml->wait_event(nvml->events, &event, wait_ms) != 0 ||
        event.type != NVML_EVENT_XID)
        return 0;
    return event.data;
}
