/* GELU and 2x2 max-pools of bfloat16 maps by AVX-512, forward and backward: one pass over memory each. */

#include "../core/openmp.h"
#include <string.h>

#include "avx512.h"
#ifdef AVX512
enum { BLOCK = 4096, TERMS = 17 };

/* The normal distribution's Phi(x) = 1/2 + x p(s), and d/dx (x Phi(x)) = Phi(x) + x phi(x) in the same form, where
   s = 2 (x / LIMIT)^2 - 1 lies between -1 and 1. Chebyshev fits of degree 16 in s, at 400 nodes. x Phi(x) and the slope are within 1e-6,
   also beyond LIMIT, where Phi and the slope are taken as 0 or 1. */
#define LIMIT 5.5f
static const float PHI[TERMS] = {
    1.285519330e-01f, -6.417231467e-02f, 4.773733464e-02f, -3.879379390e-02f, 3.207690945e-02f,
    -2.603615149e-02f, 2.030731692e-02f, -1.506252402e-02f, 1.046863700e-02f, -6.650678354e-03f,
    4.074129651e-03f, -2.658702378e-03f, 1.407426470e-03f, -3.567546138e-04f, 1.839166675e-04f,
    -2.856763179e-04f, 1.180799948e-04f};
static const float SLOPE[TERMS] = {
    1.287592166e-01f, -6.573959890e-02f, 5.366413533e-02f, -5.374856643e-02f, 6.034012546e-02f,
    -6.858412463e-02f, 7.402069784e-02f, -7.435018829e-02f, 6.617926755e-02f, -4.926965142e-02f,
    3.701883914e-02f, -3.323758841e-02f, 1.983454579e-02f, -2.537024935e-03f, 1.881005503e-03f,
    -6.020921640e-03f, 2.699041159e-03f};

typedef struct {
    const uint16_t *x, *dy;
    uint16_t *out;
    int64_t n;
} Gelu;

INLINE __mmask16 lanes(int64_t n) { return n >= LANES ? 0xffff : (__mmask16)((1 << n) - 1); }

INLINE __m512 load(const uint16_t *at, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at)), 16));
}

INLINE __m512 share(__m512 x, const float *p) {
    const __m512 limit = _mm512_set1_ps(LIMIT);
    __m512 inside = _mm512_max_ps(_mm512_set1_ps(-LIMIT), _mm512_min_ps(limit, x)); /* NaN stays */
    __m512 scale = _mm512_set1_ps(2 / (LIMIT * LIMIT)), sum = _mm512_set1_ps(p[TERMS - 1]);
    __m512 s = _mm512_fmsub_ps(_mm512_mul_ps(inside, inside), scale, _mm512_set1_ps(1));
    EACH for (int i = TERMS - 2; i >= 0; i--) sum = _mm512_fmadd_ps(sum, s, _mm512_set1_ps(p[i]));
    sum = _mm512_fmadd_ps(inside, sum, _mm512_set1_ps(.5f));
    sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), _mm512_set1_ps(1));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-LIMIT), _CMP_NLT_UQ), sum);
}

WIDE static void gelu_on_thread(void *data, Thread thread) {
    const Gelu *of = data;
    int64_t blocks = (of->n + BLOCK - 1) / BLOCK, first = blocks * thread.number / thread.count * BLOCK;
    int64_t end = LEAST(of->n, blocks * (thread.number + 1) / thread.count * BLOCK);
    for (int64_t i = first; i < end; i += LANES) {
        __mmask16 mask = lanes(end - i);
        __m512 x = load(of->x + i, mask);
        __m512 y = of->dy ? _mm512_mul_ps(load(of->dy + i, mask), share(x, SLOPE)) : _mm512_mul_ps(x, share(x, PHI));
        _mm256_mask_storeu_epi16(of->out + i, mask, (__m256i)_mm512_cvtneps_pbh(y));
    }
}

