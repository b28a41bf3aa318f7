/* Weight gradients of convolutions from bfloat16 maps with channels last, by AVX-512's products of bfloat16 pairs.

   dw[o, kh, kw, i] = the sum over images and pixels of dy[pixel, o] * x[the pixel that (kh, kw) sees from there, i].
   The instruction multiplies two pairs of numbers and adds both products to a float32 sum. Pairs are of two images, at
   the same pixel: so one interleaved copy of both maps suits every (kh, kw), and a pixel outside is left out.

   Of one map ("vector") 64 channels are read at once, of the other ("single") a channel is spread over a register; 6 of
   these make 24 sums, which stay in registers over the pixels of a band. A band is so many rows or images that the
   interleaved vectors stay in the level-2 cache. A unit of work is a tile of dw over some of the images. What the units
   are, and so the order of all sums, depends on the shape alone, not on the number of threads. */

#include "../core/openmp.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "avx512.h"
#ifdef AVX512
#include <cpuid.h>

enum { BAND = 128 << 10, SUMS = 360 << 10 }; /* bytes of a band's vectors, and of a unit's sums */
enum { FULL = 42 }; /* times SINGLES rows of sums in a unit at most */
/* Work is cut into UNITS if at least PIXELS pixels of dy are in each: with fewer, a good part of the time goes into
   writing and reading sums. It is cut into THREADS units all the same: as many threads as cpu_kernels.py allows. */
enum { UNITS = 32, PIXELS = 512, THREADS = 8 };

typedef struct {
    int64_t images, rows_in, columns_in, channels_in, rows, columns, channels, kernel_rows, kernel_columns;
    int64_t stride_rows, stride_columns, pad_rows, pad_columns;
} Shape;

typedef struct { /* of a map, interleaved, in 32-bit pairs */
    int64_t image, row, column;
} Steps;

typedef struct { /* pixels that a tap sums over */
    int64_t images, rows, columns;
} Extent;

typedef struct {
    Shape s;
    const uint16_t *x, *dy;
    float *dw, *sums;
    int x_is_vector;
    int64_t tiles, groups, splits; /* of vectors, of singles, of images */
    int64_t singles, taps, pairs, band_rows, band_pairs;
    atomic_long next;
    atomic_int failed;
} Gradient;

#define KERNEL(v, n)                                                                                               \
    WIDE static void kernel_##v##_##n(float *sums, const uint32_t *vectors, Steps of_v, const uint32_t *singles,   \
                                      Steps of_n, Extent over) {                                                   \
        __m512 sum[n][v];                                                                                          \
        EACH for (int j = 0; j < n; j++)                                                                           \
            EACH for (int i = 0; i < v; i++) sum[j][i] = _mm512_loadu_ps(sums + j * TILE + i * LANES);             \
        for (int64_t m = 0; m < over.images; m++)                                                                  \
            for (int64_t r = 0; r < over.rows; r++) {                                                              \
                const uint32_t *a = vectors + m * of_v.image + r * of_v.row;                                       \
                const uint32_t *b = singles + m * of_n.image + r * of_n.row;                                       \
                for (int64_t c = 0; c < over.columns; c++, a += of_v.column, b += of_n.column) {                   \
                    __m512bh pair[v];                                                                              \
                    EACH for (int i = 0; i < v; i++) pair[i] = (__m512bh)_mm512_loadu_si512(a + i * LANES);        \
                    EACH for (int j = 0; j < n; j++) {                                                             \
                        __m512bh single = (__m512bh)_mm512_set1_epi32((int)b[j]);                                  \
                        EACH for (int i = 0; i < v; i++) sum[j][i] = _mm512_dpbf16_ps(sum[j][i], pair[i], single); \
                    }                                                                                              \
                }                                                                                                  \
            }                                                                                                      \
        EACH for (int j = 0; j < n; j++)                                                                           \
            EACH for (int i = 0; i < v; i++) _mm512_storeu_ps(sums + j * TILE + i * LANES, sum[j][i]);             \
    }
KERNELS
static void (*const kernels[VECTORS][SINGLES])(float *, const uint32_t *, Steps, const uint32_t *, Steps,
                                               Extent) = NAMES;

