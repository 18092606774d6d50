/* The type tables of GGUF: metadata values and tensors, with names and sizes.
 *
 * Sizes are those of the C structs of ggml (the format's reference); published tables of other readers
 * are wrong for IQ4_NL, IQ1_S and Q8_1.  Formats that we compute with are in common/dtype.c as well. */
#include "common/gguf.h"

struct type_size {
    const char *name;
    int32_t block_elems;
    int32_t block_bytes;
};

/* By GGUF type id.  Holes are ids that were removed from the format; from 40 on forks disagree about
 * the meaning, so a size would be a guess. */
static const struct type_size tensor_types[] = {
    [0] = {"F32", 1, 4},         [1] = {"F16", 1, 2},         [2] = {"Q4_0", 32, 18},
    [3] = {"Q4_1", 32, 20},      [6] = {"Q5_0", 32, 22},      [7] = {"Q5_1", 32, 24},
    [8] = {"Q8_0", 32, 34},      [9] = {"Q8_1", 32, 36},      [10] = {"Q2_K", 256, 84},
    [11] = {"Q3_K", 256, 110},   [12] = {"Q4_K", 256, 144},   [13] = {"Q5_K", 256, 176},
    [14] = {"Q6_K", 256, 210},   [15] = {"Q8_K", 256, 292},   [16] = {"IQ2_XXS", 256, 66},
    [17] = {"IQ2_XS", 256, 74},  [18] = {"IQ3_XXS", 256, 98}, [19] = {"IQ1_S", 256, 50},
    [20] = {"IQ4_NL", 32, 18},   [21] = {"IQ3_S", 256, 110},  [22] = {"IQ2_S", 256, 82},
    [23] = {"IQ4_XS", 256, 136}, [24] = {"I8", 1, 1},         [25] = {"I16", 1, 2},
    [26] = {"I32", 1, 4},        [27] = {"I64", 1, 8},        [28] = {"F64", 1, 8},
    [29] = {"IQ1_M", 256, 56},   [30] = {"BF16", 1, 2},       [34] = {"TQ1_0", 256, 54},
    [35] = {"TQ2_0", 256, 66},   [39] = {"MXFP4", 32, 17},
};

static const struct type_size *find_tensor_type(uint32_t id)
{
    if (id >= sizeof(tensor_types) / sizeof(tensor_types[0]) || tensor_types[id].name == NULL)
        return NULL;
    return &tensor_types[id];
}

const char *ds4_gguf_tensor_type_name(uint32_t gguf_type)
{
    const struct type_size *type = find_tensor_type(gguf_type);

    return type == NULL ? NULL : type->name;
}

int ds4_gguf_tensor_type_size(uint32_t gguf_type, int32_t *block_elems, int32_t *block_bytes)
{
    const struct type_size *type = find_tensor_type(gguf_type);

    if (type == NULL)
        return -1;
    *block_elems = type->block_elems;
    *block_bytes = type->block_bytes;
    return 0;
}

static const struct {
    const char *name;
    size_t bytes;
} value_types[DS4_GGUF_N_TYPES] = {
    [DS4_GGUF_U8] = {"u8", 1},         [DS4_GGUF_I8] = {"i8", 1},
    [DS4_GGUF_U16] = {"u16", 2},       [DS4_GGUF_I16] = {"i16", 2},
    [DS4_GGUF_U32] = {"u32", 4},       [DS4_GGUF_I32] = {"i32", 4},
    [DS4_GGUF_F32] = {"f32", 4},       [DS4_GGUF_BOOL] = {"bool", 1},
    [DS4_GGUF_STRING] = {"string", 0}, [DS4_GGUF_ARRAY] = {"array", 0},
    [DS4_GGUF_U64] = {"u64", 8},       [DS4_GGUF_I64] = {"i64", 8},
    [DS4_GGUF_F64] = {"f64", 8},
};

const char *ds4_gguf_type_name(enum ds4_gguf_type type)
{
    return (unsigned int)type < DS4_GGUF_N_TYPES ? value_types[type].name : "?";
}

size_t ds4_gguf_type_bytes(enum ds4_gguf_type type)
{
    return (unsigned int)type < DS4_GGUF_N_TYPES ? value_types[type].bytes : 0;
}
