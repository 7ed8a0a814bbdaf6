/* Custom operators of ONNX Runtime. Each one launches a fused kernel on the session's stream, or calls a host function.
 *
 * kernel_library.py builds this file and calls it. kernel_callbacks.py does the same work without a C compiler.
 */

#include "fused.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME(name, parameters) #name,
static const char *const driver_functions[] = {DRIVER(NAME)};

enum { MAX_RANK = 32, TRAILING_NULLS = 4, ITSELF = -1 };

typedef int (*Host)(void **pointers, const int64_t *symbols, int64_t programs);

/* kernel_library.py declares the same structures. */
typedef struct {
    const void *image;
    size_t nbytes;
    const char *entry;
    int64_t num_warps;
    int64_t shared;
} Cubin;

typedef struct {
    const char *name;
    const char *provider; /* null: the CPU's */
    const char *driver;   /* the library of CUDA's driver */
    Host host;            /* null: the kernel is in the cubins */
    Cubin aligned;
    Cubin unaligned;
    int64_t inputs;
    int64_t outputs;
    int64_t symbols;
    int64_t per_program;
    const int64_t *numbers; /* input types, output types, (input, axis) of symbols, sizes: count, (rank, dimensions) */
    size_t number_count;
} Description;

typedef struct {
    void *kernel;              /* a CUkernel, once it is loaded */
    _Atomic uint64_t prepared; /* a bit for each device where it may have its shared memory */
} Variant;

typedef struct {
    OrtCustomOp base; /* first: ONNX Runtime hands its address back */
    Description is;
    const int64_t *types;
    const int64_t *places;
    const int64_t *sizes;
    int loaded;
    Driver driver;
    Variant aligned;
    Variant unaligned;
} Op;

typedef struct {
    Op *op;
    const OrtApi *api;
} Kernel;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

