/* Closed choices that settings and code share: a setting of the file with a fixed list of words is one
 * of these, its value the word's index in the row of the settings table. */
#ifndef DS4_COMMON_CHOICES_H
#define DS4_COMMON_CHOICES_H

enum ds4_release {
    DS4_RELEASE_UNSET,
    DS4_RELEASE_V4_PREVIEW,
    DS4_RELEASE_V4_0731,
    DS4_RELEASE_V41
};
enum ds4_health_mode { DS4_HEALTH_READY, DS4_HEALTH_LIVE };
enum ds4_lost_mode { DS4_LOST_FAIL, DS4_LOST_REPLAY };
enum ds4_spec_method { DS4_SPEC_NONE, DS4_SPEC_NGRAM };
enum ds4_pipe_kind { DS4_PIPE_AUTO, DS4_PIPE_SHM, DS4_PIPE_NCCL };
enum ds4_auto_switch { DS4_AUTO, DS4_ON, DS4_OFF };
enum ds4_effort_setting { DS4_THINK_OFF, DS4_THINK_LOW, DS4_THINK_HIGH, DS4_THINK_MAX };
/* What a Messages request without `thinking` means; clients that let it out may mean either. */
enum ds4_absent_thinking { DS4_ABSENT_DEFAULT, DS4_ABSENT_OFF };
enum ds4_media { DS4_MEDIA_REFUSE, DS4_MEDIA_PLACEHOLDER };
enum ds4_content_specials { DS4_SPECIALS_PLAIN, DS4_SPECIALS_REFERENCE };
enum ds4_reasoning_field { DS4_REASONING_BOTH, DS4_REASONING_CONTENT, DS4_REASONING_SHORT };
enum ds4_backend_kind { DS4_BACKEND_CPU, DS4_BACKEND_CUDA };
/* Instruction set of the CPU backend; AUTO takes the best the machine has.  Results do not depend on
 * it. */
enum ds4_isa { DS4_ISA_AUTO, DS4_ISA_SCALAR, DS4_ISA_AVX2, DS4_ISA_AVX512 };
enum ds4_load { DS4_LOAD_MMAP, DS4_LOAD_PREAD };
enum ds4_stream_dtype { DS4_STREAM_AUTO, DS4_STREAM_F32, DS4_STREAM_BF16 };
/* How products with weights are formed.  EXACT: f32 activations.  FAST: activations quantised to int8
 * blocks (f32 scale per 32 or per 256 by weight type); error bound in kernels/cpu/README.md. */
enum ds4_products { DS4_PRODUCTS_EXACT, DS4_PRODUCTS_FAST };

#endif
