/* A crop of a JPEG file, resized: only what the crop needs is decoded.

   Baseline and extended sequential JPEGs of 8 bits with Huffman codes, grey or YCbCr, chroma as fine as luma or half as
   fine in either direction, in one scan. Anything else is left to another decoder (JPEG_OTHER), and so is whatever looks
   damaged (JPEG_DAMAGED): what such files mean is for a library to say.

   How time is saved. Entropy decoding is most of a JPEG's cost. A code and the value behind it are found by one look
   into a table where they fit it; blocks outside the crop are read over without storing anything; rows below it are not
   read at all, and rows above it neither where restart markers show where they end. The cosine transform, upsampling and
   colour touch only the pixels that the filter of the resizing reaches.

   Ref: ITU-T T.81; weights of the filter as Pillow's resize(BILINEAR, box); upsampling and colour as libjpeg's. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { JPEG_OK = 0, JPEG_OTHER = 1, JPEG_DAMAGED = 2, JPEG_MEMORY = 3 };
enum { LOOK = 10, ROWS = 8 };

#define ONES 0x0101010101010101u
#define HIGHEST 0x8080808080808080u
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint8_t b8 __attribute__((vector_size(8)));

/* Zigzag place -> place in the block. */
static const uint8_t ZIGZAG[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

typedef struct {
    uint32_t look[1 << LOOK]; /* see entry() */
    int32_t max[18];          /* largest code of each length, to the left of 16 bits; -1: none */
    int32_t offset[17];       /* of the first code of each length in values */
    uint8_t values[256];
    int there;
} Codes;

/* An entry of `look`: bits to take, run, size of the value still to be read, the value if it is in it already. */
#define ENTRY_BITS(e) ((e) & 31)
#define ENTRY_RUN(e) ((e) >> 5 & 15)
#define ENTRY_SIZE(e) ((e) >> 9 & 15)
#define ENTRY_DONE 8192u /* the value is known */
#define ENTRY_VALUE(e) ((int32_t)(e) >> 16)

typedef struct {
    int h, v, quant, dc, ac, id;
    int width, height; /* of its plane, in samples */
    int prediction;
    uint8_t *plane; /* of the blocks that the crop needs */
    size_t stride;
} Component;

typedef struct {
    int start, count;
    float *weight;
} Taps;

typedef struct {
    const uint8_t *p, *end;
    uint64_t bits; /* the next ones, from the highest on */
    int count;     /* that are there */
    int missing;   /* bytes that were read past the end or a marker */
} Reader;

typedef struct {
    int width, height, components, restart, scan_components;
    int hmax, vmax;
    Component part[3];
    float quant[4][64]; /* in zigzag order, with the scale of the transform */
    int quant_there[4];
    Codes dc[4], ac[4];
    int adobe, orientation;
    const uint8_t *scan, *end;
    /* scratch memory, kept from call to call */
    uint8_t *memory;
    size_t size;
} Jpeg;

/* ---- markers */

static int u16(const uint8_t *p) { return p[0] << 8 | p[1]; }

static int exif_orientation(const uint8_t *p, size_t n) {
    if (n < 14 || memcmp(p, "Exif\0\0", 6)) return 1;
    p += 6, n -= 6;
    int little = p[0] == 'I';
#define U16(q) (little ? (q)[0] | (q)[1] << 8 : (q)[0] << 8 | (q)[1])
#define U32(q) (little ? (uint32_t)U16(q) | (uint32_t)U16((q) + 2) << 16 : (uint32_t)U16(q) << 16 | (uint32_t)U16((q) + 2))
    uint32_t at = U32(p + 4);
    if (at > n || n - at < 2) return 1;
    int entries = U16(p + at);
    at += 2;
    for (int i = 0; i < entries && at <= n && n - at >= 12; i++, at += 12)
        if (U16(p + at) == 0x0112) return U16(p + at + 8);
    return 1;
}

static int read_quant(Jpeg *j, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        int wide = *p >> 4, id = *p & 15;
        p++;
        if (id > 3 || wide > 1 || end - p < 64 * (1 + wide)) return JPEG_DAMAGED;
        for (int k = 0; k < 64; k++) {
            int q = wide ? u16(p + 2 * k) : p[k];
            if (!q) return JPEG_DAMAGED;
            j->quant[id][k] = (float)q;
        }
        j->quant_there[id] = 1;
        p += 64 * (1 + wide);
    }
    return JPEG_OK;
}

static int extended(int value, int size) { return value < 1 << (size - 1) ? value - (1 << size) + 1 : value; }

