/* Batches of pixels made into the numbers that a network takes. */

#include <stddef.h>
#include <stdint.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

INLINE void lines(const uint8_t *in, size_t width, size_t channels, int flip, const void *table, int wide, void *out) {
    for (size_t x = 0; x < width; x++) {
        const uint8_t *pixel = in + (flip ? width - 1 - x : x) * channels;
        for (size_t c = 0; c < channels; c++) {
            size_t at = x * channels + c;
            if (wide) ((uint32_t *)out)[at] = ((const uint32_t *)table)[256 * c + pixel[c]];
            else ((uint16_t *)out)[at] = ((const uint16_t *)table)[256 * c + pixel[c]];
        }
    }
}

/* Memory that is written for the first time is given out by the kernel page by page, which takes longer than writing:
   by 2 MiB at a time where there is much of it. */
static void ask_for_large_pages(char *from, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    size_t page = 2 << 20, before = (page - (uintptr_t)from % page) % page;
    if (bytes >= before + page) madvise(from + before, (bytes - before) / page * page, MADV_HUGEPAGE);
#else
    (void)from, (void)bytes;
#endif
}

/* images x rows x width x channels bytes become numbers of `bytes` (2 or 4) bytes: table[channel][byte]. Images of which
   `flip` is not 0 are mirrored left to right; NULL: none is. */
void kasoku_looked_up(const uint8_t *in, const uint8_t *flip, size_t images, size_t rows, size_t width, size_t channels,
                      const void *table, int bytes, void *out) {
    size_t line = width * channels;
    ask_for_large_pages(out, images * rows * line * (size_t)bytes);
    for (size_t i = 0; i < images; i++)
        for (size_t y = 0; y < rows; y++, in += line, out = (char *)out + line * (size_t)bytes) {
            int mirrored = flip && flip[i];
            if (bytes == 4 && channels == 3) lines(in, width, 3, mirrored, table, 1, out);
            else if (channels == 3) lines(in, width, 3, mirrored, table, 0, out);
            else lines(in, width, channels, mirrored, table, bytes == 4, out);
        }
}
