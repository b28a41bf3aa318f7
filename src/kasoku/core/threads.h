/* Work on the threads of torch's own OpenMP: after each of torch's operations these spin for a while, and a pool of
   other threads would have to take the cores from them. */

#ifndef KASOKU_THREADS_H
#define KASOKU_THREADS_H

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
    void *given;
    int (*count)(void), (*number)(void);
} Team;

static void work_of_thread(void *given) {
    Team *team = given;
    Thread thread = {team->number(), team->count()};
    team->work(team->given, thread);
}

/* Whether both functions stand in one library: the thread numbers of another OpenMP would be wrong. */
static int together(void *f, void *g) {
    Dl_info one, other;
    return dladdr(f, &one) && dladdr(g, &other) && one.dli_fbase == other.dli_fbase;
}

/* Calls `work` on at most `threads` threads at once; on one where torch has no GOMP_parallel. */
static void run_on_threads(void (*work)(void *, Thread), void *given, int threads) {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    Team team = {work, given, dlsym(RTLD_DEFAULT, "omp_get_num_threads"), dlsym(RTLD_DEFAULT, "omp_get_thread_num")};
    if (parallel && team.count && team.number && together(parallel, team.count) && together(parallel, team.number))
        parallel(work_of_thread, &team, (unsigned)threads, 0);
    else
        work(given, (Thread){0, 1});
}

#endif
