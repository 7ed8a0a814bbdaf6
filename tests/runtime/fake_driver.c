/* A library with the functions of CUDA's driver that fused kernels call. It computes nothing and records the calls. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { ORDINAL = 3, DEVICE = 30, ARGUMENTS = 16, LAUNCHES = 8 };

typedef struct {
    uint64_t kernel, grid[3], block[3], shared, stream, words[ARGUMENTS];
} Launch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char calls[8192], failing[64];
static int failure, argument_count, launch_count;
static Launch launches[LAUNCHES];
static _Thread_local void *current;

/* For the tests. */

void fake_reset(int arguments) {
    calls[0] = failing[0] = '\0';
    argument_count = arguments;
    launch_count = 0;
    memset(launches, 0, sizeof launches);
    current = NULL;
}
void fake_fail(const char *function, int error) {
    snprintf(failing, sizeof failing, "%s", function);
    failure = error;
}
const char *fake_calls(void) { return calls; }
int fake_launch_count(void) { return launch_count; }
const Launch *fake_launch(int index) { return &launches[index]; }
void *fake_context(void) { return current; }

/* The driver. */

static int called(const char *function, const char *format, ...) {
    va_list values;
    pthread_mutex_lock(&lock);
    va_start(values, format);
    snprintf(calls + strlen(calls), sizeof calls - strlen(calls), "%s", function);
    vsnprintf(calls + strlen(calls), sizeof calls - strlen(calls), format, values);
    snprintf(calls + strlen(calls), sizeof calls - strlen(calls), "\n");
    va_end(values);
    pthread_mutex_unlock(&lock);
    return strcmp(function, failing) == 0 ? failure : 0;
}

int cuInit(unsigned flags) { return called("cuInit", " %u", flags); }
int cuGetErrorName(int error, const char **name) { return *name = "FAKE_ERROR", 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = DEVICE, called("cuDeviceGet", " %d", ordinal); }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    return *context = (void *)(uintptr_t)(1000 + device), called("cuDevicePrimaryCtxRetain", " %d", device);
}
int cuCtxGetCurrent(void **context) { return *context = current, 0; }
int cuCtxSetCurrent(void *context) { return current = context, called("cuCtxSetCurrent", " %d", (int)(uintptr_t)context); }
int cuCtxGetDevice(int *device) { return *device = DEVICE, 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
    return *(int *)data = ORDINAL, called("cuPointerGetAttribute", " %d", attribute);
}
/* A library is the first byte of its image, and a kernel is that of its library. */
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)(uintptr_t) * (const unsigned char *)code;
    return called("cuLibraryLoadData", " %.7s", (const char *)code);
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    return *kernel = library, called("cuLibraryGetKernel", " %c %s", (int)(uintptr_t)library, name);
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    return called("cuKernelSetAttribute", " %d %d %c %d", attribute, value, (int)(uintptr_t)kernel, device);
}
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    Launch launch = {(uintptr_t)kernel, {gx, gy, gz}, {bx, by, bz}, shared, (uintptr_t)stream, {0}};
    for (int i = 0; i < argument_count; i++) launch.words[i] = *(uint64_t *)arguments[i];
    pthread_mutex_lock(&lock);
    if (launch_count < LAUNCHES) launches[launch_count++] = launch;
    pthread_mutex_unlock(&lock);
    return called("cuLaunchKernel", extra == NULL ? "" : " extra");
}
