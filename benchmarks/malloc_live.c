/* Counts the bytes that malloc has given out and not got back: loaded ahead of libc (LD_PRELOAD), read through ctypes. */
#include <errno.h>
#include <malloc.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static long live, peak;

static void *taken(void *p) {
    if (p) {
        long now = __atomic_add_fetch(&live, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
        long most = __atomic_load_n(&peak, __ATOMIC_RELAXED);
        while (now > most && !__atomic_compare_exchange_n(&peak, &most, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }
    return p;
}

static void given_back(void *p) {
    if (p) __atomic_sub_fetch(&live, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
}

long kasoku_live_bytes(void) { return __atomic_load_n(&live, __ATOMIC_RELAXED); }
long kasoku_peak_bytes(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED); }
void kasoku_reset_peak(void) { __atomic_store_n(&peak, live, __ATOMIC_RELAXED); }

void *malloc(size_t n) { return taken(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return taken(__libc_calloc(n, size)); }
void free(void *p) { given_back(p); __libc_free(p); }
void *memalign(size_t align, size_t n) { return taken(__libc_memalign(align, n)); }
void *aligned_alloc(size_t align, size_t n) { return taken(__libc_memalign(align, n)); }

void *realloc(void *p, size_t n) {
    given_back(p);
    void *q = __libc_realloc(p, n);
    taken(q ? q : n ? p : NULL); /* refused: p is still there */
    return q;
}

int posix_memalign(void **out, size_t align, size_t n) {
    void *p = taken(__libc_memalign(align, n));
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}