/* What `look` says of the LOOK bits that follow a code of `length` bits for `symbol`. */
static uint32_t entry(int bits, int length, int symbol, int is_dc) {
    int run = is_dc ? 0 : symbol >> 4, size = is_dc ? symbol : symbol & 15;
    if (!size && (is_dc || !run)) return (uint32_t)(length | run << 5) | (is_dc ? ENTRY_DONE : 0); /* DC 0; end of block */
    if (size && length + size <= LOOK) {
        int value = extended(bits >> (LOOK - length - size) & ((1 << size) - 1), size);
        return (uint32_t)(length + size) | (uint32_t)run << 5 | ENTRY_DONE | (uint32_t)value << 16;
    }
    return (uint32_t)length | (uint32_t)run << 5 | (uint32_t)size << 9;
}

static int read_codes(Jpeg *j, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        if (end - p < 17) return JPEG_DAMAGED;
        int is_ac = *p >> 4, id = *p & 15, total = 0;
        if (is_ac > 1 || id > 3) return JPEG_DAMAGED;
        const uint8_t *counts = p + 1;
        for (int i = 0; i < 16; i++) total += counts[i];
        p += 17;
        if (total > 256 || end - p < total) return JPEG_DAMAGED;
        Codes *c = is_ac ? &j->ac[id] : &j->dc[id];
        memset(c, 0, sizeof *c);
        memcpy(c->values, p, (size_t)total);
        for (int i = 0; i < total; i++)
            if (is_ac ? (p[i] & 15) > 14 : p[i] > 11) return JPEG_OTHER; /* not of 8-bit images */
        p += total;
        int code = 0, k = 0;
        for (int length = 1; length <= 16; length++) {
            c->offset[length] = k - code;
            for (int i = 0; i < counts[length - 1]; i++, k++, code++) {
                if (code >= 1 << length) return JPEG_DAMAGED;
                if (length <= LOOK)
                    for (int rest = 0; rest < 1 << (LOOK - length); rest++) {
                        int bits = code << (LOOK - length) | rest;
                        c->look[bits] = entry(bits, length, c->values[k], !is_ac);
                    }
            }
            c->max[length] = counts[length - 1] ? code - 1 : -1;
            code <<= 1;
        }
        c->there = 1;
    }
    return JPEG_OK;
}

static int read_frame(Jpeg *j, const uint8_t *p, const uint8_t *end) {
    if (j->components || end - p < 6) return JPEG_DAMAGED;
    int n = p[5];
    j->height = u16(p + 1), j->width = u16(p + 3);
    if (p[0] != 8 || (n != 1 && n != 3) || !j->height) return JPEG_OTHER; /* 0 rows: told behind the scan */
    if (!j->width || end - p < 6 + 3 * n) return JPEG_DAMAGED;
    j->hmax = j->vmax = 1;
    for (int i = 0; i < n; i++) {
        Component *c = &j->part[i];
        const uint8_t *q = p + 6 + 3 * i;
        c->id = q[0], c->h = q[1] >> 4, c->v = q[1] & 15, c->quant = q[2];
        if (c->quant > 3) return JPEG_DAMAGED;
        if (n == 1) c->h = c->v = 1; /* alone a component's blocks follow each other row by row */
        if (c->h < 1 || c->v < 1 || c->h > 2 || c->v > 2 || (i && c->h * c->v != 1)) return JPEG_OTHER;
        if (c->h > j->hmax) j->hmax = c->h;
        if (c->v > j->vmax) j->vmax = c->v;
    }
    for (int i = 0; i < n; i++) {
        Component *c = &j->part[i];
        c->width = (j->width * c->h + j->hmax - 1) / j->hmax;
        c->height = (j->height * c->v + j->vmax - 1) / j->vmax;
    }
    j->components = n;
    return JPEG_OK;
}

static int read_scan(Jpeg *j, const uint8_t *p, const uint8_t *end) {
    int n = end - p < 1 ? 0 : p[0];
    if (!j->components || n < 1 || n > 4 || end - p < 4 + 2 * n) return JPEG_DAMAGED;
    if (n != j->components) return JPEG_OTHER; /* several scans */
    for (int i = 0; i < n; i++) {
        Component *c = &j->part[i];
        if (p[1 + 2 * i] != c->id) return JPEG_OTHER;
        c->dc = p[2 + 2 * i] >> 4, c->ac = p[2 + 2 * i] & 15;
        if (c->dc > 3 || c->ac > 3 || !j->dc[c->dc].there || !j->ac[c->ac].there || !j->quant_there[c->quant])
            return JPEG_DAMAGED;
    }
    return JPEG_OK;
}