/* Interleaves `count` channels of a pixel of two images; zeros for the second if there is none, and up to `wide`. */
WIDE static void interleave(uint32_t *out, const uint16_t *first, const uint16_t *second, int64_t count, int64_t wide) {
    if (second)
        for (int64_t i = 0; i < count; i++) out[i] = first[i] | (uint32_t)second[i] << 16;
    else
        for (int64_t i = 0; i < count; i++) out[i] = first[i];
    for (int64_t i = count; i < wide; i++) out[i] = 0;
}

/* A map whose pixels have `wide` channels side by side. */
static void interleave_vectors(uint32_t *out, const uint16_t *first, const uint16_t *second, int64_t pixels,
                               int64_t channels, int64_t count, int64_t wide) {
    for (int64_t p = 0; p < pixels; p++, first += channels, second += second ? channels : 0)
        interleave(out + p * wide, first, second, count, wide);
}

/* A map of which SINGLES channels of all pixels lie side by side, then the next ones; `apart`: pixels between them.
   What a store writes beyond its SINGLES the next pixel overwrites. */
WIDE static void interleave_singles(uint32_t *out, const uint16_t *first, const uint16_t *second, int64_t pixels,
                                    int64_t channels, int64_t count, int64_t apart) {
    uint32_t row[SINGLES * FULL + 2];
    int64_t full = (count + SINGLES - 1) / SINGLES;
    for (int64_t p = 0; p < pixels; p++, first += channels, second += second ? channels : 0) {
        interleave(row, first, second, count, full * SINGLES + 2);
        for (int64_t k = 0; k < full; k++)
            _mm256_storeu_si256((void *)(out + (k * apart + p) * SINGLES),
                                _mm256_loadu_si256((const void *)(row + k * SINGLES)));
    }
}

/* The outputs from `from` to `to` along one axis that see a pixel of the input at this place of the kernel. */
static void seen(int64_t from, int64_t to, int64_t inputs, int64_t stride, int64_t pad, int64_t at, int64_t *first,
                 int64_t *last) {
    int64_t low = pad - at, high = inputs - 1 + pad - at; /* 0 <= output * stride - low <= inputs - 1 */
    *first = MOST(from, low <= 0 ? 0 : (low + stride - 1) / stride);
    *last = high < 0 ? 0 : LEAST(to, high / stride + 1);
}

