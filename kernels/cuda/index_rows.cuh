/* Index scores of a prompt's chunk: what indexer.cu hands to the kernels of index_rows.cu. */
#ifndef DS4_KERNELS_CUDA_INDEX_ROWS_CUH
#define DS4_KERNELS_CUDA_INDEX_ROWS_CUH

#include "kernels/cuda/device.cuh"

/* By value; keys and queries of 128 values, at most 64 heads. */
struct ds4_index_rows {
    struct ds4_dev_batch batch;
    const float *q; /* 16-byte aligned, as its strides */
    int64_t q_tok, q_head;
    const float *w;
    int64_t w_tok;
    int32_t n_head;
    struct ds4_pages pages;
    int32_t ratio;
    int32_t top_k;
    float *score; /* [n_query, max_rows] */
    int64_t max_rows;
    int32_t first; /* token of query 0 */
    int32_t n_query;
    int32_t n_entry;
    int32_t n_page;      /* compressed rows that an entry may have */
    __nv_bfloat16 *keys; /* [n_entry, n_page, 128], made by ds4_cuda_index_keys */
};

/* Bytes of keys for a step of this shape; 0: too many, or too few queries. */
size_t ds4_cuda_index_key_bytes(const struct ds4_dev_shape *shape, int32_t ratio);
/* The most that the above says. */
size_t ds4_cuda_index_key_room(const struct ds4_limits *limits);

void ds4_cuda_index_keys(struct ds4_device *dev, const struct ds4_index_rows *a);
void ds4_cuda_index_scores(struct ds4_device *dev, const struct ds4_index_rows *a);

#endif