static int read_headers(Jpeg *j, const uint8_t *data, size_t size) {
    uint8_t *memory = j->memory;
    size_t had = j->size;
    memset(j, 0, sizeof *j);
    j->memory = memory, j->size = had;
    j->orientation = 1, j->adobe = -1;
    const uint8_t *p = data, *end = data + size;
    if (size < 4 || p[0] != 0xFF || p[1] != 0xD8) return JPEG_OTHER;
    if (end[-2] != 0xFF || end[-1] != 0xD9) return JPEG_DAMAGED; /* cut off, or something behind it */
    j->end = end - 2;
    for (p += 2;;) {
        if (end - p < 4 || p[0] != 0xFF) return JPEG_DAMAGED;
        while (end - p > 4 && p[1] == 0xFF) p++; /* fill bytes */
        int marker = p[1], length = u16(p + 2), error = JPEG_OK;
        const uint8_t *q = p + 4;
        if (length < 2 || end - p - 2 < length) return JPEG_DAMAGED;
        p += 2 + length;
        switch (marker) {
            case 0xC0: case 0xC1: error = read_frame(j, q, p); break;
            case 0xC4: error = read_codes(j, q, p); break;
            case 0xDB: error = read_quant(j, q, p); break;
            case 0xDD: if (p - q < 2) return JPEG_DAMAGED; j->restart = u16(q); break;
            case 0xDA:
                j->scan = p;
                if ((error = read_scan(j, q, p))) return error;
                if (j->components == 3) {
                    int rgb = j->part[0].id == 'R' && j->part[1].id == 'G' && j->part[2].id == 'B';
                    if (j->adobe >= 0 ? j->adobe != 1 : rgb) return JPEG_OTHER; /* not YCbCr */
                }
                return j->orientation == 1 ? JPEG_OK : JPEG_OTHER;
            case 0xE1: if (j->orientation == 1) j->orientation = exif_orientation(q, (size_t)(p - q)); break;
            case 0xEE: if (p - q >= 12 && !memcmp(q, "Adobe", 5)) j->adobe = q[11]; break;
            case 0xFE: break;
            default:
                if (marker < 0xE0 || marker > 0xEF) return JPEG_OTHER;
        }
        if (error) return error;
    }
}

/* ---- entropy decoding */

INLINE uint64_t big_endian(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    w = __builtin_bswap64(w);
#endif
    return w;
}

static __attribute__((noinline)) void refill_slowly(Reader *r) {
    while (r->count <= 56) {
        uint64_t byte = 0;
        if (r->p < r->end && (r->p[0] != 0xFF || (r->end - r->p > 1 && r->p[1] == 0))) {
            byte = r->p[0];
            r->p += byte == 0xFF ? 2 : 1;
        } else {
            r->missing++; /* zeros, as often as asked for */
        }
        r->bits |= byte << (56 - r->count);
        r->count += 8;
    }
}

/* At least 56 bits. The bits of the byte that only partly fits are there already; it is read again with the next ones. */
#define REFILL(b, r)                                                                                           \
    do {                                                                                                       \
        uint64_t w_;                                                                                           \
        if ((b).end - (b).p >= 8 && (w_ = big_endian((b).p), !((~w_ - ONES) & w_ & HIGHEST))) {                  \
            (b).bits |= w_ >> (b).count; /* no byte of 255 */                                                  \
            (b).p += (63 - (b).count) >> 3;                                                                    \
            (b).count |= 56;                                                                                   \
        } else {                                                                                               \
            *(r) = (b), refill_slowly(r), (b) = *(r);                                                           \
        }                                                                                                      \
    } while (0)
#define TAKE(b, n) ((b).bits <<= (n), (b).count -= (int)(n))

/* A code that is longer than LOOK bits: length << 8 | symbol; -1: there is none such. */
static __attribute__((noinline)) int long_code(uint64_t bits, const Codes *c) {
    for (int length = LOOK + 1; length <= 16; length++) {
        int code = (int)(bits >> (64 - length));
        if (code <= c->max[length]) return length << 8 | c->values[c->offset[length] + code];
    }
    return -1;
}

INLINE int signed_value(uint64_t bits, int size) { /* of the first size > 0 bits */
    int value = (int)(bits >> (64 - size));
    return value + (((value - (1 << (size - 1))) >> 31) & (int)((~0u << size) + 1));
}

