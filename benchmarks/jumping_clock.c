/* Shifts the time of day by the seconds in the file $KASOKU_CLOCK: loaded ahead of libc (LD_PRELOAD). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    char text[32] = {0};
    const char *name = getenv("KASOKU_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    long n = read(file, text, sizeof text - 1);
    close(file);
    return n > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t which, struct timespec *t) {
    int result = (int)syscall(SYS_clock_gettime, which, t);
    if (!result && which == CLOCK_REALTIME) t->tv_sec += shift();
    return result;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