/* Writes the sums of a unit, its part of dw: [tap][single][TILE]. */
static void sum_unit(Gradient *of, int64_t unit, uint32_t *vectors, uint32_t *singles) {
    const Shape *s = &of->s;
    int64_t split = unit / (of->tiles * of->groups), tile = unit / of->groups % of->tiles, group = unit % of->groups;
    int64_t all_v = of->x_is_vector ? s->channels_in : s->channels, v0 = tile * TILE, v = LEAST(all_v - v0, TILE);
    int64_t all_n = of->x_is_vector ? s->channels : s->channels_in, n0 = group * of->singles;
    int64_t n = LEAST(all_n - n0, of->singles), registers = (v + LANES - 1) / LANES, wide = registers * LANES;
    int64_t step_x = of->x_is_vector ? wide : SINGLES, step_dy = of->x_is_vector ? SINGLES : wide;
    int64_t x0 = of->x_is_vector ? v0 : n0, dy0 = of->x_is_vector ? n0 : v0;
    float *sums = of->sums + unit * of->taps * of->singles * TILE;
    memset(sums, 0, (size_t)(of->taps * of->singles * TILE) * sizeof(float));
    int64_t last_pair = of->pairs * (split + 1) / of->splits;
    for (int64_t pair = of->pairs * split / of->splits; pair < last_pair; pair += of->band_pairs) {
        int64_t pairs = LEAST(of->band_pairs, last_pair - pair);
        for (int64_t r0 = 0; r0 < s->rows; r0 += of->band_rows) {
            int64_t r1 = LEAST(s->rows, r0 + of->band_rows), top = MOST(0, r0 * s->stride_rows - s->pad_rows);
            int64_t end = LEAST(s->rows_in, (r1 - 1) * s->stride_rows - s->pad_rows + s->kernel_rows);
            int64_t pixels_x = (end - top) * s->columns_in, pixels_dy = (r1 - r0) * s->columns;
            if (end <= top) continue;
            int64_t pixels_v = of->x_is_vector ? pixels_x : pixels_dy, pixels_n = of->x_is_vector ? pixels_dy : pixels_x;
            int64_t apart = pairs * pixels_n + 1;
            for (int64_t k = 0; k < pairs; k++) {
                int64_t image = 2 * (pair + k), size_x = s->rows_in * s->columns_in * s->channels_in;
                int64_t size_dy = s->rows * s->columns * s->channels;
                const uint16_t *a = of->x + image * size_x + top * s->columns_in * s->channels_in + x0;
                const uint16_t *b = of->dy + image * size_dy + r0 * s->columns * s->channels + dy0;
                const uint16_t *a2 = image + 1 < s->images ? a + size_x : NULL, *b2 = a2 ? b + size_dy : NULL;
                interleave_vectors(vectors + k * pixels_v * wide, of->x_is_vector ? a : b, of->x_is_vector ? a2 : b2,
                                   pixels_v, all_v, v, wide);
                interleave_singles(singles + k * pixels_n * SINGLES, of->x_is_vector ? b : a,
                                   of->x_is_vector ? b2 : a2, pixels_n, all_n, n, apart);
            }
            Steps of_x = {pixels_x * step_x, s->stride_rows * s->columns_in * step_x, s->stride_columns * step_x};
            Steps of_dy = {pixels_dy * step_dy, s->columns * step_dy, step_dy};
            for (int64_t j = 0; j < n; j += SINGLES)
                for (int64_t tap = 0; tap < of->taps; tap++) {
                    int64_t row = tap / s->kernel_columns, column = tap % s->kernel_columns, h0, h1, w0, w1;
                    seen(r0, r1, s->rows_in, s->stride_rows, s->pad_rows, row, &h0, &h1);
                    seen(0, s->columns, s->columns_in, s->stride_columns, s->pad_columns, column, &w0, &w1);
                    if (h1 <= h0 || w1 <= w0) continue;
                    int64_t row_in = h0 * s->stride_rows + row - s->pad_rows - top;
                    int64_t column_in = w0 * s->stride_columns + column - s->pad_columns;
                    int64_t at_x = (row_in * s->columns_in + column_in) * step_x;
                    int64_t at_dy = ((h0 - r0) * s->columns + w0) * step_dy;
                    Extent over = {pairs, h1 - h0, w1 - w0};
                    kernels[registers - 1][LEAST(n - j, SINGLES) - 1](
                        sums + (tap * of->singles + j) * TILE, vectors + (of->x_is_vector ? at_x : at_dy),
                        of->x_is_vector ? of_x : of_dy, singles + j * apart + (of->x_is_vector ? at_dy : at_x),
                        of->x_is_vector ? of_dy : of_x, over);
                }
        }
    }
}

static int64_t rows_seen(const Shape *s, int64_t rows) {
    return LEAST(s->rows_in, (rows - 1) * s->stride_rows + s->kernel_rows);
}

/* Pixels of x, or of dy, in a band of so many rows of dy. */
static int64_t pixels(const Gradient *of, int64_t rows, int of_x) {
    return of_x ? rows_seen(&of->s, rows) * of->s.columns_in : rows * of->s.columns;
}

static void sum_units(void *data, Thread thread) {
    Gradient *of = data;
    int64_t pixels_v = of->band_pairs * pixels(of, of->band_rows, of->x_is_vector), size = sizeof(uint32_t);
    int64_t pixels_n = of->band_pairs * pixels(of, of->band_rows, !of->x_is_vector);
    uint32_t *vectors = malloc((size_t)(pixels_v * TILE * size));
    uint32_t *singles = malloc((size_t)((pixels_n + 2) * of->singles * size)); /* of->singles is a multiple of SINGLES */
    (void)thread;
    if (vectors && singles)
        for (int64_t unit; (unit = atomic_fetch_add(&of->next, 1)) < of->tiles * of->groups * of->splits;)
            sum_unit(of, unit, vectors, singles);
    else
        of->failed = 1;
    free(vectors), free(singles);
}