/* One block. With `out`: its coefficients that are not 0, dequantised; returns the zigzag place of the last one, or -1
   where there is no such code. */
INLINE int block(Reader *r, const Codes *dc, const Codes *ac, int *prediction, const float *quant, float *out) {
    Reader b = *r; /* in registers */
    int last = 0, symbol;
    REFILL(b, r);
    uint32_t e = dc->look[b.bits >> (64 - LOOK)];
    if (e & ENTRY_DONE) {
        TAKE(b, ENTRY_BITS(e));
        *prediction += ENTRY_VALUE(e);
    } else {
        int size = (int)ENTRY_SIZE(e);
        if (e) {
            TAKE(b, ENTRY_BITS(e));
        } else {
            if ((symbol = long_code(b.bits, dc)) < 0) return -1;
            TAKE(b, symbol >> 8);
            size = symbol & 255;
        }
        if (size) {
            *prediction += signed_value(b.bits, size);
            TAKE(b, size);
        }
    }
    if (out) out[0] = (float)*prediction * quant[0];
    for (int k = 1; k < 64; k++) {
        if (b.count < 32) REFILL(b, r);
        int value;
        e = ac->look[b.bits >> (64 - LOOK)];
        if (e & ENTRY_DONE) {
            TAKE(b, ENTRY_BITS(e));
            k += (int)ENTRY_RUN(e);
            value = ENTRY_VALUE(e);
        } else {
            int run = (int)ENTRY_RUN(e), size = (int)ENTRY_SIZE(e);
            if (e) {
                TAKE(b, ENTRY_BITS(e));
            } else {
                if ((symbol = long_code(b.bits, ac)) < 0) return -1;
                TAKE(b, symbol >> 8);
                run = symbol >> 4 & 15, size = symbol & 15;
            }
            if (!size) {
                if (run != 15) break; /* end of block */
                k += 15;
                continue;
            }
            k += run;
            value = signed_value(b.bits, size);
            TAKE(b, size);
        }
        if (k > 63) return -1;
        if (out) out[ZIGZAG[k]] = (float)value * quant[k], last = k;
    }
    *r = b;
    return last;
}

/* ---- the inverse cosine transform */

static float COSINE[8][8]; /* [frequency][place], with its norm */
static uint8_t LAST_ROW[64], LAST_COLUMN[64]; /* of the block, that places up to this one of the zigzag reach */

static void __attribute__((constructor)) tables(void) {
    for (int u = 0; u < 8; u++)
        for (int x = 0; x < 8; x++)
            COSINE[u][x] = (float)((u ? 0.5 : sqrt(0.125)) * cos((2 * x + 1) * u * 3.14159265358979323846 / 16));
    for (int k = 0, row = 0, column = 0; k < 64; k++) {
        if (ZIGZAG[k] / 8 > row) row = ZIGZAG[k] / 8;
        if (ZIGZAG[k] % 8 > column) column = ZIGZAG[k] % 8;
        LAST_ROW[k] = (uint8_t)row, LAST_COLUMN[k] = (uint8_t)column;
    }
}

INLINE b8 rounded(v8 x) {
    i8 n = __builtin_convertvector(x + 0.5f, i8); /* towards 0, which is down for what is not below 0 */
    i8 over = n > 255;
    n = ((n & ~over) | (over & 255)) & ~(n < 0);
    return __builtin_convertvector(n, b8);
}

INLINE void transform(const float *in, int last, uint8_t *out, size_t stride) {
    if (!last) {
        b8 flat = rounded((v8){} + (in[0] * 0.125f + 128));
        for (int y = 0; y < 8; y++) memcpy(out + (size_t)y * stride, &flat, 8);
        return;
    }
    int rows = LAST_ROW[last], columns = LAST_COLUMN[last];
    v8 x[8], c[8];
    float half[64] __attribute__((aligned(32)));
    for (int v = 0; v <= rows; v++) memcpy(&x[v], in + 8 * v, 32);
    for (int y = 0; y < 8; y++) {
        v8 sum = x[0] * COSINE[0][y];
        for (int v = 1; v <= rows; v++) sum += x[v] * COSINE[v][y];
        memcpy(half + 8 * y, &sum, 32);
    }
    for (int u = 0; u <= columns; u++) memcpy(&c[u], COSINE[u], 32);
    for (int y = 0; y < 8; y++) {
        v8 sum = half[8 * y] * c[0] + 128;
        for (int u = 1; u <= columns; u++) sum += half[8 * y + u] * c[u];
        b8 line = rounded(sum);
        memcpy(out + (size_t)y * stride, &line, 8);
    }
}

