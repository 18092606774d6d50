/* Steps of equal shape, recorded once and replayed: one launch from the host instead of a thousand.
 *
 * A shape is recorded the second time it comes, so that a prompt's odd last piece costs nothing.  Everything
 * that changes from step to step is read from the buffers that begin() fills, at addresses that follow
 * from the shape alone.  The cache is bounded; the shape unused for the longest time goes. */
#include "kernels/cuda/device.cuh"

#include <string.h>

#define MAX_TOK 64 /* larger steps are prefill: their launches are long */

static struct ds4_dev_replay *find(struct ds4_device *dev)
{
    for (int i = 0; i < DS4_DEV_MAX_REPLAYS; i++) {
        struct ds4_dev_replay *r = &dev->replay[i];

        if (r->used != 0 && memcmp(&r->shape, &dev->shape, sizeof(r->shape)) == 0)
            return r;
    }
    return NULL;
}

static void clear(struct ds4_dev_replay *r)
{
    if (r->exec != NULL)
        DS4_CUDA(cudaGraphExecDestroy(r->exec));
    *r = ds4_dev_replay{};
}

static struct ds4_dev_replay *oldest(struct ds4_device *dev)
{
    struct ds4_dev_replay *r = &dev->replay[0];

    for (int i = 1; i < DS4_DEV_MAX_REPLAYS; i++)
        r = dev->replay[i].used < r->used ? &dev->replay[i] : r;
    return r;
}

bool ds4_cuda_enter(struct ds4_device *dev)
{
    struct ds4_dev_replay *r;

    if (!dev->replays || dev->shape.n_tok == 0 || dev->shape.n_tok > MAX_TOK)
        return false;
    r = find(dev);
    if (r == NULL) {
        r = oldest(dev);
        if (r->used != 0)
            DS4_CUDA(cudaStreamSynchronize(dev->stream)); /* its last run may not have ended */
        clear(r);
        r->shape = dev->shape;
        r->used = ++dev->replay_clock;
        return false;
    }
    r->used = ++dev->replay_clock;
    if (r->exec != NULL) {
        DS4_CUDA(cudaGraphLaunch(r->exec, dev->stream));
        return true;
    }
    dev->recording = r;
    DS4_CUDA(cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal));
    return false;
}

void ds4_cuda_leave(struct ds4_device *dev)
{
    struct ds4_dev_replay *r = dev->recording;
    cudaGraph_t graph;

    if (r == NULL)
        return;
    dev->recording = NULL;
    DS4_CUDA(cudaStreamEndCapture(dev->stream, &graph));
    DS4_CUDA(cudaGraphInstantiate(&r->exec, graph, 0));
    DS4_CUDA(cudaGraphDestroy(graph));
    DS4_CUDA(cudaGraphLaunch(r->exec, dev->stream));
}

void ds4_cuda_forget(struct ds4_device *dev)
{
    for (int i = 0; i < DS4_DEV_MAX_REPLAYS; i++)
        clear(&dev->replay[i]);
}
