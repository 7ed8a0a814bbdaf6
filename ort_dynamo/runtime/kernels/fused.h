/* The parts of ONNX Runtime's C API and of CUDA's driver API that fused.c uses.
 *
 * The wheels of ONNX Runtime have no headers. Releases from 1.18 on have these functions and fields at these places.
 */

#ifndef ORT_DYNAMO_FUSED_H
#define ORT_DYNAMO_FUSED_H

#include <stddef.h>
#include <stdint.h>

/* ONNX Runtime's, version 18. */

typedef struct OrtStatus OrtStatus;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtValue OrtValue;
typedef struct OrtCustomOp OrtCustomOp;

enum { API_VERSION = 18, ORT_FAIL = 1, REQUIRED = 0, RESOURCE_VERSION = 1, DEVICE_ID = 10004 };
enum { DEFAULT_MEMORY = 0, HOST_MEMORY = -2 };

typedef struct {
    OrtStatus *(*CreateStatus)(int code, const char *message);
    void *unused_1[25];
    OrtStatus *(*CreateCustomOpDomain)(const char *name, OrtCustomOpDomain **domain);
    OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *domain, const OrtCustomOp *op);
    OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *options, OrtCustomOpDomain *domain);
    void *unused_29[22];
    OrtStatus *(*GetTensorMutableData)(OrtValue *value, void **data);
    void *unused_52[9];
    OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *info, size_t *count);
    OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *info, int64_t *dimensions, size_t count);
    void *unused_63[2];
    OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *value, OrtTensorTypeAndShapeInfo **info);
    void *unused_66[24];
    OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *context, size_t index, const OrtValue **value);
    OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *context, size_t index, const int64_t *dimensions,
                                          size_t count, OrtValue **value);
    void *unused_92[1];
    void (*ReleaseStatus)(OrtStatus *status);
    void *unused_94[5];
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *info);
    void *unused_100[93];
    OrtStatus *(*KernelContext_GetGPUComputeStream)(const OrtKernelContext *context, void **stream);
    void *unused_194[71];
    OrtStatus *(*KernelContext_GetResource)(const OrtKernelContext *context, int version, int id, void **resource);
} OrtApi;

#define AT(function, index) _Static_assert(offsetof(OrtApi, function) == (index) * sizeof(void *), #function)
AT(AddCustomOpDomain, 28);
AT(GetTensorMutableData, 51);
AT(KernelContext_GetInput, 90);
AT(ReleaseTensorTypeAndShapeInfo, 99);
AT(KernelContext_GetGPUComputeStream, 193);
AT(KernelContext_GetResource, 265);

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);
} OrtApiBase;

struct OrtCustomOp {
    uint32_t version;
    void *(*CreateKernel)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info);
    const char *(*GetName)(const OrtCustomOp *op);
    const char *(*GetExecutionProviderType)(const OrtCustomOp *op);
    int (*GetInputType)(const OrtCustomOp *op, size_t index);
    size_t (*GetInputTypeCount)(const OrtCustomOp *op);
    int (*GetOutputType)(const OrtCustomOp *op, size_t index);
    size_t (*GetOutputTypeCount)(const OrtCustomOp *op);
    void (*KernelCompute)(void *kernel, OrtKernelContext *context);
    void (*KernelDestroy)(void *kernel);
    int (*GetInputCharacteristic)(const OrtCustomOp *op, size_t index);
    int (*GetOutputCharacteristic)(const OrtCustomOp *op, size_t index);
    int (*GetInputMemoryType)(const OrtCustomOp *op, size_t index);
    void *variadic[4];
    OrtStatus *(*CreateKernelV2)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel);
    OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *context);
    void *InferOutputShapeFn;
    void *versions[2];
    void *in_place_and_alias[4];
};

_Static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 136 && sizeof(OrtCustomOp) == 208, "OrtCustomOp");

/* CUDA's driver. */

enum { SHARED_WITHOUT_ASKING = 48 * 1024, MAX_DYNAMIC_SHARED = 8, POINTER_DEVICE_ORDINAL = 9 };

#define DRIVER(F)                                                                                                    \
    F(cuInit, (unsigned flags))                                                                                      \
    F(cuGetErrorName, (int error, const char **name))                                                                \
    F(cuDeviceGet, (int *device, int ordinal))                                                                       \
    F(cuDevicePrimaryCtxRetain, (void **context, int device))                                                        \
    F(cuCtxGetCurrent, (void **context))                                                                             \
    F(cuCtxSetCurrent, (void *context))                                                                              \
    F(cuCtxGetDevice, (int *device))                                                                                 \
    F(cuPointerGetAttribute, (void *data, int attribute, uint64_t pointer))                                          \
    F(cuLibraryLoadData, (void **library, const void *code, void *, void *, unsigned, void *, void *, unsigned))     \
    F(cuLibraryGetKernel, (void **kernel, void *library, const char *name))                                          \
    F(cuKernelSetAttribute, (int attribute, int value, void *kernel, int device))                                    \
    F(cuLaunchKernel, (void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,            \
                       unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,          \
                       void **extra))

#define FIELD(name, parameters) int(*name) parameters;
typedef struct {
    DRIVER(FIELD)
} Driver;

#endif