/* ---- the scan */

static void begin(Reader *r, Jpeg *j, const uint8_t *p) {
    r->p = p, r->end = j->end;
    r->bits = 0, r->count = 0, r->missing = 0;
    for (int i = 0; i < j->components; i++) j->part[i].prediction = 0;
}

/* Behind the next restart marker, which must be number `n`; NULL: there is none. */
static const uint8_t *after_restart(const uint8_t *p, const uint8_t *end, int n) {
    while (end - p > 1 && (p = memchr(p, 0xFF, (size_t)(end - p - 1)))) {
        if (p[1] == 0xD0 + (n & 7)) return p + 2;
        if (p[1] != 0 && p[1] != 0xFF) return NULL;
        p += p[1] ? 1 : 2;
    }
    return NULL;
}

/* Decodes units (MCUs) x0..x1, y0..y1 into the planes. */
INLINE int scan(Jpeg *j, int x0, int x1, int y0, int y1) {
    int across = (j->width + 8 * j->hmax - 1) / (8 * j->hmax), n = j->components;
    int restart = j->restart, done = 0; /* units of this interval */
    int number = 0;                     /* of the next restart marker */
    Reader r;
    const uint8_t *p = j->scan;
    long first = 0;
    if (restart) { /* go straight to the interval of the first unit that is wanted */
        first = ((long)y0 * across + x0) / restart;
        for (; number < first; number++)
            if (!(p = after_restart(p, j->end, number))) return JPEG_DAMAGED;
        first *= restart;
    }
    begin(&r, j, p);
    float coefficients[64] __attribute__((aligned(64)));
    for (long unit = first, stop = (long)(y1 - 1) * across + x1; unit < stop; unit++) {
        int y = (int)(unit / across), x = (int)(unit % across);
        if (restart && done == restart) {
            if (r.missing > 7) return JPEG_DAMAGED; /* more than the reader had looked ahead */
            if (!(p = after_restart(r.p, j->end, number++))) return JPEG_DAMAGED;
            begin(&r, j, p);
            done = 0;
        }
        if (restart && (x < x0 || x >= x1)) { /* nothing more is wanted of this interval? */
            long next = unit - done + restart, wanted = x < x0 ? (long)y * across + x0 : (long)(y + 1) * across + x0;
            if (next <= wanted && next < stop) {
                if (!(p = after_restart(r.p, j->end, number++))) return JPEG_DAMAGED;
                begin(&r, j, p);
                done = 0;
                unit = next - 1;
                continue;
            }
        }
        done++;
        int wanted = y >= y0 && x >= x0 && x < x1;
        for (int i = 0; i < n; i++) {
            Component *c = &j->part[i];
            const Codes *dc = &j->dc[c->dc], *ac = &j->ac[c->ac];
            const float *quant = j->quant[c->quant];
            for (int v = 0; v < c->v; v++)
                for (int h = 0; h < c->h; h++) {
                    if (!wanted) {
                        if (block(&r, dc, ac, &c->prediction, quant, NULL) < 0) return JPEG_DAMAGED;
                        continue;
                    }
                    memset(coefficients, 0, sizeof coefficients);
                    int last = block(&r, dc, ac, &c->prediction, quant, coefficients);
                    if (last < 0) return JPEG_DAMAGED;
                    size_t row = (size_t)((y - y0) * c->v + v) * 8, column = (size_t)((x - x0) * c->h + h) * 8;
                    transform(coefficients, last, c->plane + row * c->stride + column, c->stride);
                }
        }
        if (r.missing > 8) return JPEG_DAMAGED;
    }
    return JPEG_OK;
}

/* ---- resizing */

/* The taps of Pillow's antialiased bilinear filter from `size` samples to `out`, of the stretch from..to. */
static int most_taps(double from, double to, int out) {
    double scale = (to - from) / out;
    return (int)ceil(scale > 1 ? scale : 1) * 2 + 1;
}

static void filter(Taps *taps, float *weights, int most, double from, double to, int size, int out) {
    double scale = (to - from) / out, reach = scale > 1 ? scale : 1;
    for (int i = 0; i < out; i++, weights += most) {
        double centre = from + (i + 0.5) * scale, sum = 0;
        int start = (int)(centre - reach + 0.5), stop = (int)(centre + reach + 0.5);
        if (start < 0) start = 0;
        if (stop > size) stop = size;
        if (stop - start > most) stop = start + most;
        for (int k = start; k < stop; k++) {
            double w = 1 - fabs((k - centre + 0.5) / reach);
            weights[k - start] = (float)(w > 0 ? w : 0);
            sum += w > 0 ? w : 0;
        }
        for (int k = start; k < stop; k++) weights[k - start] = (float)(weights[k - start] / sum);
        taps[i] = (Taps){start, stop - start, weights};
    }
}

