/* Copies between the cache and pinned host memory, and within the cache.
 *
 * All on the worker's one stream, so that a copy is behind the step that wrote its rows and before the
 * next one; none of them waits.  Bytes moved twice at most, bound by the link (host) or by memory
 * bandwidth (device): a point of one Flash stage is 1.2 to 5 MB. */
#include "kernels/cuda/device.cuh"

void *ds4_cuda_alloc_host(struct ds4_device *dev, size_t bytes, const char *what,
                          struct ds4_err *err)
{
    void *data = NULL;
    cudaError_t rc = cudaHostAlloc(&data, bytes == 0 ? 1 : bytes, cudaHostAllocDefault);

    (void)dev;
    if (rc == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* an answer, not a fault */
        (void)ds4_fail(err, DS4_E_NOMEM, "%s: the host has no %zu bytes of pinned memory left",
                       what, bytes);
        return NULL;
    }
    DS4_CUDA(rc);
    return data;
}

void ds4_cuda_free_host(struct ds4_device *dev, void *data, size_t bytes)
{
    (void)bytes;
    if (data == NULL)
        return;
    DS4_CUDA(cudaStreamSynchronize(dev->stream));
    DS4_CUDA(cudaFreeHost(data));
}

void ds4_cuda_fetch(struct ds4_device *dev, void *host_dst, const void *src, size_t bytes)
{
    DS4_CUDA(cudaMemcpyAsync(host_dst, src, bytes, cudaMemcpyDeviceToHost, dev->stream));
}

void ds4_cuda_copy_rows(struct ds4_device *dev, void *dst, size_t dst_pitch, const void *src,
                        size_t src_pitch, size_t row_bytes, int32_t n_row)
{
    if (n_row == 0 || row_bytes == 0)
        return;
    if (dst_pitch == row_bytes && src_pitch == row_bytes)
        DS4_CUDA(cudaMemcpyAsync(dst, src, row_bytes * (size_t)n_row, cudaMemcpyDeviceToDevice,
                                 dev->stream));
    else
        DS4_CUDA(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, row_bytes, (size_t)n_row,
                                   cudaMemcpyDeviceToDevice, dev->stream));
}
