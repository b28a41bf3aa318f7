/* Mutated JPEG files, boxes and sizes for _jpeg.c and _pixels.c, built with a sanitizer (see __main__.py).

   usage: native SEEDS LAST COUNT SECONDS SEED
   SEEDS: a file of JPEG files, each behind its length (4 bytes, little-endian). LAST: where the input under test is
   kept, as a finding ends the process. The files, the pixels and the results lie in blocks of exactly their size. Each
   crop is computed on scratch memory of two contents and without AVX2: all three results must be equal.

   Prints one JSON object: inputs, accepted (headers that were read), crops, differing. */

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "../../src/kasoku/data/decode/_jpeg.c"
#undef INLINE
#include "../../src/kasoku/data/decode/_pixels.c"

static uint64_t state;
static uint32_t draw(uint32_t n) { /* 0 to n - 1; 0 for 0 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return n ? (uint32_t)(state >> 32) % n : 0;
}
static double uniform(void) { return draw(1u << 30) / (double)(1u << 30); }

typedef struct {
    uint8_t *data;
    size_t size;
} File;

enum { MOST_BYTES = 1 << 20, MOST_PIXELS = 1 << 20, MOST_OUT = 300 };
static File *seeds;
static uint32_t seed_count;
static uint8_t work[2 * MOST_BYTES];
static size_t size;

static void replace(size_t at, size_t gone, const uint8_t *with, size_t n) {
    if (at > size || gone > size - at || size - gone + n > MOST_BYTES) return;
    memmove(work + at + n, work + at + gone, size - at - gone);
    if (with) memcpy(work + at, with, n);
    size += n - gone;
}

/* The start of each segment up to the scan, and of the scan itself, which comes last; returns their number. */
static int segments(size_t at[64]) {
    int n = 0;
    for (size_t p = 2; n < 63 && p + 4 <= size && work[p] == 0xFF;) {
        at[n++] = p;
        size_t length = (size_t)u16(work + p + 2);
        if (work[p + 1] == 0xDA || length < 2 || p + 2 + length > size) break;
        p += 2 + length;
    }
    return n;
}

static void change_byte(size_t at) {
    static const uint8_t special[] = {0, 1, 2, 7, 8, 0x0F, 0x10, 0x11, 0x12, 0x21, 0x22, 0x3F, 0x40, 0x7F, 0x80, 0xD0, 0xFE, 0xFF};
    if (at >= size) return;
    switch (draw(3)) {
        case 0: work[at] ^= (uint8_t)(1 << draw(8)); break;
        case 1: work[at] = (uint8_t)draw(256); break;
        default: work[at] = special[draw(sizeof special)];
    }
}

static void mutate(void) {
    size_t at[64];
    int n = segments(at);
    if (!n) {
        change_byte(draw((uint32_t)size));
        return;
    }
    int i = (int)draw((uint32_t)n);
    size_t scan = at[n - 1], length = (size_t)u16(work + at[i] + 2), start = scan + 2 + (size_t)u16(work + scan + 2);
    if (start >= size) start = scan;
    switch (draw(10)) {
        case 0: case 1: case 2: change_byte(start + draw((uint32_t)(size - start))); break;
        case 3: change_byte(at[i] + draw((uint32_t)length + 2)); break; /* anywhere in a segment */
        case 4: /* large quantisers, so that sums overflow */
            for (int k = 0; k < n; k++)
                for (size_t q = 5; work[at[k] + 1] == 0xDB && q < 69 && at[k] + q < size; q++)
                    if (draw(2)) work[at[k] + q] = (uint8_t)(128 + draw(128));
            break;
        case 5: /* a segment goes, or comes twice */
            if (i < n - 1 && draw(2)) replace(at[i], length + 2, NULL, 0);
            else if (i < n - 1) {
                static uint8_t copy[1 << 17];
                memcpy(copy, work + at[i], length + 2);
                replace(at[draw((uint32_t)n)], 0, copy, length + 2);
            }
            break;
        case 6: /* the scan ends early */
            if (size - start > 4) replace(start + draw((uint32_t)(size - start - 2)), draw((uint32_t)(size - start - 2)), NULL, 0);
            break;
        case 7: { /* bytes come in */
            uint8_t some[16];
            for (int k = 0; k < 16; k++) some[k] = draw(3) ? (uint8_t)draw(256) : 0xFF;
            replace(start + draw((uint32_t)(size - start)), 0, some, 1 + draw(16));
            break;
        }
        case 8: { /* a restart interval */
            uint8_t dri[6] = {0xFF, 0xDD, 0, 4, 0, (uint8_t)draw(64)};
            replace(scan, 0, dri, 6);
            break;
        }
        default: /* size or sampling in the frame */
            for (int k = 0; k < n; k++)
                if (work[at[k] + 1] == 0xC0 || work[at[k] + 1] == 0xC1) change_byte(at[k] + 4 + 1 + draw(14));
    }
}

static void draw_box(double box[4], int width, int height) {
    double w = width, h = height;
    switch (draw(8)) {
        case 0: box[0] = box[1] = 0, box[2] = w, box[3] = h; return;
        case 1: box[0] = w * uniform(), box[1] = h * uniform(), box[2] = box[0] + 1e-9, box[3] = box[1] + 1e-9; return;
        case 2: { /* what no caller gives */
            const double odd[] = {NAN, INFINITY, -INFINITY, -1e-300, -1, w + 1, h + 1, 0, 1e300};
            for (int i = 0; i < 4; i++) box[i] = odd[draw(sizeof odd / sizeof *odd)];
            return;
        }
        default:
            for (int axis = 0; axis < 2; axis++) {
                double whole = axis ? h : w, a = whole * uniform(), b = whole * uniform();
                if (draw(2)) a = floor(a), b = ceil(b);
                box[axis] = fmin(a, b), box[2 + axis] = fmax(a, b);
            }
    }
}

static void fill_scratch(Jpeg *j, int value) {
    if (!j->memory) return;
    ALLOW(j->memory, j->size);
    memset(j->memory, value, j->size);
}

static void fail(const char *why) {
    fprintf(stderr, "finding: %s\n", why);
    abort();
}

/* The same crop three times; with `planes` of these pixels, else of the opened file. Returns whether it was done. */
static int crops(Jpeg *j, const uint8_t *planes, int columns, int rows) {
    int width = draw(4) ? 1 + (int)draw(MOST_OUT) : (int)draw(40) - 1, height = draw(4) ? 1 + (int)draw(MOST_OUT) : (int)draw(40) - 1;
    size_t bytes = width > 0 && height > 0 ? 3 * (size_t)width * (size_t)height : 0;
    uint8_t *out[3];
    int error[3];
    double box[4];
    draw_box(box, columns, rows);
    const uint8_t *scan = j->scan;
    for (int i = 0; i < 3; i++) {
        out[i] = malloc(bytes ? bytes : 1);
        fill_scratch(j, i == 1 ? 0x5A : 0xA5);
        kasoku_jpeg_plain(i == 2);
        j->scan = scan;
        error[i] = planes ? kasoku_planes_crop(j, planes, columns, rows, box, width, height, out[i])
                          : kasoku_jpeg_crop(j, box, width, height, out[i]);
    }
    for (int i = 1; i < 3; i++) {
        if (error[i] != error[0]) fail("the same crop ends in another way");
        if (!error[0] && memcmp(out[i], out[0], bytes)) fail(i == 1 ? "pixels depend on old memory" : "AVX2 gives other pixels");
    }
    for (int i = 0; i < 3; i++) free(out[i]);
    return !error[0];
}

static void check_pixels(void) {
    size_t images = draw(4), rows = draw(20), width = draw(40), channels = 1 + draw(4), bytes = draw(2) ? 4 : 2;
    size_t n = images * rows * width * channels;
    uint8_t *in = malloc(n ? n : 1), *flip = draw(2) ? malloc(images ? images : 1) : NULL, *table = malloc(256 * channels * bytes);
    uint8_t *out = malloc(n ? n * bytes : 1);
    for (size_t i = 0; i < n; i++) in[i] = (uint8_t)draw(256);
    for (size_t i = 0; flip && i < images; i++) flip[i] = (uint8_t)draw(2);
    for (size_t i = 0; i < 256 * channels * bytes; i++) table[i] = (uint8_t)draw(256);
    kasoku_looked_up(in, flip, images, rows, width, channels, table, (int)bytes, out);
    for (size_t i = 0; i < n; i++) {
        size_t c = i % channels, x = i / channels % width, line = i / channels / width, image = line / rows;
        size_t from = (line * width + (flip && flip[image] ? width - 1 - x : x)) * channels + c;
        if (memcmp(out + i * bytes, table + (256 * c + in[from]) * bytes, bytes)) fail("_pixels.c looks up another number");
    }
    free(in), free(flip), free(table), free(out);
}

static void load_seeds(const char *path) {
    FILE *f = fopen(path, "rb");
    uint8_t head[4];
    while (f && fread(head, 1, 4, f) == 4) {
        size_t n = (size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24;
        seeds = realloc(seeds, (seed_count + 1) * sizeof *seeds);
        seeds[seed_count] = (File){malloc(n), n};
        if (fread(seeds[seed_count++].data, 1, n, f) != n) exit(2);
    }
    if (!seed_count) exit(2);
    fclose(f);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    load_seeds(argv[1]);
    FILE *last = fopen(argv[2], "wb+");
    if (!last || fseek(last, MOST_BYTES + 8, SEEK_SET) || fputc(0, last) == EOF || fflush(last)) return 2;
    uint8_t *kept = mmap(NULL, MOST_BYTES + 8, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(last), 0);
    long count = atol(argv[3]), inputs = 0, accepted = 0, done = 0;
    time_t until = time(NULL) + atol(argv[4]);
    state = 0x9E3779B97F4A7C15u * (uint64_t)(atol(argv[5]) + 1);
    Jpeg *j = kasoku_jpeg_new();
    for (; inputs < count && time(NULL) < until; inputs++) {
        alarm(20); /* ends the process at an input that takes longer */
        const File *seed = &seeds[draw(seed_count)];
        size = seed->size;
        memcpy(work, seed->data, size);
        for (int n = (int)draw(6); n > 0; n--) mutate();
        uint64_t length = size;
        memcpy(kept, &length, 8), memcpy(kept + 8, work, size);
        uint8_t *data = malloc(size ? size : 1);
        memcpy(data, work, size);
        int32_t width, height;
        if (!kasoku_jpeg_open(j, data, size, &width, &height) && (int64_t)width * height <= MOST_PIXELS) {
            accepted++;
            for (int i = 0; i < 2; i++) done += crops(j, NULL, width, height);
        }
        free(data);
        if (inputs % 16 == 0) {
            int columns = 1 + (int)draw(200), rows = 1 + (int)draw(200);
            size_t n = 3 * (size_t)columns * (size_t)rows;
            uint8_t *planes = malloc(n);
            for (size_t i = 0; i < n; i++) planes[i] = (uint8_t)draw(256);
            done += crops(j, planes, columns, rows);
            free(planes);
            check_pixels();
        }
        if (inputs % 256 == 255) kasoku_jpeg_free(j), j = kasoku_jpeg_new();
    }
    kasoku_jpeg_free(j);
    printf("{\"inputs\": %ld, \"accepted\": %ld, \"crops\": %ld}\n", inputs, accepted, done);
    return 0;
}