/* out = x Phi(x), or with dy the gradient dy (Phi(x) + x phi(x)); n values of each. */
void kasoku_gelu(const uint16_t *x, const uint16_t *dy, uint16_t *out, int64_t n, int threads) {
    Gelu of = {x, dy, out, n};
    run_on_threads(gelu_on_thread, &of, threads);
}

typedef struct {
    uint16_t *big, *small; /* of the map before the pool and after it, or of their gradients */
    uint8_t *places;       /* of each maximum in its window, 0 to 3 */
    int64_t images, rows, columns, channels; /* of the big one */
    int backward;
} Pool;

/* A window of all channels: pixels at `upper` and `lower`, and after each of them. */
WIDE static void pool(uint16_t *out, uint8_t *places, const uint16_t *upper, const uint16_t *lower, int64_t channels) {
    for (int64_t i = 0; i < channels; i += LANES) {
        __mmask16 mask = lanes(channels - i);
        __m512 most = load(upper + i, mask);
        __m512i place = _mm512_setzero_si512();
        for (int k = 1; k < 4; k++) {
            __m512 value = load((k / 2 ? lower : upper) + i + k % 2 * channels, mask);
            __mmask16 more = _mm512_cmp_ps_mask(value, most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            most = _mm512_mask_mov_ps(most, more, value); /* NaN stays, as in torch */
            place = _mm512_mask_mov_epi32(place, more, _mm512_set1_epi32(k));
        }
        _mm256_mask_storeu_epi16(out + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(most), 16)));
        _mm_mask_storeu_epi8(places + i, mask, _mm512_cvtepi32_epi8(place));
    }
}

WIDE static void unpool(uint16_t *upper, uint16_t *lower, const uint16_t *dy, const uint8_t *places, int64_t channels) {
    for (int64_t i = 0; i < channels; i += LANES) {
        __mmask16 mask = lanes(channels - i);
        __m128i place = _mm_maskz_loadu_epi8(mask, places + i);
        __m256i value = _mm256_maskz_loadu_epi16(mask, dy + i);
        for (int k = 0; k < 4; k++) {
            uint16_t *at = (k / 2 ? lower : upper) + i + k % 2 * channels;
            __mmask16 here = _mm_cmpeq_epi8_mask(place, _mm_set1_epi8((char)k));
            _mm256_mask_storeu_epi16(at, mask, _mm256_maskz_mov_epi16(here, value));
        }
    }
}

static void pool_on_thread(void *data, Thread thread) {
    const Pool *of = data;
    int64_t rows = of->rows / 2, columns = of->columns / 2, line = of->columns * of->channels;
    int64_t last = of->images * rows * (thread.number + 1) / thread.count;
    for (int64_t r = of->images * rows * thread.number / thread.count; r < last; r++) {
        uint16_t *upper = of->big + (r / rows * of->rows + r % rows * 2) * line, *lower = upper + line;
        for (int64_t c = 0; c < columns; c++) {
            int64_t at = (r * columns + c) * of->channels, in = 2 * c * of->channels;
            if (of->backward)
                unpool(upper + in, lower + in, of->small + at, of->places + at, of->channels);
            else
                pool(of->small + at, of->places + at, upper + in, lower + in, of->channels);
        }
        if (!of->backward) continue;
        int64_t rest = (of->columns - 2 * columns) * of->channels;
        memset(upper + line - rest, 0, (size_t)rest * sizeof *upper);
        memset(lower + line - rest, 0, (size_t)rest * sizeof *lower);
        if (r % rows == rows - 1) memset(lower + line, 0, (size_t)((of->rows - 2 * rows) * line) * sizeof *lower);
    }
}

/* A max-pool of 2x2 pixels side by side, of maps with channels last; backward: writes all of the big one. */
void kasoku_pool(uint16_t *big, uint16_t *small, uint8_t *places, const int64_t *shape, int backward, int threads) {
    Pool of = {big, small, places, shape[0], shape[1], shape[2], shape[3], backward};
    run_on_threads(pool_on_thread, &of, threads);
}
#endif