static void reach_of(const Taps *taps, int out, int *from, int *to) {
    *from = taps[0].start, *to = taps[0].start + taps[0].count;
    for (int i = 1; i < out; i++) {
        if (taps[i].start < *from) *from = taps[i].start;
        if (taps[i].start + taps[i].count > *to) *to = taps[i].start + taps[i].count;
    }
}

/* ---- colour */

typedef struct {
    int left, right, top, bottom;
} Window;

/* Chroma of row y at the columns of the window: as it is, or doubled as libjpeg's smooth upsampling does. `sums`: scratch
   for the samples of a row, with room for one more on both sides. */
INLINE void chroma(const Jpeg *j, const Component *c, const Window *w, int x0, int y0, int y, int16_t *sums, uint8_t *out) {
    int double_x = j->hmax == 2, double_y = j->vmax == 2, near = double_y ? y >> 1 : y, far = near;
    if (double_y) far = y & 1 ? near + 1 : near - 1;
    if (far < 0) far = 0;
    if (far > c->height - 1) far = c->height - 1;
    const uint8_t *here = c->plane + (size_t)(near - y0 * 8) * c->stride - x0 * 8;
    const uint8_t *there = c->plane + (size_t)(far - y0 * 8) * c->stride - x0 * 8;
    int from = double_x ? w->left >> 1 : w->left, to = double_x ? ((w->right - 1) >> 1) + 1 : w->right, n = to - from;
    if (!double_x) {
        for (int i = 0; i < n; i++) {
            int a = here[from + i], b = there[from + i];
            out[i] = (uint8_t)(double_y ? (3 * a + b + 1 + (y & 1)) >> 2 : a);
        }
        return;
    }
    sums++;
    for (int i = 0; i < n; i++) sums[i] = (int16_t)(double_y ? 3 * here[from + i] + there[from + i] : here[from + i]);
    int before = from ? from - 1 : 0, after = to < c->width ? to : c->width - 1;
    sums[-1] = (int16_t)(double_y ? 3 * here[before] + there[before] : here[before]);
    sums[n] = (int16_t)(double_y ? 3 * here[after] + there[after] : here[after]);
    int shift = double_y ? 4 : 2, even = double_y ? 8 : 1, odd = double_y ? 7 : 2;
    out -= w->left & 1;
    if (w->left & 1) out[1] = (uint8_t)((3 * sums[0] + sums[1] + odd) >> shift);
    else out[0] = (uint8_t)((3 * sums[0] + sums[-1] + even) >> shift), out[1] = (uint8_t)((3 * sums[0] + sums[1] + odd) >> shift);
    for (int i = 1; i < n; i++) {
        out[2 * i] = (uint8_t)((3 * sums[i] + sums[i - 1] + even) >> shift);
        out[2 * i + 1] = (uint8_t)((3 * sums[i] + sums[i + 1] + odd) >> shift);
    }
}

