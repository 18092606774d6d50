/* Every CUDA, cuBLAS and launch result goes through here; any failure ends the process by design.
 *
 * After a device fault the context is poisoned and every later answer would be a lie, so the hook that
 * worker/fatal.c installs (ds4_backend_on_fault) reports stage, layer and step and leaves.  Without a
 * hook (tools, tests) the text goes to stderr and the process aborts.  The one soft failure is memory
 * at start-up, which context.cu's alloc handles itself. */
#ifndef DS4_KERNELS_CUDA_CHECK_CUH
#define DS4_KERNELS_CUDA_CHECK_CUH

#include "kernels/backend.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

/* `what` names the call, `why` the error; does not return. */
[[noreturn]] static inline void ds4_cuda_fatal(const char *file, int line, const char *what,
                                               const char *why)
{
    ds4_backend_fault(file, line, what, why);
}

#define DS4_CUDA(call)                                                                             \
    do {                                                                                           \
        cudaError_t ds4_rc_ = (call);                                                              \
        if (ds4_rc_ != cudaSuccess)                                                                \
            ds4_cuda_fatal(__FILE__, __LINE__, #call, cudaGetErrorString(ds4_rc_));                \
    } while (0)

#define DS4_CUBLAS(call)                                                                           \
    do {                                                                                           \
        cublasStatus_t ds4_rc_ = (call);                                                           \
        if (ds4_rc_ != CUBLAS_STATUS_SUCCESS)                                                      \
            ds4_cuda_fatal(__FILE__, __LINE__, #call, cublasGetStatusString(ds4_rc_));             \
    } while (0)

/* Launches and checks; an empty grid is no launch. */
#define DS4_LAUNCH(kernel, grid, block, shmem, stream, ...)                                        \
    do {                                                                                           \
        ds4_backend_kernel = #kernel;                                                              \
        kernel<<<(grid), (block), (shmem), (stream)>>>(__VA_ARGS__);                               \
        DS4_CUDA(cudaGetLastError());                                                              \
    } while (0)

/* The same on the device's stream for a kernel that takes its turn itself (async.cuh): on cards that can
 * it starts while its predecessor still runs. */
#define DS4_CHAIN(kernel, grid, block, shmem, dev, ...)                                            \
    do {                                                                                           \
        cudaLaunchConfig_t ds4_config_ = {};                                                       \
        cudaLaunchAttribute ds4_overlap_ = {};                                                     \
        ds4_config_.gridDim = (grid);                                                              \
        ds4_config_.blockDim = (block);                                                            \
        ds4_config_.dynamicSmemBytes = (shmem);                                                    \
        ds4_config_.stream = (dev)->stream;                                                        \
        ds4_overlap_.id = cudaLaunchAttributeProgrammaticStreamSerialization;                      \
        ds4_overlap_.val.programmaticStreamSerializationAllowed = 1;                               \
        ds4_config_.attrs = &ds4_overlap_;                                                         \
        ds4_config_.numAttrs = (dev)->overlap ? 1 : 0;                                             \
        DS4_CUDA(cudaLaunchKernelEx(&ds4_config_, kernel, __VA_ARGS__));                           \
    } while (0)

/* The same with clusters of `blocks` blocks along x (sm_90). */
#define DS4_CHAIN_CLUSTER(kernel, grid, blocks, block, shmem, dev, ...)                            \
    do {                                                                                           \
        cudaLaunchConfig_t ds4_config_ = {};                                                       \
        cudaLaunchAttribute ds4_attr_[2] = {};                                                     \
        ds4_config_.gridDim = (grid);                                                              \
        ds4_config_.blockDim = (block);                                                            \
        ds4_config_.dynamicSmemBytes = (shmem);                                                    \
        ds4_config_.stream = (dev)->stream;                                                        \
        ds4_attr_[0].id = cudaLaunchAttributeClusterDimension;                                     \
        ds4_attr_[0].val.clusterDim = {(blocks), 1, 1};                                            \
        ds4_attr_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;                      \
        ds4_attr_[1].val.programmaticStreamSerializationAllowed = 1;                               \
        ds4_config_.attrs = ds4_attr_;                                                             \
        ds4_config_.numAttrs = (dev)->overlap ? 2 : 1;                                             \
        DS4_CUDA(cudaLaunchKernelEx(&ds4_config_, kernel, __VA_ARGS__));                           \
    } while (0)

#endif
