/* Convolutions of 3x3 with stride 1 from bfloat16 maps with channels last, by Winograd's F(2x2, 3x3): 16 products for 4
   outputs where the sum over taps takes 36.

   y[tile] = A' [ (G w G') . (B' x B) ] A, where . sums over the channels of the input, and x is the 4x4 pixels that a tile
   of 2x2 outputs sees. Both factors are rounded to bfloat16, sums are float32. A block of tiles is transformed, then
   multiplied, TILE channels of the output at a time, so that all it needs stays in the level-2 cache. The order of all
   sums depends on the shape alone. Ref: Lavin and Gray 2015 (arXiv 1509.09308). */

#include "../core/openmp.h"
#include <stdatomic.h>
#include <stdlib.h>

#include "avx512.h"
#ifdef AVX512
enum { PLACES = 16, BLOCK = 384 << 10 /* bytes */ };

typedef struct {
    int64_t images, rows_in, columns_in, channels_in, rows, columns, channels, pad;
} Shape;

typedef struct {
    Shape s;
    const uint16_t *x, *weights; /* [channels][3][3][channels_in]; if it is the gradient, [channels_in][3][3][channels] */
    const float *bias;
    uint16_t *y;
    uint32_t *factors; /* [TILE of channels][place][pair of channels_in][channel], pairs of bfloat16 */
    int64_t is_gradient, pairs, wide_in, tile_rows, tile_columns, block;
    atomic_long next;
    atomic_int failed;
} Convolution;

#define KERNEL(v, n)                                                                                               \
    WIDE static void kernel_##v##_##n(float *out, const uint32_t *factors, const uint32_t *x, int64_t step,        \
                                      int64_t pairs) {                                                             \
        __m512 sum[n][v];                                                                                          \
        EACH for (int j = 0; j < n; j++) EACH for (int i = 0; i < v; i++) sum[j][i] = _mm512_setzero_ps();         \
        for (int64_t p = 0; p < pairs; p++, factors += v * LANES, x++) {                                           \
            __m512bh pair[v];                                                                                      \
            EACH for (int i = 0; i < v; i++) pair[i] = (__m512bh)_mm512_load_si512(factors + i * LANES);           \
            EACH for (int j = 0; j < n; j++) {                                                                     \
                __m512bh single = (__m512bh)_mm512_set1_epi32((int)x[j * step]);                                   \
                EACH for (int i = 0; i < v; i++) sum[j][i] = _mm512_dpbf16_ps(sum[j][i], pair[i], single);         \
            }                                                                                                      \
        }                                                                                                          \
        EACH for (int j = 0; j < n; j++) EACH for (int i = 0; i < v; i++)                                          \
            _mm512_store_ps(out + (j * v + i) * LANES, sum[j][i]);                                                 \
    }
KERNELS
static void (*const kernels[VECTORS][SINGLES])(float *, const uint32_t *, const uint32_t *, int64_t, int64_t) = NAMES;

static __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

WIDE static __m512 load(const uint16_t *at, __mmask16 some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, at)), 16));
}

WIDE static __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

/* B' x B of 16 channels at `at`; a NULL pixel lies outside the image and counts as zero. */
WIDE static void transform_pixels(const uint16_t *const *pixels, int64_t at, __mmask16 some, uint16_t *out, int64_t place) {
    __m512 d[4][4];
    EACH for (int i = 0; i < 4; i++) {
        __m512 x[4];
        EACH for (int j = 0; j < 4; j++)
            x[j] = pixels[4 * i + j] ? load(pixels[4 * i + j] + at, some) : _mm512_setzero_ps();
        d[i][0] = _mm512_sub_ps(x[0], x[2]), d[i][1] = _mm512_add_ps(x[1], x[2]);
        d[i][2] = _mm512_sub_ps(x[2], x[1]), d[i][3] = _mm512_sub_ps(x[1], x[3]);
    }
    EACH for (int j = 0; j < 4; j++) {
        __m512 rows[4] = {_mm512_sub_ps(d[0][j], d[2][j]), _mm512_add_ps(d[1][j], d[2][j]),
                          _mm512_sub_ps(d[2][j], d[1][j]), _mm512_sub_ps(d[1][j], d[3][j])};
        EACH for (int i = 0; i < 4; i++) _mm256_store_si256((void *)(out + (4 * i + j) * place), rounded(rows[i]));
    }
}

