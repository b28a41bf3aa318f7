/* The LARS step of one device's float32 tensors: two norms, then the update, while the tensor is still in the cache.

   Sums: a block's squares are added in double, blocks in their order, so that the number of threads changes no bit. */

#include "../../core/openmp.h"
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define BLOCK 2048 /* values whose squares one thread adds up */
#define LANES 16
#define LEAST(a, b) ((a) < (b) ? (a) : (b))

#if defined(__x86_64__) && defined(__GNUC__) && defined(__GLIBC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

typedef struct {
    float *w;
    const float *g;
    float *v;
    int64_t n, layerwise;
} Tensor;

typedef struct { /* as Rule in foreach.py has them */
    double keep, rate, d0, d1, decay, eta, eps, out, shrink, of_step, of_v;
} Numbers;

typedef struct {
    const Tensor *tensors;
    const Numbers *numbers; /* of each tensor */
    size_t count;
    double *squares;      /* of w and g, for each block of each tensor */
    atomic_int *added_up; /* threads that have the squares of a tensor */
    int used;             /* how many threads worked */
} Step;

WIDE static double sum_of_squares(const float *x, int64_t n) {
    double sums[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += (double)x[i + j] * x[i + j];
    for (; i < n; i++) sum += (double)x[i] * x[i];
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

WIDE static void move(float *restrict w, float *restrict v, const float *restrict g, int64_t n,
                      double rate, const Numbers *of) { /* rate: with the trust */
    float keep = (float)of->keep, shrink = (float)of->shrink, f = (float)rate, d = (float)(of->d0 + of->d1 * rate);
    float of_step = (float)(of->out * of->of_step), of_v = (float)(of->out * of->of_v);
    for (int64_t i = 0; i < n; i++) {
        float step = f * g[i] + d * w[i];
        v[i] = keep * v[i] + step;
        w[i] = shrink * w[i] - of_step * step - of_v * v[i];
    }
}

static double trust(const Numbers *of, const double *squares, int64_t blocks) {
    double w = 0, g = 0;
    for (int64_t b = 0; b < blocks; b++) w += squares[2 * b], g += squares[2 * b + 1];
    w = sqrt(w), g = sqrt(g);
    return w == 0 || g == 0 ? 1 : of->eta * w / (g + of->decay * w + of->eps);
}

static void wait_for(atomic_int *counter, int least) {
    for (int turn = 0; atomic_load(counter) < least; turn++)
        if (turn > 1000) sched_yield();
}

static void work(void *data, Thread thread) {
    Step *step = data;
    int number = thread.number, threads = thread.count;
    double *squares = step->squares;
    if (number == 0) step->used = threads;
    for (size_t k = 0; k < step->count; k++) {
        const Tensor *t = &step->tensors[k];
        const Numbers *of = &step->numbers[k];
        int64_t blocks = (t->n + BLOCK - 1) / BLOCK, first = blocks * number / threads;
        int64_t end = blocks * (number + 1) / threads;
        double f = of->rate;
        if (t->layerwise) {
            for (int64_t b = first, at = b * BLOCK; b < end; b++, at += BLOCK) {
                squares[2 * b] = sum_of_squares(t->w + at, LEAST(t->n - at, BLOCK));
                squares[2 * b + 1] = sum_of_squares(t->g + at, LEAST(t->n - at, BLOCK));
            }
            atomic_fetch_add(&step->added_up[k], 1);
            wait_for(&step->added_up[k], threads);
            f *= trust(of, squares, blocks);
            squares += 2 * blocks;
        }
        int64_t at = first * BLOCK, n = LEAST(t->n, end * BLOCK) - at;
        if (n > 0) move(t->w + at, t->v + at, t->g + at, n, f, of);
    }
}

/* Moves tensors by their rules. Returns how many threads did it; 0: there was no memory, and nothing was done. */
int kasoku_lars_step(const Tensor *tensors, const Numbers *numbers, size_t count, int threads) {
    int64_t blocks = 0;
    for (size_t k = 0; k < count; k++) blocks += (tensors[k].n + BLOCK - 1) / BLOCK;
    double *squares = malloc(sizeof(double) * (size_t)(2 * blocks + 1));
    atomic_int *added_up = calloc(count + 1, sizeof(atomic_int));
    int used = 0;
    if (squares && added_up) {
        Step step = {tensors, numbers, count, squares, added_up, 0};
        run_on_threads(work, &step, threads);
        used = step.used;
    }
    free(squares), free(added_up);
    return used;
}
