/* What a check of operations stands on: the two backends, verdicts, random numbers, and twins, the same bytes
 * in both backends' memory.  For the one file of a program. */
#ifndef DS4_TESTS_CUDA_TWIN_H
#define DS4_TESTS_CUDA_TWIN_H

#include "kernels/backend.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xff

static int n_passed, n_failed;
static const struct ds4_backend *cpu, *cuda;
static struct ds4_device *cpu_dev, *exact_dev, *fast_dev;

static void die(const char *what)
{
    fprintf(stderr, "check_ops: %s\n", what);
    exit(2);
}

static void verdict(bool ok, double error, const char *what, const char *where)
{
    printf("%s  %-14s %-62s error %.2e\n", ok ? "ok  " : "FAIL", what, where, error);
    n_passed += ok;
    n_failed += !ok;
}

/* ---- numbers and memory --------------------------------------------------------------------------- */

static uint32_t seed = 7;

static uint32_t next(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 4;
}

static float uniform(float scale)
{
    return ((float)(next() & 0xffffff) * 0x1p-23f - 1.0f) * scale;
}

static void *must(void *p)
{
    return p != NULL ? p : (die("out of memory"), NULL);
}

static float *random_floats(size_t n, float scale)
{
    float *x = must(malloc(n * sizeof(float) + 1));

    for (size_t i = 0; i < n; i++)
        x[i] = uniform(scale);
    return x;
}

/* The same bytes in both backends' memory. */
struct twin {
    size_t bytes;
    void *cpu;
    void *cuda;
};
static struct ds4_device *now; /* the CUDA device under test */

static struct twin twin_of(const void *host, size_t bytes)
{
    struct ds4_err err = {0};
    struct twin t = {bytes, cpu->alloc(cpu_dev, bytes, "check", &err),
                     cuda->alloc(now, bytes, "check", &err)};

    if (t.cpu == NULL || t.cuda == NULL)
        die(err.msg);
    cpu->upload(cpu_dev, t.cpu, host, bytes);
    cuda->upload(now, t.cuda, host, bytes);
    cuda->sync(now);
    return t;
}

static struct twin twin_random(size_t n, float scale)
{
    float *x = random_floats(n, scale);
    struct twin t = twin_of(x, n * sizeof(float));

    free(x);
    return t;
}

static struct twin twin_poison(size_t bytes)
{
    void *x = must(malloc(bytes));
    struct twin t;

    memset(x, POISON, bytes);
    t = twin_of(x, bytes);
    free(x);
    return t;
}

static void *fetch(const struct ds4_backend *b, const struct twin *t)
{
    void *x = must(malloc(t->bytes));

    if (b == cpu)
        cpu->download(cpu_dev, x, t->cpu, t->bytes);
    else
        cuda->download(now, x, t->cuda, t->bytes);
    return x;
}

/* |got - want| / |want|; infinite when one is a number where the other is none. */
static double distance(const float *got, const float *want, size_t n)
{
    double error = 0.0, norm = 0.0;

    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i]) || !isfinite(want[i])) {
            if (isfinite(got[i]) != isfinite(want[i]))
                return INFINITY;
            continue;
        }
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return norm > 0.0 ? sqrt(error / norm) : error > 0.0 ? INFINITY : 0.0;
}

static float bf16_f32(uint16_t v)
{
    uint32_t bits = (uint32_t)v << 16;
    float f;

    memcpy(&f, &bits, sizeof(f));
    return f;
}

static double twin_distance(const struct twin *t, enum ds4_dtype dtype)
{
    void *a = fetch(cuda, t), *b = fetch(cpu, t);
    size_t n = t->bytes / (dtype == DS4_DTYPE_BF16 ? 2 : 4);
    double error;

    if (dtype == DS4_DTYPE_BF16) {
        float *x = must(malloc(n * 4)), *y = must(malloc(n * 4));

        for (size_t i = 0; i < n; i++) {
            x[i] = bf16_f32(((uint16_t *)a)[i]);
            y[i] = bf16_f32(((uint16_t *)b)[i]);
        }
        error = distance(x, y, n);
        free(x), free(y);
    } else {
        error = distance(a, b, n);
    }
    free(a), free(b);
    return error;
}

/* Share of bytes that differ. */
static double twin_bytes_differ(const struct twin *t)
{
    uint8_t *a = fetch(cuda, t), *b = fetch(cpu, t);
    size_t differ = 0;

    for (size_t i = 0; i < t->bytes; i++)
        differ += a[i] != b[i];
    free(a), free(b);
    return (double)differ / (double)t->bytes;
}

/* Says where packed rows differ first. */
static void show_difference(const struct twin *t, size_t row_bytes)
{
    uint8_t *a = fetch(cuda, t), *b = fetch(cpu, t);
    int shown = 0;

    for (size_t i = 0; i < t->bytes && shown < 6; i++) {
        if (a[i] != b[i]) {
            printf("      row %zu byte %zu: %02x, CPU %02x\n", i / row_bytes, i % row_bytes, a[i],
                   b[i]);
            shown++;
        }
    }
    free(a), free(b);
}

#endif
