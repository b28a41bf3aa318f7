/* Work on the threads of torch's own OpenMP: after each of torch's operations these spin for a while, and a pool of
   other threads would have to take the cores from them. */

#ifndef KASOKU_OPENMP_H
#define KASOKU_OPENMP_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stddef.h>

typedef struct {
    int number, count; /* this thread, of how many */
} Thread;

typedef struct {
    void (*work)(void *, Thread);
    void *data;
    int (*count)(void), (*number)(void);
} Team;

static void work_of_thread(void *data) {
    Team *team = data;
    Thread thread = {team->number(), team->count()};
    team->work(team->data, thread);
}

/* Whether both functions stand in one library: the thread numbers of another OpenMP would be wrong. */
static int same_library(void *f, void *g) {
    Dl_info one, other;
    return dladdr(f, &one) && dladdr(g, &other) && one.dli_fbase == other.dli_fbase;
}

/* Calls `work` on at most `threads` threads at once; on one where torch has no GOMP_parallel. */
static void run_on_threads(void (*work)(void *, Thread), void *data, int threads) {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    Team team = {work, data, dlsym(RTLD_DEFAULT, "omp_get_num_threads"), dlsym(RTLD_DEFAULT, "omp_get_thread_num")};
    if (parallel && team.count && team.number && same_library(parallel, team.count) && same_library(parallel, team.number))
        parallel(work_of_thread, &team, (unsigned)threads, 0);
    else
        work(data, (Thread){0, 1});
}

#endif