__attribute__((format(printf, 3, 4)))
static OrtStatus *failed(const OrtApi *api, const Op *op, const char *format, ...) {
    char reason[768], message[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    snprintf(message, sizeof message, "The fused kernel %s failed: %s", op->is.name, reason);
    return api->CreateStatus(ORT_FAIL, message);
}

static OrtStatus *driver_failed(const Kernel *kernel, const char *function, int error) {
    const char *name = NULL;
    kernel->op->driver.cuGetErrorName(error, &name);
    return failed(kernel->api, kernel->op, "%s gave error %d (%s)", function, error, name ? name : "unknown");
}

#define TRY(call)                            \
    do {                                     \
        OrtStatus *status_ = (call);         \
        if (status_ != NULL) return status_; \
    } while (0)

#define TRY_DRIVER(kernel, function, ...)                                          \
    do {                                                                           \
        int error_ = (kernel)->op->driver.function(__VA_ARGS__);                   \
        if (error_ != 0) return driver_failed((kernel), #function, error_);        \
    } while (0)

static OrtStatus *load_driver(const Kernel *kernel) {
    Op *op = kernel->op;
    void *library = dlopen(op->is.driver, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return failed(kernel->api, op, "%s", dlerror());
    for (size_t i = 0; i < sizeof driver_functions / sizeof *driver_functions; i++) {
        void *function = dlsym(library, driver_functions[i]);
        if (function == NULL) return failed(kernel->api, op, "%s has no %s", op->is.driver, driver_functions[i]);
        memcpy((char *)&op->driver + i * sizeof function, &function, sizeof function);
    }
    TRY_DRIVER(kernel, cuInit, 0);
    return NULL;
}

static OrtStatus *load_variant(const Kernel *kernel, const Cubin *cubin, Variant *variant) {
    void *library;
    TRY_DRIVER(kernel, cuLibraryLoadData, &library, cubin->image, NULL, NULL, 0, NULL, NULL, 0);
    TRY_DRIVER(kernel, cuLibraryGetKernel, &variant->kernel, library, cubin->entry);
    return NULL;
}

static OrtStatus *load_once(const Kernel *kernel) {
    Op *op = kernel->op;
    if (op->loaded) return NULL;
    TRY(load_driver(kernel));
    TRY(load_variant(kernel, &op->is.aligned, &op->aligned));
    TRY(load_variant(kernel, &op->is.unaligned, &op->unaligned));
    op->loaded = 1;
    return NULL;
}

static OrtStatus *create(const OrtCustomOp *base, const OrtApi *api, const OrtKernelInfo *info, void **created) {
    Kernel *kernel = malloc(sizeof *kernel);
    OrtStatus *status = NULL;
    (void)info;
    if (kernel == NULL) return failed(api, (const Op *)base, "out of memory");
    kernel->op = (Op *)base;
    kernel->api = api;
    if (kernel->op->is.host == NULL) {
        pthread_mutex_lock(&loading);
        status = load_once(kernel);
        pthread_mutex_unlock(&loading);
    }
    if (status != NULL) free(kernel);
    else *created = kernel;
    return status;
}

/* A number on the host is a symbol, and its pointer becomes null, since kernels cannot read it. */
static OrtStatus *read_symbols(const Kernel *kernel, const OrtValue *const *inputs, void **pointers, int64_t *symbols) {
    const OrtApi *api = kernel->api;
    const Op *op = kernel->op;
    int64_t dimensions[MAX_RANK], read = -1;
    size_t rank = 0;
    for (int64_t i = 0; i < op->is.symbols; i++) {
        int64_t input = op->places[2 * i], axis = op->places[2 * i + 1];
        if (axis == ITSELF) {
            if (pointers[input] == NULL) return failed(api, op, "input %d is empty", (int)input);
            symbols[i] = *(const int64_t *)pointers[input];
            pointers[input] = NULL;
            continue;
        }
        if (input != read) {
            OrtTensorTypeAndShapeInfo *info;
            OrtStatus *status;
            TRY(api->GetTensorTypeAndShape(inputs[input], &info));
            status = api->GetDimensionsCount(info, &rank);
            if (status == NULL && rank <= MAX_RANK) status = api->GetDimensions(info, dimensions, rank);
            api->ReleaseTensorTypeAndShapeInfo(info);
            TRY(status);
            read = input;
        }
        if (rank > MAX_RANK || (size_t)axis >= rank)
            return failed(api, op, "input %d has %zu dimensions", (int)input, rank);
        symbols[i] = dimensions[axis];
    }
    return NULL;
}

static int64_t size(const int64_t **cursor, const int64_t *symbols) {
    const int64_t *at = *cursor;
    int64_t value = *at++;
    for (int64_t left = *at++; left > 0; left--) value *= symbols[*at++];
    *cursor = at;
    return value;
}

/* A thread that has not used CUDA has no context, and a launch does not make one as the runtime API does. */
static OrtStatus *need_context(const Kernel *kernel, const OrtKernelContext *context, const void *output) {
    void *current = NULL, *resource = NULL;
    int ordinal, device;
    OrtStatus *status;
    TRY_DRIVER(kernel, cuCtxGetCurrent, &current);
    if (current != NULL) return NULL;
    status = kernel->api->KernelContext_GetResource(context, RESOURCE_VERSION, DEVICE_ID, &resource);
    ordinal = (int)(intptr_t)resource;
    if (status != NULL) { /* some releases report device 0 as missing */
        kernel->api->ReleaseStatus(status);
        TRY_DRIVER(kernel, cuPointerGetAttribute, &ordinal, POINTER_DEVICE_ORDINAL, (uint64_t)(uintptr_t)output);
    }
    TRY_DRIVER(kernel, cuDeviceGet, &device, ordinal);
    TRY_DRIVER(kernel, cuDevicePrimaryCtxRetain, &current, device);
    TRY_DRIVER(kernel, cuCtxSetCurrent, current);
    return NULL;
}

static OrtStatus *allow_shared(const Kernel *kernel, Variant *variant, int64_t shared) {
    int device;
    if (shared <= SHARED_WITHOUT_ASKING) return NULL;
    TRY_DRIVER(kernel, cuCtxGetDevice, &device);
    if (device < 64 && atomic_load(&variant->prepared) >> device & 1) return NULL;
    TRY_DRIVER(kernel, cuKernelSetAttribute, MAX_DYNAMIC_SHARED, (int)shared, variant->kernel, device);
    if (device < 64) atomic_fetch_or(&variant->prepared, UINT64_C(1) << device);
    return NULL;
}

static OrtStatus *launch(const Kernel *kernel, const OrtKernelContext *context, void **pointers, int64_t *symbols,
                         int64_t programs) {
    Op *op = kernel->op;
    int64_t tensors = op->is.inputs + op->is.outputs;
    void *arguments[tensors + op->is.symbols + TRAILING_NULLS], *null = NULL, *stream;
    uintptr_t bits = 0;
    int64_t count = 0;
    const Cubin *cubin;
    Variant *variant;
    for (int64_t i = 0; i < tensors; i++) {
        bits |= (uintptr_t)pointers[i];
        arguments[count++] = &pointers[i];
    }
    for (int64_t i = 0; i < op->is.symbols; i++) arguments[count++] = &symbols[i];
    for (int i = 0; i < TRAILING_NULLS; i++) arguments[count++] = &null; /* Triton's scratch buffers */
    variant = (bits & 15) == 0 ? &op->aligned : &op->unaligned;
    cubin = variant == &op->aligned ? &op->is.aligned : &op->is.unaligned;
    if (programs > INT32_MAX) return failed(kernel->api, op, "%lld programs are too many", (long long)programs);
    TRY(need_context(kernel, context, pointers[op->is.inputs]));
    TRY(allow_shared(kernel, variant, cubin->shared));
    TRY(kernel->api->KernelContext_GetGPUComputeStream(context, &stream));
    TRY_DRIVER(kernel, cuLaunchKernel, variant->kernel, (unsigned)programs, 1, 1, 32 * (unsigned)cubin->num_warps, 1, 1,
               (unsigned)cubin->shared, stream, arguments, NULL);
    return NULL;
}

static OrtStatus *call_host(const Kernel *kernel, void **pointers, const int64_t *symbols, int64_t programs) {
    int code = kernel->op->is.host(pointers, symbols, programs);
    if (code == 0) return NULL;
    return failed(kernel->api, kernel->op, "the host function gave error %d", code);
}

static OrtStatus *compute(void *state, OrtKernelContext *context) {
    const Kernel *kernel = state;
    const OrtApi *api = kernel->api;
    const Op *op = kernel->op;
    const OrtValue *inputs[op->is.inputs + 1];
    void *pointers[op->is.inputs + op->is.outputs];
    int64_t symbols[op->is.symbols + 1], programs;
    const int64_t *cursor = op->sizes;
    for (int64_t i = 0; i < op->is.inputs; i++) {
        TRY(api->KernelContext_GetInput(context, (size_t)i, &inputs[i]));
        TRY(api->GetTensorMutableData((OrtValue *)inputs[i], &pointers[i]));
    }
    TRY(read_symbols(kernel, inputs, pointers, symbols));
    programs = (size(&cursor, symbols) + op->is.per_program - 1) / op->is.per_program;
    for (int64_t i = 0; i < op->is.outputs; i++) {
        int64_t dimensions[MAX_RANK], rank = *cursor++;
        OrtValue *output;
        for (int64_t axis = 0; axis < rank; axis++) dimensions[axis] = size(&cursor, symbols);
        TRY(api->KernelContext_GetOutput(context, (size_t)i, dimensions, (size_t)rank, &output));
        TRY(api->GetTensorMutableData(output, &pointers[op->is.inputs + i]));
    }
    if (programs == 0) return NULL;
    if (op->is.host != NULL) return call_host(kernel, pointers, symbols, programs);
    return launch(kernel, context, pointers, symbols, programs);
}

/* ONNX Runtime wants these two to be there and calls the ones that give a status. */
static void *create_without_status(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info) {
    (void)op, (void)api, (void)info;
    return NULL;
}
static void compute_without_status(void *kernel, OrtKernelContext *context) { (void)kernel, (void)context; }

static const char *name(const OrtCustomOp *op) { return ((const Op *)op)->is.name; }
static const char *provider(const OrtCustomOp *op) { return ((const Op *)op)->is.provider; }
static size_t input_count(const OrtCustomOp *op) { return (size_t)((const Op *)op)->is.inputs; }
static size_t output_count(const OrtCustomOp *op) { return (size_t)((const Op *)op)->is.outputs; }
static int input_type(const OrtCustomOp *op, size_t i) { return (int)((const Op *)op)->types[i]; }
static int output_type(const OrtCustomOp *op, size_t i) { return (int)((const Op *)op)->types[input_count(op) + i]; }
static int required(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, REQUIRED; }
static int input_memory(const OrtCustomOp *base, size_t i) {
    const Op *op = (const Op *)base;
    for (int64_t symbol = 0; symbol < op->is.symbols; symbol++)
        if (op->places[2 * symbol] == (int64_t)i && op->places[2 * symbol + 1] == ITSELF) return HOST_MEMORY;
    return DEFAULT_MEMORY;
}

static const void *copied(const void *given, size_t nbytes, int *lacks) {
    void *copy;
    if (given == NULL) return NULL;
    copy = malloc(nbytes ? nbytes : 1);
    if (copy == NULL) *lacks = 1;
    else memcpy(copy, given, nbytes);
    return copy;
}

static const char *copied_text(const char *given, int *lacks) {
    return copied(given, given == NULL ? 0 : strlen(given) + 1, lacks);
}

/* What Python calls. An operator is never freed: kernels of sessions hold its address. */

Op *fused_create(const Description *given) {
    Op *op = calloc(1, sizeof *op);
    int lacks = op == NULL;
    if (lacks) return NULL;
    op->is = *given;
    op->is.name = copied_text(given->name, &lacks);
    op->is.provider = copied_text(given->provider, &lacks);
    op->is.driver = copied_text(given->driver, &lacks);
    op->is.aligned.image = copied(given->aligned.image, given->aligned.nbytes, &lacks);
    op->is.unaligned.image = copied(given->unaligned.image, given->unaligned.nbytes, &lacks);
    op->is.aligned.entry = copied_text(given->aligned.entry, &lacks);
    op->is.unaligned.entry = copied_text(given->unaligned.entry, &lacks);
    op->is.numbers = copied(given->numbers, given->number_count * sizeof *given->numbers, &lacks);
    if (lacks) return NULL;
    op->types = op->is.numbers;
    op->places = op->types + given->inputs + given->outputs;
    op->sizes = op->places + 2 * given->symbols;
    op->base.version = API_VERSION;
    op->base.CreateKernel = create_without_status;
    op->base.GetName = name;
    op->base.GetExecutionProviderType = provider;
    op->base.GetInputType = input_type;
    op->base.GetInputTypeCount = input_count;
    op->base.GetOutputType = output_type;
    op->base.GetOutputTypeCount = output_count;
    op->base.KernelCompute = compute_without_status;
    op->base.KernelDestroy = free;
    op->base.GetInputCharacteristic = required;
    op->base.GetOutputCharacteristic = required;
    op->base.GetInputMemoryType = input_memory;
    op->base.CreateKernelV2 = create;
    op->base.KernelComputeV2 = compute;
    return op;
}

static _Thread_local struct {
    const char *domain;
    Op *const *ops;
    size_t count;
} next;

/* Give the operators of the domain that this thread registers next; they are read at that time. */
void fused_next(const char *domain, Op *const *ops, size_t count) {
    next.domain = domain;
    next.ops = ops;
    next.count = count;
}

/* Whether nobody has registered what `fused_next` was given. */
int fused_is_waiting(void) { return next.domain != NULL; }

OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    const OrtApi *api = base->GetApi(API_VERSION);
    OrtCustomOpDomain *domain;
    if (api == NULL || next.domain == NULL) return NULL; /* which `fused_is_waiting` shows */
    TRY(api->CreateCustomOpDomain(next.domain, &domain));
    for (size_t i = 0; i < next.count; i++) TRY(api->CustomOpDomain_Add(domain, &next.ops[i]->base));
    TRY(api->AddCustomOpDomain(options, domain));
    next.domain = NULL;
    return NULL;
}