INLINE uint8_t clamped(int x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

/* The window's pixels as three planes of its width. `lines`: scratch for two rows of chroma. */
INLINE void to_rgb(const Jpeg *j, const Window *w, int x0, int y0, int16_t *sums, uint8_t *lines, uint8_t *rgb[3]) {
    const Component *luma = &j->part[0];
    int n = w->right - w->left;
    uint8_t *cb = lines, *cr = lines + n + 64;
    for (int y = w->top; y < w->bottom; y++) {
        chroma(j, &j->part[1], w, x0, y0, y, sums, cb);
        chroma(j, &j->part[2], w, x0, y0, y, sums, cr);
        size_t row = (size_t)(y - w->top) * (size_t)n;
        const uint8_t *restrict in = luma->plane + (size_t)(y - y0 * 8 * j->vmax) * luma->stride + (w->left - x0 * 8 * j->hmax);
        uint8_t *restrict r = rgb[0] + row, *restrict g = rgb[1] + row, *restrict b = rgb[2] + row;
        for (int x = 0; x < n; x++) {
            int light = in[x], blue = cb[x] - 128, red = cr[x] - 128; /* weights of BT.601, in 1/65536 */
            r[x] = clamped(light + ((91881 * red + 32768) >> 16));
            g[x] = clamped(light + ((-22554 * blue - 46802 * red + 32768) >> 16));
            b[x] = clamped(light + ((116130 * blue + 32768) >> 16));
        }
    }
}

/* ROWS rows of a plane's result, a vector of rows for each column. `lines`, `turned`: scratch. */
INLINE void resized(const uint8_t *plane, size_t stride, const Window *w, const Taps *across, int width, const Taps *down,
                    int rows, float *lines, float *turned, v8 *out) {
    int n = w->right - w->left;
    for (int r = 0; r < rows; r++) {
        float *restrict line = lines + (size_t)r * (size_t)n;
        memset(line, 0, (size_t)n * sizeof *line);
        for (int k = 0; k < down[r].count; k++) {
            const uint8_t *restrict in = plane + (size_t)(down[r].start + k - w->top) * stride;
            float weight = down[r].weight[k];
            for (int x = 0; x < n; x++) line[x] += weight * (float)in[x];
        }
    }
    for (int r = rows; r < ROWS; r++) memset(lines + (size_t)r * (size_t)n, 0, (size_t)n * sizeof *lines);
    for (int x = 0; x < n; x++)
        for (int r = 0; r < ROWS; r++) turned[(size_t)x * ROWS + (size_t)r] = lines[(size_t)r * (size_t)n + (size_t)x];
    for (int x = 0; x < width; x++) {
        v8 sum = {};
        const float *in = turned + (size_t)(across[x].start - w->left) * ROWS;
        for (int k = 0; k < across[x].count; k++) {
            v8 column;
            memcpy(&column, in + k * ROWS, sizeof column);
            sum += column * across[x].weight[k];
        }
        out[x] = sum;
    }
}

typedef struct {
    int x0, x1, y0, y1; /* units (MCUs) that are decoded */
    Window window;      /* pixels that are wanted */
    Taps *across, *down;
    int width, height, mirror;
    uint8_t *rgb[3], *chroma;
    int16_t *sums;
    float *lines, *turned;
    v8 *rows;
    uint8_t *out;
} Task;

INLINE int run(Jpeg *j, Task *t) {
    int error = scan(j, t->x0, t->x1, t->y0, t->y1), planes = j->components, width = t->width;
    if (error) return error;
    const Window *w = &t->window;
    size_t stride = (size_t)(w->right - w->left);
    if (planes == 3) {
        to_rgb(j, w, t->x0, t->y0, t->sums, t->chroma, t->rgb);
    } else {
        stride = j->part[0].stride;
        t->rgb[0] = j->part[0].plane + (size_t)(w->top - t->y0 * 8) * stride + (w->left - t->x0 * 8);
    }
    for (int y = 0; y < t->height; y += ROWS) {
        int some = t->height - y < ROWS ? t->height - y : ROWS;
        for (int i = 0; i < planes; i++)
            resized(t->rgb[i], stride, w, t->across, width, t->down + y, some, t->lines, t->turned, t->rows + i * width);
        for (int x = 0; x < width; x++) {
            uint8_t pixel[3][ROWS];
            for (int i = 0; i < 3; i++) {
                b8 column = rounded(t->rows[(planes == 3 ? i * width : 0) + x]);
                memcpy(pixel[i], &column, ROWS);
            }
            uint8_t *at = t->out + ((size_t)y * (size_t)width + (size_t)(t->mirror ? width - 1 - x : x)) * 3;
            for (int r = 0; r < some; r++, at += 3 * (size_t)width)
                at[0] = pixel[0][r], at[1] = pixel[1][r], at[2] = pixel[2][r];
        }
    }
    return JPEG_OK;
}

/* For what this processor can do. */
#if defined(__x86_64__) && defined(__GNUC__)
static __attribute__((target("avx2,fma,bmi,bmi2"))) int run_wide(Jpeg *j, Task *t) { return run(j, t); }
#endif
static int run_plain(Jpeg *j, Task *t) { return run(j, t); }

static int run_best(Jpeg *j, Task *t) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return run_wide(j, t);
#endif
    return run_plain(j, t);
}

/* ---- what is called from outside */

Jpeg *kasoku_jpeg_new(void) { return calloc(1, sizeof(Jpeg)); }

void kasoku_jpeg_free(Jpeg *j) {
    if (j) free(j->memory);
    free(j);
}

