/* Answers, as one device would, the calls of CUDA's and TensorRT's libraries while ONNX Runtime makes its providers
   that computes nothing. record_kernels.py builds it three times: to be loaded first, and in the place of the driver
   (-DDRIVER) and of TensorRT (-DTENSORRT), whose provider the build makes together with CUDA's. */
#if defined(DRIVER)
#define NONE(name) int name(void) { return 100; }
NONE(cuTensorMapEncodeTiled) NONE(cuDeviceGetAttribute) NONE(cuFuncSetCacheConfig)
NONE(cuGetErrorName) NONE(cuGetErrorString) NONE(cuFuncSetAttribute) NONE(cuLinkComplete) NONE(cuLinkDestroy)
NONE(cuLinkCreate_v2) NONE(cuLinkAddFile_v2) NONE(cuLinkAddData_v2) NONE(cuModuleUnload) NONE(cuModuleLoadData)
NONE(cuModuleGetFunction) NONE(cuLaunchCooperativeKernel) NONE(cuLaunchKernel)
#elif defined(TENSORRT)
static long zero(void) { return 0; }
static void *methods[256], *object = methods;
#define GIVES_AN_OBJECT(name) void *name(void) { for (int i = 0; i < 256; i++) methods[i] = zero; return &object; }
GIVES_AN_OBJECT(createInferBuilder_INTERNAL)
GIVES_AN_OBJECT(createInferRefitter_INTERNAL)
GIVES_AN_OBJECT(createInferRuntime_INTERNAL)
GIVES_AN_OBJECT(createNvOnnxParserRefitter_INTERNAL)
GIVES_AN_OBJECT(createNvOnnxParser_INTERNAL)
GIVES_AN_OBJECT(getPluginRegistry)
int getInferLibVersion(void) { return 101300; }
int initLibNvInferPlugins(void *logger, const char *name) { return 1; }
#else
#include <string.h>
#define OK(name, ...) int name(__VA_ARGS__) { return 0; }
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaGetDeviceProperties(char *p, int d) { memset(p, 0, 700); return 0; }
int cudaGetDeviceProperties_v2(char *p, int d) { memset(p, 0, 700); return 0; }
int cudaDeviceGetAttribute(int *v, int a, int d) { *v = 9; return 0; }
int cudaMemGetInfo(unsigned long *f, unsigned long *t) { *f = *t = 1UL << 34; return 0; }
int cudaDriverGetVersion(int *v) { *v = 13020; return 0; }
int cudaRuntimeGetVersion(int *v) { *v = 13020; return 0; }
int cudaStreamCreateWithFlags(void **s, unsigned f) { *s = (void *)1; return 0; }
int cudaEventCreateWithFlags(void **e, unsigned f) { *e = (void *)1; return 0; }
int cudaMalloc(void **p, unsigned long n) { *p = (void *)4096; return 0; }
int cudaMallocHost(void **p, unsigned long n) { *p = (void *)4096; return 0; }
int cudaHostAlloc(void **p, unsigned long n, unsigned f) { *p = (void *)4096; return 0; }
int cublasCreate_v2(void **h) { *h = (void *)16; return 0; }
int cublasLtCreate(void **h) { *h = (void *)16; return 0; }
int cudnnCreate(void **h) { *h = (void *)16; return 0; }
OK(cudaSetDevice, int d) OK(cudaDeviceSynchronize, void) OK(cudaGetLastError, void) OK(cudaPeekAtLastError, void)
OK(cudaFree, void *p) OK(cudaFreeHost, void *p) OK(cudaMemcpy, void *d, void *s, unsigned long n, int k)
OK(cudaMemcpyAsync, void *d, void *s, unsigned long n, int k, void *t) OK(cudaMemset, void *d, int v, unsigned long n)
OK(cudaMemsetAsync, void *d, int v, unsigned long n, void *s) OK(cudaStreamSynchronize, void *s)
OK(cudaStreamDestroy, void *s) OK(cudaStreamWaitEvent, void *s, void *e, unsigned f) OK(cudaEventRecord, void *e, void *s)
OK(cudaEventDestroy, void *e) OK(cublasDestroy_v2, void *h) OK(cublasSetStream_v2, void *h, void *s)
OK(cublasSetMathMode, void *h, int m) OK(cublasLtDestroy, void *h) OK(cudnnDestroy, void *h)
OK(cudnnSetStream, void *h, void *s)
#endif