/* G w G' of 16 channels of the taps w. */
WIDE static void transform_taps(const __m512 *w, __m512 *out) {
    __m512 half = _mm512_set1_ps(0.5f), g[4][3];
    EACH for (int j = 0; j < 3; j++) {
        __m512 ends = _mm512_mul_ps(half, _mm512_add_ps(w[j], w[6 + j])), middle = _mm512_mul_ps(half, w[3 + j]);
        g[0][j] = w[j], g[1][j] = _mm512_add_ps(ends, middle), g[2][j] = _mm512_sub_ps(ends, middle), g[3][j] = w[6 + j];
    }
    EACH for (int i = 0; i < 4; i++) {
        __m512 ends = _mm512_mul_ps(half, _mm512_add_ps(g[i][0], g[i][2])), middle = _mm512_mul_ps(half, g[i][1]);
        out[4 * i] = g[i][0], out[4 * i + 1] = _mm512_add_ps(ends, middle);
        out[4 * i + 2] = _mm512_sub_ps(ends, middle), out[4 * i + 3] = g[i][2];
    }
}

/* The factors of channel k of the output: pairs lie side by side in the weights. */
WIDE static void factors_of_channel(const Convolution *of, int64_t k, uint32_t *out, int64_t wide) {
    int64_t channels_in = of->s.channels_in;
    for (int64_t c = 0; c < channels_in; c += LANES) {
        __m512 w[9], g[PLACES];
        uint32_t row[LANES / 2];
        EACH for (int tap = 0; tap < 9; tap++)
            w[tap] = load(of->weights + (k * 9 + tap) * channels_in + c, first(channels_in - c));
        transform_taps(w, g);
        EACH for (int place = 0; place < PLACES; place++) {
            _mm256_storeu_si256((void *)row, rounded(g[place]));
            for (int64_t p = 0; p < LEAST(LANES / 2, of->pairs - c / 2); p++)
                out[(place * of->pairs + c / 2 + p) * wide] = row[p];
        }
    }
}

