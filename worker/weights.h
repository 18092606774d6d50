/* The tensors of one stage, ready for the kernels.
 *
 * Matrices keep the bytes of the file: in place in the mapping where the backend computes on host
 * memory, else copied to the device.  Vectors (norms, sinks, biases, mixer bases) are always copies in
 * f32, whatever the file holds.  The file must have passed ds4_model_require for the part. */
#ifndef DS4_WORKER_WEIGHTS_H
#define DS4_WORKER_WEIGHTS_H

#include "common/model.h"
#include "common/model_tensors.h"
#include "common/weights_file.h"
#include "kernels/backend.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One half of the hyper-connections of a layer (paper 2.2). */
struct ds4_hyper_weights {
    struct ds4_weight fn; /* [(2 + n_hyper) * n_hyper, n_hyper * d] */
    const float *base;    /* [(2 + n_hyper) * n_hyper] */
    const float *scale;   /* [3] */
};

/* A compressor (paper 3.6) of width c * d, c = 2 where blocks overlap. */
struct ds4_compressor_weights {
    struct ds4_weight kv;   /* [c * d, d_model] */
    struct ds4_weight gate; /* [c * d, d_model] */
    struct ds4_weight ape;  /* [ratio, c * d] */
    const float *norm;      /* [d] */
};

struct ds4_layer_weights {
    int32_t id;    /* layer number in the model */
    int32_t ratio; /* 0: window only */
    bool indexer;

    struct ds4_hyper_weights hyper_attention;
    const float *attention_norm; /* [d_model] */
    struct ds4_weight q_a;       /* [q_rank, d_model] */
    const float *q_norm;         /* [q_rank] */
    struct ds4_weight q_b;       /* [n_head * d_head, q_rank] */
    struct ds4_weight kv;        /* [d_head, d_model] */
    const float *kv_norm;        /* [d_head] */
    const float *sink;           /* [n_head] */
    struct ds4_weight out_a;     /* [n_group * out_rank, n_head * d_head / n_group] */
    struct ds4_weight out_b;     /* [d_model, n_group * out_rank] */
    struct ds4_rope rope;        /* of everything in the layer */

    struct ds4_compressor_weights compressor;       /* ratio > 0 */
    struct ds4_compressor_weights index_compressor; /* indexer */
    struct ds4_weight index_q;                      /* [n_index_head * d_index, q_rank] */
    struct ds4_weight index_head;                   /* [n_index_head, d_model] */

    struct ds4_hyper_weights hyper_experts;
    const float *experts_norm;  /* [d_model] */
    struct ds4_weight router;   /* [n_expert, d_model] */
    const float *route_bias;    /* [n_expert]; NULL on hash layers */
    const int32_t *route_table; /* [n_vocab, n_used]; hash layers only */
    struct ds4_weight gate;     /* [n_expert, d_expert, d_model] */
    struct ds4_weight up;
    struct ds4_weight down; /* [n_expert, d_model, d_expert] */
    /* All experts in host memory, where gate, up and down hold only n_resident of them, slot after slot
     * (worker/offload.h); no data where they hold all. */
    struct ds4_weight host_gate;
    struct ds4_weight host_up;
    struct ds4_weight host_down;
    struct ds4_weight shared_gate;
    struct ds4_weight shared_up;
    struct ds4_weight shared_down;
    float clamp;
    float shared_clamp;
};

struct ds4_head_weights {
    struct ds4_weight fn;  /* [n_hyper, n_hyper * d_model] */
    const float *base;     /* [n_hyper] */
    const float *scale;    /* [1] */
    const float *norm;     /* [d_model] */
    struct ds4_weight out; /* [n_vocab, d_model] */
};

struct ds4_stage_weights {
    int32_t n_layer;
    struct ds4_layer_weights *layer; /* [n_layer], owned */
    struct ds4_weight embed;         /* first stage: [n_vocab, d_model] */
    struct ds4_head_weights head;    /* last stage */
};

/* What a stage loads. */
struct ds4_weights_request {
    const struct ds4_model_shape *model;
    const struct ds4_weights_file *file;
    struct ds4_model_part part;
    bool
        in_place; /* matrices stay in the mapping; generated ones have none and are made on the device */
    int32_t n_resident; /* experts of a layer on the device; 0: all */
    /* Of a load with n_resident > 0: where the experts go on the host, and what makes generated ones. */
    uint8_t *host_area;
    const struct ds4_backend *host;
    struct ds4_device *host_dev;
};

/* The expert that slot i of n_resident holds at first: evenly spread, since nothing is known yet. */
static inline int32_t ds4_weights_resident(int32_t i, int32_t n_resident, int32_t n_expert)
{
    return (int32_t)((int64_t)i * n_expert / n_resident);
}

struct ds4_weights_size {
    size_t device_bytes; /* to allocate */
    size_t mapped_bytes; /* used in place */
    size_t host_bytes;   /* experts on the host */
    size_t slab_bytes;   /* the largest expert of those layers, its three matrices aligned */
    size_t class_bytes[DS4_N_CLASSES + 1]; /* of both together; the last one: rotary tables */
};

/* Finds every tensor and adds up sizes, without reading.  DS4_E_INVALID naming a tensor that is missing
 * or a vector of a type that is not F32, F16 or BF16. */
int ds4_stage_weights_measure(const struct ds4_weights_request *request,
                              struct ds4_weights_size *size, struct ds4_err *err) DS4_MUST_CHECK;

/* Who is told how far loading is: bytes of device and mapped weights together. */
struct ds4_weights_progress {
    void (*call)(void *arg, int64_t loaded, int64_t total); /* NULL = nobody */
    void *arg;
};

/* Loads into `area`, device memory of size->device_bytes (borrowed, as is the mapping).  Owns its
 * tables: deinit. */
int ds4_stage_weights_load(struct ds4_stage_weights *w, const struct ds4_weights_request *request,
                           const struct ds4_weights_size *size, const struct ds4_backend *backend,
                           struct ds4_device *dev, void *area,
                           const struct ds4_weights_progress *progress,
                           struct ds4_err *err) DS4_MUST_CHECK;
void ds4_stage_weights_deinit(struct ds4_stage_weights *w);

#endif