/* Reads the headers; sets width and height where they are known, even where it is not JPEG_OK. */
int kasoku_jpeg_open(Jpeg *j, const uint8_t *data, size_t size, int32_t *width, int32_t *height) {
    int error = read_headers(j, data, size);
    *width = j->width, *height = j->height;
    if (error) j->scan = NULL;
    return error;
}

static void *cut(uint8_t **memory, size_t bytes) {
    uint8_t *p = *memory;
    *memory += (bytes + 63) & ~(size_t)63;
    return p;
}

/* Lays the task out from `memory` on; returns the bytes that it takes. With NULL it only counts. */
static size_t lay_out(Jpeg *j, Task *t, uint8_t *memory, const double *box) {
    uint8_t *start = memory;
    int most_x = most_taps(box[0], box[2], t->width), most_y = most_taps(box[1], box[3], t->height);
    t->across = cut(&memory, (size_t)t->width * sizeof(Taps));
    t->down = cut(&memory, (size_t)t->height * sizeof(Taps));
    float *wx = cut(&memory, (size_t)t->width * (size_t)most_x * sizeof(float));
    float *wy = cut(&memory, (size_t)t->height * (size_t)most_y * sizeof(float));
    Window *w = &t->window;
    if (start) {
        filter(t->across, wx, most_x, box[0], box[2], j->width, t->width);
        filter(t->down, wy, most_y, box[1], box[3], j->height, t->height);
        reach_of(t->across, t->width, &w->left, &w->right);
        reach_of(t->down, t->height, &w->top, &w->bottom);
    } else { /* the largest that it can become */
        double reach_x = (box[2] - box[0]) / t->width + 2, reach_y = (box[3] - box[1]) / t->height + 2;
        *w = (Window){(int)fmax(0, box[0] - reach_x), (int)fmin(j->width, box[2] + reach_x),
                      (int)fmax(0, box[1] - reach_y), (int)fmin(j->height, box[3] + reach_y)};
    }
    /* one chroma sample more on each side, for upsampling */
    int unit_w = 8 * j->hmax, unit_h = 8 * j->vmax, n = j->components;
    int left = w->left - 2 > 0 ? w->left - 2 : 0, right = w->right + 2 < j->width ? w->right + 2 : j->width;
    int top = w->top - 2 > 0 ? w->top - 2 : 0, bottom = w->bottom + 2 < j->height ? w->bottom + 2 : j->height;
    t->x0 = left / unit_w, t->x1 = (right - 1) / unit_w + 1, t->y0 = top / unit_h, t->y1 = (bottom - 1) / unit_h + 1;
    for (int i = 0; i < n; i++) {
        Component *c = &j->part[i];
        c->stride = (size_t)(t->x1 - t->x0) * 8 * (size_t)c->h;
        c->plane = cut(&memory, c->stride * (size_t)(t->y1 - t->y0) * 8 * (size_t)c->v);
    }
    size_t columns = (size_t)(w->right - w->left), lines = (size_t)(w->bottom - w->top);
    for (int i = 0; i < 3; i++) t->rgb[i] = n == 3 ? cut(&memory, columns * lines) : NULL;
    t->chroma = cut(&memory, 2 * columns + 192);
    t->sums = cut(&memory, (columns + 64) * sizeof(int16_t));
    t->lines = cut(&memory, columns * ROWS * sizeof(float));
    t->turned = cut(&memory, columns * ROWS * sizeof(float));
    t->rows = cut(&memory, (size_t)t->width * 3 * sizeof(v8));
    return (size_t)(memory - start);
}

/* Of the file that was opened last, whose bytes are still there: the box left, top, right, bottom (in pixels, within
   the image), resized to `height` rows of `width` RGB pixels in `out`; `mirror`: from right to left. */
int kasoku_jpeg_crop(Jpeg *j, const double *box, int32_t width, int32_t height, int32_t mirror, uint8_t *out) {
    if (!j->scan) return JPEG_OTHER;
    if (width < 1 || height < 1 || !(box[0] >= 0 && box[1] >= 0 && box[2] <= j->width && box[3] <= j->height)) return JPEG_OTHER;
    if (!(box[2] - box[0] > 0 && box[3] - box[1] > 0)) return JPEG_OTHER;
    Task task = {.width = width, .height = height, .mirror = mirror, .out = out};
    size_t bytes = lay_out(j, &task, NULL, box);
    if (bytes > j->size) {
        free(j->memory);
        j->size = 0;
        if (!(j->memory = aligned_alloc(64, bytes))) return JPEG_MEMORY;
        j->size = bytes;
    }
    lay_out(j, &task, j->memory, box);
    return run_best(j, &task);
}
