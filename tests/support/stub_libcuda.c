/* Takes the driver's place where there is none: cuDNN looks these up before it plans kernels that it compiles at
   run time, and calls none of them while it plans for a device that is described to it. They find no device. */

enum { NO_DEVICE = 100 };

#define NONE(name) int name(void) { return NO_DEVICE; }

NONE(cuCtxGetCurrent)
NONE(cuCtxGetLimit)
NONE(cuCtxPopCurrent)
NONE(cuCtxPushCurrent)
NONE(cuDeviceGet)
NONE(cuInit)
NONE(cuKernelGetAttribute)
NONE(cuKernelGetFunction)
NONE(cuKernelSetAttribute)
NONE(cuLaunchCooperativeKernel)
NONE(cuLaunchKernel)
NONE(cuLaunchKernelEx)
NONE(cuLibraryGetKernel)
NONE(cuLibraryLoadData)
NONE(cuLibraryLoadFromFile)
NONE(cuLibraryUnload)
NONE(cuLinkAddData)
NONE(cuLinkComplete)
NONE(cuLinkCreate)
NONE(cuLinkDestroy)
NONE(cuModuleGetFunction)
NONE(cuModuleLoadData)
NONE(cuModuleUnload)
NONE(cuOccupancyMaxPotentialClusterSize)
NONE(cuStreamGetCtx)
NONE(cuTensorMapEncodeIm2col)
NONE(cuTensorMapEncodeTiled)

int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int error, const char **text) { (void)error; *text = "stub"; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "stub"; return 0; }