/* Writes dw: adds the sums of all splits in their order, in a loop over TILE that the compiler vectorizes. */
WIDE static void write_weights(void *data, Thread thread) {
    Gradient *of = data;
    const Shape *s = &of->s;
    int64_t all_v = of->x_is_vector ? s->channels_in : s->channels;
    int64_t all_n = of->x_is_vector ? s->channels : s->channels_in, unit = of->taps * of->singles * TILE;
    int64_t step_v = of->x_is_vector ? 1 : of->taps * s->channels_in;
    int64_t step_n = of->x_is_vector ? of->taps * s->channels_in : 1;
    for (int64_t n = all_n * thread.number / thread.count; n < all_n * (thread.number + 1) / thread.count; n++)
        for (int64_t tap = 0; tap < of->taps; tap++)
            for (int64_t tile = 0; tile < of->tiles; tile++) {
                const float *part = of->sums + (tile * of->groups + n / of->singles) * unit;
                float sum[TILE] = {0}, *dw = of->dw + tile * TILE * step_v + n * step_n + tap * s->channels_in;
                part += (tap * of->singles + n % of->singles) * TILE;
                for (int64_t split = 0; split < of->splits; split++, part += of->tiles * of->groups * unit)
                    for (int64_t v = 0; v < TILE; v++) sum[v] += part[v];
                for (int64_t v = 0; v < LEAST(TILE, all_v - tile * TILE); v++) dw[v * step_v] = sum[v];
            }
}

/* Whether this processor has what the code of this folder needs. */
int kasoku_can_run(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

/* Whether it has AMX's products of bfloat16 matrices, with which oneDNN is faster. */
int kasoku_has_amx(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1;
}

static void count_thread(void *data, Thread thread) {
    if (thread.number == 0) *(int *)data = thread.count;
}

/* On how many threads work runs where so many are wanted: 1 where torch's OpenMP is not GNU's. */
int kasoku_threads(int wanted) {
    int count = 0;
    run_on_threads(count_thread, &count, wanted);
    return count;
}

/* Writes dw [channels][kernel rows][kernel columns][channels_in] in float32, of x and dy in bfloat16, all contiguous
   with channels last. Returns 0 if there was no memory. */
int kasoku_conv_weight_gradient(const Shape *shape, const uint16_t *x, const uint16_t *dy, float *dw, int threads) {
    Gradient of = {.s = *shape, .x = x, .dy = dy, .dw = dw, .x_is_vector = shape->channels_in >= shape->channels};
    const Shape *s = &of.s;
    int64_t all_v = of.x_is_vector ? s->channels_in : s->channels;
    int64_t all_n = of.x_is_vector ? s->channels : s->channels_in;
    of.taps = s->kernel_rows * s->kernel_columns, of.pairs = (s->images + 1) / 2;
    of.tiles = (all_v + TILE - 1) / TILE;
    int64_t most = SINGLES * MOST(1, LEAST(FULL, SUMS / (of.taps * TILE * SINGLES * (int64_t)sizeof(float))));
    int64_t equal = (all_n + (all_n + most - 1) / most - 1) / ((all_n + most - 1) / most);
    of.singles = (equal + SINGLES - 1) / SINGLES * SINGLES;
    of.groups = (all_n + of.singles - 1) / of.singles;
    int64_t parts = of.tiles * of.groups, full = s->images * s->rows * s->columns / PIXELS;
    of.splits = MOST((THREADS + parts - 1) / parts, LEAST((UNITS + parts - 1) / parts, full));
    of.splits = LEAST(of.pairs, of.splits);
    int64_t vector_bytes = TILE * sizeof(uint32_t);
    of.band_rows = s->rows;
    while (of.band_rows > 1 && pixels(&of, of.band_rows, of.x_is_vector) * vector_bytes > BAND)
        of.band_rows = (of.band_rows + 1) / 2;
    int64_t band_bytes = pixels(&of, of.band_rows, of.x_is_vector) * vector_bytes;
    of.band_pairs = of.band_rows < s->rows ? 1 : MOST(1, LEAST(of.pairs, BAND / band_bytes));
    of.sums = malloc((size_t)(parts * of.splits * of.taps * of.singles * TILE) * sizeof(float));
    if (!of.sums) return 0;
    run_on_threads(sum_units, &of, threads);
    if (!of.failed) run_on_threads(write_weights, &of, threads);
    free(of.sums);
    return !of.failed;
}
#else
int kasoku_can_run(void) { return 0; }
#endif