/* The same for a gradient, of 16 channels from k on: pairs are of two rows, and taps are turned around. */
WIDE static void factors_of_gradient(const Convolution *of, int64_t k, uint32_t *out, int64_t wide) {
    int64_t channels = of->s.channels;
    for (int64_t p = 0; p < of->pairs; p++) {
        __m512 g[2][PLACES];
        EACH for (int side = 0; side < 2; side++) {
            __m512 w[9];
            __mmask16 some = 2 * p + side < of->s.channels_in ? first(channels - k) : 0;
            EACH for (int tap = 0; tap < 9; tap++)
                w[tap] = load(of->weights + ((2 * p + side) * 9 + 8 - tap) * channels + k, some);
            transform_taps(w, g[side]);
        }
        EACH for (int place = 0; place < PLACES; place++) {
            __m512i low = _mm512_cvtepu16_epi32(rounded(g[0][place])), high = _mm512_cvtepu16_epi32(rounded(g[1][place]));
            _mm512_store_si512(out + (place * of->pairs + p) * wide, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

static int64_t wide_of(const Convolution *of, int64_t k) { /* channels in a row of the factors of k's tile; what is beyond the last is never used */
    return (LEAST(TILE, of->s.channels - k / TILE * TILE) + LANES - 1) / LANES * LANES;
}

static void transform_weights(void *data, Thread thread) {
    Convolution *of = data;
    int64_t parts = (of->s.channels + LANES - 1) / LANES;
    for (int64_t part = parts * thread.number / thread.count; part < parts * (thread.number + 1) / thread.count; part++) {
        int64_t k = part * LANES, wide = wide_of(of, k);
        uint32_t *out = of->factors + k / TILE * TILE * PLACES * of->pairs + k % TILE;
        if (of->is_gradient)
            factors_of_gradient(of, k, out, wide);
        else
            for (int64_t i = 0; i < LEAST(LANES, of->s.channels - k); i++) factors_of_channel(of, k + i, out + i, wide);
    }
}

/* The pixels that a tile sees; the place of its first output. */
static int64_t look(const Convolution *of, int64_t tile, const uint16_t **pixels, int64_t *row, int64_t *column) {
    const Shape *s = &of->s;
    int64_t image = tile / (of->tile_rows * of->tile_columns);
    *row = tile / of->tile_columns % of->tile_rows * 2, *column = tile % of->tile_columns * 2;
    for (int i = 0; i < 16; i++) {
        int64_t r = *row + i / 4 - s->pad, c = *column + i % 4 - s->pad;
        int inside = r >= 0 && r < s->rows_in && c >= 0 && c < s->columns_in;
        pixels[i] = inside ? of->x + ((image * s->rows_in + r) * s->columns_in + c) * s->channels_in : NULL;
    }
    return (image * s->rows + *row) * s->columns + *column;
}

/* A' m A of 16 channels of a tile, written where there are outputs. */
WIDE static void write_outputs(const Convolution *of, const float *m, int64_t place, int64_t at, int64_t rows, int64_t columns,
                               int64_t k) {
    __mmask16 some = first(of->s.channels - k);
    __m512 bias = of->bias ? _mm512_maskz_loadu_ps(some, of->bias + k) : _mm512_setzero_ps(), y[2][4];
    EACH for (int j = 0; j < 4; j++) {
        __m512 x[4];
        EACH for (int i = 0; i < 4; i++) x[i] = _mm512_load_ps(m + (4 * i + j) * place);
        y[0][j] = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), x[2]);
        y[1][j] = _mm512_sub_ps(_mm512_sub_ps(x[1], x[2]), x[3]);
    }
    for (int i = 0; i < LEAST(2, rows); i++) {
        uint16_t *out = of->y + (at + i * of->s.columns) * of->s.channels + k;
        __m512 left = _mm512_add_ps(_mm512_add_ps(y[i][0], y[i][1]), y[i][2]);
        __m512 right = _mm512_sub_ps(_mm512_sub_ps(y[i][1], y[i][2]), y[i][3]);
        _mm256_mask_storeu_epi16(out, some, rounded(_mm512_add_ps(left, bias)));
        if (columns > 1) _mm256_mask_storeu_epi16(out + of->s.channels, some, rounded(_mm512_add_ps(right, bias)));
    }
}

static void convolve_block(const Convolution *of, int64_t start, int64_t tiles, uint16_t *x, float *m) {
    const uint16_t *pixels[16];
    int64_t row, column, place_x = tiles * of->wide_in;
    for (int64_t i = 0; i < tiles; i++) {
        look(of, start + i, pixels, &row, &column);
        for (int64_t c = 0; c < of->wide_in; c += LANES)
            transform_pixels(pixels, c, first(of->s.channels_in - c), x + i * of->wide_in + c, place_x);
    }
    for (int64_t k = 0; k < of->s.channels; k += TILE) {
        int64_t wide = wide_of(of, k), place_m = tiles * wide;
        for (int64_t place = 0; place < PLACES; place++) {
            const uint32_t *factors = of->factors + k * PLACES * of->pairs + place * of->pairs * wide;
            for (int64_t i = 0; i < tiles; i += SINGLES)
                kernels[wide / LANES - 1][LEAST(SINGLES, tiles - i) - 1](
                    m + place * place_m + i * wide, factors, (const uint32_t *)(x + place * place_x + i * of->wide_in),
                    of->wide_in / 2, of->pairs);
        }
        for (int64_t i = 0; i < tiles; i++) {
            int64_t at = look(of, start + i, pixels, &row, &column);
            for (int64_t c = 0; c < wide; c += LANES)
                write_outputs(of, m + i * wide + c, place_m, at, of->s.rows - row, of->s.columns - column, k + c);
        }
    }
}

static void convolve_blocks(void *data, Thread thread) {
    Convolution *of = data;
    int64_t tiles = of->s.images * of->tile_rows * of->tile_columns;
    uint16_t *x = aligned_alloc(64, (size_t)(PLACES * of->block * of->wide_in) * sizeof(uint16_t));
    float *m = aligned_alloc(64, PLACES * of->block * TILE * sizeof(float));
    (void)thread;
    if (x && m)
        for (int64_t start; (start = atomic_fetch_add(&of->next, of->block)) < tiles;)
            convolve_block(of, start, LEAST(of->block, tiles - start), x, m);
    else
        of->failed = 1;
    free(x), free(m);
}

/* Writes y [images][rows][columns][channels] of x, both bfloat16 with channels last; bias may be NULL. If it is the
   gradient of a convolution's input, x is that of its output, and pad is 2 - its padding. Returns 0 if there was no memory. */
int kasoku_conv3x3(const Shape *shape, const uint16_t *x, const uint16_t *weights, const float *bias, uint16_t *y,
                   int is_gradient, int threads) {
    Convolution of = {.s = *shape, .x = x, .weights = weights, .bias = bias, .y = y, .is_gradient = is_gradient};
    of.pairs = (of.s.channels_in + 1) / 2, of.wide_in = (of.s.channels_in + LANES - 1) / LANES * LANES;
    of.tile_rows = (of.s.rows + 1) / 2, of.tile_columns = (of.s.columns + 1) / 2;
    int64_t bytes = PLACES * (of.wide_in * (int64_t)sizeof(uint16_t) + TILE * (int64_t)sizeof(float));
    int64_t tiles = of.s.images * of.tile_rows * of.tile_columns, share = tiles / (2 * threads); /* two blocks a thread */
    of.block = LEAST(BLOCK / bytes, share) / SINGLES * SINGLES;
    of.block = of.block < SINGLES ? SINGLES : of.block;
    int64_t wide = (of.s.channels + LANES - 1) / LANES * LANES;
    of.factors = aligned_alloc(64, (size_t)(PLACES * of.pairs * wide) * sizeof(uint32_t));
    if (!of.factors) return 0;
    run_on_threads(transform_weights, &of, threads);
    run_on_threads(convolve_blocks, &of, threads);
    free(of.factors);
    return !of.failed;
}
#endif
