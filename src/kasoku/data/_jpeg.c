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
enum { LOOK = 11, ROWS = 8, LINES = 64, FEW = 4, KNOWN = 16, SPARE = 4 << 20 };

#define ONES 0x0101010101010101u
#define HIGHEST 0x8080808080808080u
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef int64_t q4 __attribute__((vector_size(32)));
typedef uint8_t b32 __attribute__((vector_size(32)));

/* Zigzag place -> place in the block. */
static const uint8_t ZIGZAG[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

typedef struct {
    uint32_t look[1 << LOOK]; /* see entry() */
    uint64_t pair[1 << LOOK]; /* of AC codes: up to two values at once, see pairs() */
    uint32_t skip[1 << LOOK]; /* as many as can be, for blocks that are not wanted */
    int32_t max[18];          /* largest code of each length, to the left of 16 bits; -1: none */
    int32_t offset[17];       /* of the first code of each length in values */
    uint8_t values[256];
    uint8_t told[1 + 16 + 256]; /* what the file said of them: the kind, then how many of each length, and which */
    int told_size;
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
    Codes *dc[4], *ac[4];
    Codes known[KNOWN]; /* of this file and of those before, so that few files need new tables */
    int oldest;
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

/* Whether the number behind ="..." or >...< is 1. */
static int upright_xmp(const uint8_t *p, const uint8_t *end) {
    while (p < end && (*p < '0' || *p > '9') && *p != '<') p++;
    return p < end && (*p == '1' || *p == '<'); /* <: of the end of an element */
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
    uint32_t e = (uint32_t)run << 5 | (uint32_t)size << 9;
    if (size && length + size <= LOOK) {
        int value = extended(bits >> (LOOK - length - size) & ((1 << size) - 1), size);
        return e | (uint32_t)(length + size) | ENTRY_DONE | (uint32_t)value << 16;
    }
    return e | (uint32_t)length;
}

/* An entry of `pair` or `skip`: bits to take, places to go on in the block, whether the block ends there; of `pair` also
   how far on the values go, and the values; a second one that is not there is a 0, and the first one is written over it.
   0: see `look`. */
#define PAIR_BITS(e) ((e) & 31)
#define PAIR_PLACES(e) ((int)((e) >> 5) & 63)
#define PAIR_END(e) ((int)((e) >> 11) & 1)
#define PAIR_FIRST(e) ((int)((e) >> 12) & 63)
#define PAIR_SECOND(e) ((int)((e) >> 18) & 63)

static void pairs(Codes *c) {
    for (uint32_t bits = 0; bits < 1 << LOOK; bits++) {
        int values = 0, end = 0;
        uint32_t used = 0, places = 0, at[2] = {0, 0};
        int64_t value[2] = {0, 0};
        uint64_t pair = 0;
        while (!end && used < LOOK && places < 48) {
            uint32_t e = c->look[bits << used & ((1 << LOOK) - 1)], size = ENTRY_SIZE(e), run = ENTRY_RUN(e);
            uint32_t code = ENTRY_BITS(e) - (e & ENTRY_DONE ? size : 0);
            if (!e || used + code > LOOK) break; /* more bits than are seen here */
            int known = used + ENTRY_BITS(e) <= LOOK && (e & ENTRY_DONE || !size);
            used += code + size;
            if (!size && !run) end = 1;
            else {
                if (size && values < 2) at[values] = places + run, value[values] = ENTRY_VALUE(e);
                places += run + 1;
            }
            values += size > 0;
            if (!known || values > 2) values = 3;
            if (values < 3) {
                uint32_t second = values == 2 ? at[1] : at[0];
                pair = used | places << 5 | (uint32_t)end << 11 | (uint64_t)at[0] << 12 | (uint64_t)second << 18;
                pair |= (uint64_t)(value[0] & 0xFFFF) << 32 | (uint64_t)(value[1] & 0xFFFF) << 48;
            }
        }
        c->pair[bits] = pair;
        c->skip[bits] = used | places << 5 | (uint32_t)end << 11;
    }
}

/* The codes that a file tells of, or room for them: told_size is 0. */
static Codes *known_codes(Jpeg *j, int kind, const uint8_t *counts, int size) {
    for (int i = 0; i < KNOWN; i++) {
        Codes *c = &j->known[i];
        if (c->told_size == 1 + size && c->told[0] == kind && !memcmp(c->told + 1, counts, (size_t)size)) return c;
    }
    for (;;) {
        Codes *c = &j->known[j->oldest];
        j->oldest = (j->oldest + 1) % KNOWN;
        int used = 0;
        for (int i = 0; i < 4; i++) used |= j->dc[i] == c || j->ac[i] == c; /* by this file: 8 at most */
        if (used) continue;
        memset(c, 0, sizeof *c);
        return c;
    }
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
        Codes **place = is_ac ? &j->ac[id] : &j->dc[id], *c = known_codes(j, is_ac, counts, 16 + total);
        *place = c;
        if (c->told_size) {
            p += total;
            continue;
        }
        memcpy(c->values, p, (size_t)total);
        for (int i = 0; i < total; i++)
            if (is_ac ? (p[i] & 15) > 14 || (!(p[i] & 15) && p[i] && p[i] != 0xF0) : p[i] > 11)
                return JPEG_OTHER; /* not of 8-bit images in one scan */
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
        if (is_ac) pairs(c);
        c->told[0] = (uint8_t)is_ac;
        memcpy(c->told + 1, counts, 16 + (size_t)total);
        c->told_size = 17 + total;
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
        if (c->dc > 3 || c->ac > 3 || !j->dc[c->dc] || !j->ac[c->ac] || !j->quant_there[c->quant])
            return JPEG_DAMAGED;
    }
    return JPEG_OK;
}

static int read_headers(Jpeg *j, const uint8_t *data, size_t size) {
    j->width = j->height = j->components = j->restart = 0;
    for (int i = 0; i < 4; i++) j->dc[i] = j->ac[i] = NULL, j->quant_there[i] = 0;
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
            case 0xE1:
                if (j->orientation == 1) j->orientation = exif_orientation(q, (size_t)(p - q));
                if (p - q > 5 && !memcmp(q, "http:", 5)) /* XMP, which may tell it too */
                    for (const uint8_t *at = q; p - at >= 11 && (at = memchr(at, 'O', (size_t)(p - at))); at++)
                        if (!memcmp(at, "Orientation", 11) && !upright_xmp(at + 11, p)) return JPEG_OTHER;
                break;
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

/* One AC code, by itself: takes it, and tells how far on its value is; -1: there is none such. A size of 0 is told as
   value 0: with 15 places a run, with none the end of the block. */
INLINE int one_code(Reader *b, const Codes *ac, int *value) {
    uint32_t e = ac->look[b->bits >> (64 - LOOK)];
    int run = (int)ENTRY_RUN(e), size = (int)ENTRY_SIZE(e);
    *value = 0;
    if (e & ENTRY_DONE) {
        TAKE(*b, ENTRY_BITS(e));
        *value = ENTRY_VALUE(e);
        return run;
    }
    if (e) {
        TAKE(*b, ENTRY_BITS(e));
    } else {
        int symbol = long_code(b->bits, ac);
        if (symbol < 0) return -1;
        TAKE(*b, symbol >> 8);
        run = symbol >> 4 & 15, size = symbol & 15;
    }
    if (size) {
        *value = signed_value(b->bits, size);
        TAKE(*b, size);
    }
    return run;
}

/* One block. With `out`: its coefficients, dequantised; returns a zigzag place behind which all are 0, or -1 where there
   is no such code. */
INLINE int block(Reader *r, const Codes *dc, const Codes *ac, int *prediction, const float *quant, float *out) {
    Reader b = *r; /* in registers */
    REFILL(b, r);
    uint32_t first = dc->look[b.bits >> (64 - LOOK)];
    if (first & ENTRY_DONE) {
        TAKE(b, ENTRY_BITS(first));
        *prediction += ENTRY_VALUE(first);
    } else {
        int size = (int)ENTRY_SIZE(first);
        if (first) {
            TAKE(b, ENTRY_BITS(first));
        } else {
            int symbol = long_code(b.bits, dc);
            if (symbol < 0) return -1;
            TAKE(b, symbol >> 8);
            size = symbol & 255;
        }
        if (size) {
            *prediction += signed_value(b.bits, size);
            TAKE(b, size);
        }
    }
    if (out) out[0] = (float)*prediction * quant[0];
    int k = 1;
    while (k < 64) {
        if (b.count < 32) REFILL(b, r);
        uint64_t e = out ? ac->pair[b.bits >> (64 - LOOK)] : ac->skip[b.bits >> (64 - LOOK)];
        int places = PAIR_PLACES(e), end = PAIR_END(e);
        if (e && k + places + end <= 64) { /* a block that is full has no end: what follows belongs to the next one */
            TAKE(b, PAIR_BITS(e));
            if (out && places) {
                int one = k + PAIR_FIRST(e), two = k + PAIR_SECOND(e);
                out[ZIGZAG[two]] = (float)(int16_t)(e >> 48) * quant[two];
                out[ZIGZAG[one]] = (float)(int16_t)(e >> 32) * quant[one];
            }
            k += places;
            if (end) break;
            continue;
        }
        int value, run = one_code(&b, ac, &value);
        if (run < 0) return -1;
        if (!value && run != 15) break; /* end of block */
        k += run;
        if (k > 63) return -1;
        if (out) out[ZIGZAG[k]] = (float)value * quant[k];
        k++;
    }
    *r = b;
    return k - 1;
}

/* ---- the inverse cosine transform */

static float COSINE[8][8]; /* [frequency][place], with its norm */

static void __attribute__((constructor)) tables(void) {
    for (int u = 0; u < 8; u++)
        for (int x = 0; x < 8; x++)
            COSINE[u][x] = (float)((u ? 0.5 : sqrt(0.125)) * cos((2 * x + 1) * u * 3.14159265358979323846 / 16));
}

/* Some of the elements of two vectors, by number: 0 to 7 of the first, 8 to 15 of the second; bytes of one vector. The
   compilers' own conversion between bytes and floats goes through single numbers. */
#if defined(__clang__) || __GNUC__ >= 12
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define BYTES(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#define BYTES(a, ...) __builtin_shuffle(a, (b32){__VA_ARGS__})
#endif
#define FOUR(k) k, k, k, k
#define LOWEST(k) k, k + 4, k + 8, k + 12

INLINE v8 widened(const uint8_t *in) { /* 8 bytes */
    int64_t word;
    memcpy(&word, in, 8);
    b32 x = (b32)((q4){} + word);
    x = BYTES(x, FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(20), FOUR(21), FOUR(22), FOUR(23));
    return __builtin_convertvector((i8)x & 255, v8);
}

INLINE uint64_t rounded(v8 x) { /* 8 bytes */
    i8 n = __builtin_convertvector(x + 0.5f, i8); /* towards 0, which is down for what is not below 0 */
    i8 over = n > 255;
    n = ((n & ~over) | (over & 255)) & ~(n < 0);
    b32 y = (b32)n;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    y = BYTES(y, LOWEST(0), LOWEST(0), LOWEST(0), LOWEST(0), LOWEST(16), LOWEST(16), LOWEST(16), LOWEST(16));
#else
    y = BYTES(y, LOWEST(3), LOWEST(3), LOWEST(3), LOWEST(3), LOWEST(19), LOWEST(19), LOWEST(19), LOWEST(19));
#endif
    int32_t half[2] = {((i8)y)[0], ((i8)y)[4]};
    uint64_t word;
    memcpy(&word, half, 8);
    return word;
}

/* Of a block whose coefficients lie in its first n rows and columns: 2, 4, 6 or 8. */
INLINE void transform_of(int n, float *in, uint8_t *out, size_t stride) {
    v8 x[8], c[8];
    float half[64] __attribute__((aligned(32)));
    for (int v = 0; v < n; v++) memcpy(&x[v], in + 8 * v, 32), memcpy(&c[v], COSINE[v], 32);
    memset(in, 0, (size_t)n * 32);
    for (int y = 0; y < 4; y++) { /* cosines of even frequencies are alike on both sides, of odd ones opposite */
        v8 even = x[0] * COSINE[0][y], odd = x[1] * COSINE[1][y];
        for (int v = 2; v < n; v += 2) even += x[v] * COSINE[v][y], odd += x[v + 1] * COSINE[v + 1][y];
        v8 near = even + odd, far = even - odd;
        memcpy(half + 8 * y, &near, 32);
        memcpy(half + 8 * (7 - y), &far, 32);
    }
    for (int y = 0; y < 8; y++) {
        v8 sum = half[8 * y] * c[0] + 128;
        for (int u = 1; u < n; u++) sum += half[8 * y + u] * c[u];
        uint64_t line = rounded(sum);
        memcpy(out + (size_t)y * stride, &line, 8);
    }
}

/* Leaves `in` with zeros again. */
INLINE void transform(float *in, int last, uint8_t *out, size_t stride) {
    if (!last) {
        uint64_t flat = rounded((v8){} + (in[0] * 0.125f + 128));
        for (int y = 0; y < 8; y++) memcpy(out + (size_t)y * stride, &flat, 8);
        in[0] = 0;
    } else if (last < 3) {
        transform_of(2, in, out, stride);
    } else if (last < 10) { /* the first four of the zigzag's diagonals */
        transform_of(4, in, out, stride);
    } else if (last < 21) {
        transform_of(6, in, out, stride);
    } else {
        transform_of(8, in, out, stride);
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
    float coefficients[64] __attribute__((aligned(64))) = {0};
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
            const Codes *dc = j->dc[c->dc], *ac = j->ac[c->ac];
            const float *quant = j->quant[c->quant];
            for (int v = 0; v < c->v; v++)
                for (int h = 0; h < c->h; h++) {
                    if (!wanted) {
                        if (block(&r, dc, ac, &c->prediction, quant, NULL) < 0) return JPEG_DAMAGED;
                        continue;
                    }
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

/* The taps of Pillow's antialiased bilinear filter from `size` samples to `out`, of the stretch from..to; behind them
   weights of 0, to FEW at least. Returns how many the longest has. */
static int most_taps(double from, double to, int out) {
    double scale = (to - from) / out;
    int most = (int)ceil(scale > 1 ? scale : 1) * 2 + 1;
    return most > FEW ? most : FEW;
}

static int filter(Taps *taps, float *weights, int most, double from, double to, int size, int out) {
    double scale = (to - from) / out, reach = scale > 1 ? scale : 1;
    int longest = 0;
    for (int i = 0; i < out; i++, weights += most) {
        memset(weights, 0, (size_t)most * sizeof *weights);
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
        if (stop - start > longest) longest = stop - start;
    }
    return longest;
}

static void reach_of(const Taps *taps, int out, int *from, int *to) {
    *from = taps[0].start, *to = taps[0].start + taps[0].count;
    for (int i = 1; i < out; i++) {
        if (taps[i].start < *from) *from = taps[i].start;
        if (taps[i].start + taps[i].count > *to) *to = taps[i].start + taps[i].count;
    }
}

typedef struct {
    int x0, x1, y0, y1;  /* units (MCUs) that are decoded */
    int left, right;     /* the columns that are needed */
    int planes;          /* of pixels that are there already, or of the file; 1: grey */
    const uint8_t *data; /* pixels that are there already */
    Taps *across, *down;
    int longest_across, longest_down; /* of the taps */
    int width, height;
    uint16_t *sums;
    uint8_t *chroma; /* rows of it, doubled */
    size_t pitch;    /* of these rows */
    v8 *turned, *rows;
    uint8_t *out;
} Task;

/* Samples doubled: each becomes two, of which each takes a quarter of the neighbour on its side. sums[-1], sums[n]: of
   the neighbours. */
INLINE void doubled(const uint16_t *restrict sums, int n, int even, int odd, int shift, uint16_t *restrict pairs) {
    for (int i = 0; i < n; i++) {
        uint16_t left = (uint16_t)((uint16_t)(3 * sums[i] + sums[i - 1] + even) >> shift);
        uint16_t right = (uint16_t)((uint16_t)(3 * sums[i] + sums[i + 1] + odd) >> shift);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        pairs[i] = (uint16_t)(left | right << 8);
#else
        pairs[i] = (uint16_t)(left << 8 | right);
#endif
    }
}

/* Chroma of row y at the columns of the window: as it is, or doubled as libjpeg's smooth upsampling does. `sums`: scratch
   for the samples of a row, with room for one more on both sides; `out`: scratch for the result, which may begin a place
   further on. */
INLINE const uint8_t *chroma(const Jpeg *j, const Component *c, int left, int right, int x0, int y0, int y,
                             uint16_t *restrict sums, uint8_t *restrict out) {
    int double_x = j->hmax == 2, double_y = j->vmax == 2, near = double_y ? y >> 1 : y, far = near;
    if (double_y) far = y & 1 ? near + 1 : near - 1;
    if (far < 0) far = 0;
    if (far > c->height - 1) far = c->height - 1;
    const uint8_t *here = c->plane + (size_t)(near - y0 * 8) * c->stride - x0 * 8;
    const uint8_t *there = c->plane + (size_t)(far - y0 * 8) * c->stride - x0 * 8;
    int from = double_x ? left >> 1 : left, to = double_x ? ((right - 1) >> 1) + 1 : right, n = to - from;
    if (!double_x) {
        if (!double_y) return here + from;
        for (int i = 0; i < n; i++) out[i] = (uint8_t)((3 * here[from + i] + there[from + i] + 1 + (y & 1)) >> 2);
        return out;
    }
    int before = from ? from - 1 : 0, after = to < c->width ? to : c->width - 1;
    sums++;
    if (double_y) {
        for (int i = 0; i < n; i++) sums[i] = (uint16_t)(3 * here[from + i] + there[from + i]);
        sums[-1] = (uint16_t)(3 * here[before] + there[before]);
        sums[n] = (uint16_t)(3 * here[after] + there[after]);
        doubled(sums, n, 8, 7, 4, (uint16_t *)(void *)out);
    } else {
        for (int i = 0; i < n; i++) sums[i] = here[from + i];
        sums[-1] = here[before];
        sums[n] = here[after];
        doubled(sums, n, 1, 2, 2, (uint16_t *)(void *)out);
    }
    return out + (left & 1);
}

/* Rows become columns. */
INLINE void turn(v8 r[8]) {
    v8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = MIXED(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = MIXED(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            b[i + 2 * k] = MIXED(a[i + k], a[i + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * k + 1] = MIXED(a[i + k], a[i + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = MIXED(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = MIXED(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

INLINE v8 cut_off(v8 x) { /* at 0 and 255 */
    i8 over = x > 255, under = x < 0;
    return (v8)((((i8)x & ~over) | ((i8)((v8){} + 255) & over)) & ~under);
}

INLINE v8 some_of(const uint8_t *in, size_t some) { /* without a look at what is behind */
    uint8_t last[8] = {0};
    memcpy(last, in, some);
    return widened(last);
}

/* Up to ROWS rows of the result from y on: a vector of rows for each column, plane by plane. Each line of samples is
   widened, and turned into colours, once for all these rows. `few`: so many taps are taken everywhere, those that are
   not there with weights of 0, so that nothing depends on their number; 0: as many as there are. */
INLINE void resized(Jpeg *j, Task *t, int y, int rows, int few) {
    const Taps *down = t->down + y, *across = t->across;
    int n = t->right - t->left, first, end, colour = j->scan && t->planes == 3;
    reach_of(down, rows, &first, &end);
    size_t pitch = (size_t)n + 8 + FEW;
    const uint8_t *start[3];
    size_t stride[3];
    if (colour) {
        for (int k = first; k < end; k++)
            for (int i = 1; i < 3; i++) {
                uint8_t *row = t->chroma + ((size_t)(k - first) * 2 + (size_t)(i - 1)) * t->pitch;
                const uint8_t *found = chroma(j, &j->part[i], t->left, t->right, t->x0, t->y0, k, t->sums, row);
                if (found != row) memmove(row, found, (size_t)n);
            }
        start[1] = t->chroma, start[2] = t->chroma + t->pitch;
        stride[1] = stride[2] = 2 * t->pitch;
    }
    for (int i = 0; i < (colour ? 1 : t->planes); i++) {
        if (j->scan) {
            const Component *c = &j->part[i];
            stride[i] = c->stride;
            start[i] = c->plane + (size_t)(first - t->y0 * 8 * c->v) * c->stride + (size_t)(t->left - t->x0 * 8 * c->h);
        } else {
            stride[i] = (size_t)j->width;
            start[i] = t->data + ((size_t)i * (size_t)j->height + (size_t)first) * stride[i] + (size_t)t->left;
        }
    }
    for (int x = 0; x < n; x += 8) {
        v8 sum[3][8], line[3][LINES];
        if (!few || rows < 8) memset(sum, 0, sizeof sum);
        size_t some = n - x < 8 ? (size_t)(n - x) : 8;
        for (int base = first; base < end; base += LINES) {
            int stop = end - base < LINES ? end : base + LINES;
            for (int k = 0; k < stop - base; k++) {
                for (int i = 0; i < t->planes; i++) {
                    const uint8_t *in = start[i] + (size_t)(base - first + k) * stride[i] + x;
                    line[i][k] = some == 8 ? widened(in) : some_of(in, some);
                }
                if (colour) { /* BT.601 */
                    v8 light = line[0][k], cb = line[1][k] - 128, cr = line[2][k] - 128;
                    line[0][k] = cut_off(light + 1.402f * cr);
                    line[1][k] = cut_off(light - 0.344136286f * cb - 0.714136286f * cr);
                    line[2][k] = cut_off(light + 1.772f * cb);
                }
            }
            if (few) { /* all lines are there */
                for (int i = 0; i < t->planes; i++) {
                    for (int k = 1; k < FEW; k++) line[i][stop - base - 1 + k] = (v8){};
                    for (int r = 0; r < rows; r++) {
                        const v8 *in = &line[i][down[r].start - first];
                        const float *weight = down[r].weight;
                        v8 total = in[0] * weight[0];
                        for (int k = 1; k < few; k++) total += in[k] * weight[k];
                        sum[i][r] = total;
                    }
                }
                continue;
            }
            for (int i = 0; i < t->planes; i++)
                for (int r = 0; r < rows; r++) {
                    int k = down[r].start > base ? down[r].start : base;
                    int to = down[r].start + down[r].count < stop ? down[r].start + down[r].count : stop;
                    v8 total = sum[i][r];
                    for (; k < to; k++) total += line[i][k - base] * down[r].weight[k - down[r].start];
                    sum[i][r] = total;
                }
        }
        for (int i = 0; i < t->planes; i++) {
            turn(sum[i]);
            memcpy(t->turned + i * pitch + (size_t)x, sum[i], sizeof sum[i]);
        }
    }
    for (int i = 0; i < t->planes; i++) {
        for (size_t k = 0; k < FEW; k++) t->turned[i * pitch + (size_t)n + k] = (v8){};
        for (int x = 0; x < t->width; x++) {
            const v8 *in = t->turned + i * pitch + (size_t)(across[x].start - t->left);
            const float *weight = across[x].weight;
            v8 total = in[0] * weight[0];
            for (int k = 1; k < (few ? few : across[x].count); k++) total += in[k] * weight[k];
            t->rows[i * t->width + x] = total;
        }
    }
}

INLINE void finish(Jpeg *j, Task *t, int few) {
    int width = t->width, next = t->planes == 3 ? width : 0;
    for (int y = 0; y < t->height; y += ROWS) {
        int rows = t->height - y < ROWS ? t->height - y : ROWS;
        resized(j, t, y, rows, few);
        for (int x = 0; x < width; x += 8) {
            size_t some = width - x < 8 ? (size_t)(width - x) : 8;
            uint64_t line[3][ROWS];
            for (int i = 0; i < 3; i++) {
                v8 block[8];
                memcpy(block, t->rows + i * next + x, sizeof block);
                turn(block);
                for (int r = 0; r < ROWS; r++) line[i][r] = rounded(block[r]);
            }
            uint8_t *at = t->out + ((size_t)y * (size_t)width + (size_t)x) * 3;
            for (int r = 0; r < rows; r++, at += 3 * (size_t)width) {
                b32 pixels = (b32)(q4){(int64_t)line[0][r], (int64_t)line[1][r], (int64_t)line[2][r], 0};
                pixels = BYTES(pixels, 0, 8, 16, 1, 9, 17, 2, 10, 18, 3, 11, 19, 4, 12, 20, 5, 13, 21, 6, 14, 22, 7, 15, 23,
                               24, 25, 26, 27, 28, 29, 30, 31);
                if (some == 8) memcpy(at, &pixels, 24);
                else memcpy(at, &pixels, 3 * some);
            }
        }
    }
}

INLINE int run(Jpeg *j, Task *t) {
    int error = j->scan ? scan(j, t->x0, t->x1, t->y0, t->y1) : JPEG_OK;
    if (error) return error;
    int longest = t->longest_across > t->longest_down ? t->longest_across : t->longest_down;
    double lines = (double)(t->down[t->height - 1].start - t->down[0].start) / t->height * ROWS + 2 * FEW;
    if (longest > FEW || lines > LINES) finish(j, t, 0);
    else if (longest == FEW) finish(j, t, FEW);
    else finish(j, t, FEW - 1);
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
    int top, bottom;
    if (start) {
        t->longest_across = filter(t->across, wx, most_x, box[0], box[2], j->width, t->width);
        t->longest_down = filter(t->down, wy, most_y, box[1], box[3], j->height, t->height);
        reach_of(t->across, t->width, &t->left, &t->right);
        reach_of(t->down, t->height, &top, &bottom);
    } else { /* the most that it can become */
        double reach_x = (box[2] - box[0]) / t->width + 2, reach_y = (box[3] - box[1]) / t->height + 2;
        t->left = (int)fmax(0, box[0] - reach_x), t->right = (int)fmin(j->width, box[2] + reach_x);
        top = (int)fmax(0, box[1] - reach_y), bottom = (int)fmin(j->height, box[3] + reach_y);
    }
    size_t columns = (size_t)(t->right - t->left), lines = (size_t)((box[3] - box[1]) / t->height * ROWS) + (size_t)most_y + 2;
    if (j->scan) { /* with one chroma sample more on each side, for doubling */
        int unit_w = 8 * j->hmax, unit_h = 8 * j->vmax;
        int left = t->left > 2 ? t->left - 2 : 0, right = t->right + 2 < j->width ? t->right + 2 : j->width;
        top = top > 2 ? top - 2 : 0, bottom = bottom + 2 < j->height ? bottom + 2 : j->height;
        t->x0 = left / unit_w, t->x1 = (right - 1) / unit_w + 1, t->y0 = top / unit_h, t->y1 = (bottom - 1) / unit_h + 1;
        for (int i = 0; i < t->planes; i++) {
            Component *c = &j->part[i];
            c->stride = (size_t)(t->x1 - t->x0) * 8 * (size_t)c->h;
            c->plane = cut(&memory, c->stride * (size_t)(t->y1 - t->y0) * 8 * (size_t)c->v);
        }
        t->pitch = (columns + 127) & ~(size_t)63;
        t->chroma = cut(&memory, t->planes == 3 ? 2 * lines * t->pitch : 0);
        t->sums = cut(&memory, (columns + 64) * sizeof(uint16_t));
    }
    t->turned = cut(&memory, (size_t)t->planes * (columns + 8 + FEW) * sizeof(v8));
    t->rows = cut(&memory, ((size_t)t->width * 3 + 8) * sizeof(v8));
    return (size_t)(memory - start);
}

static int crop(Jpeg *j, Task *t, const double *box) {
    if (t->width < 1 || t->height < 1 || !(box[0] >= 0 && box[1] >= 0 && box[2] <= j->width && box[3] <= j->height))
        return JPEG_OTHER;
    if (!(box[2] - box[0] > 0 && box[3] - box[1] > 0)) return JPEG_OTHER;
    size_t bytes = lay_out(j, t, NULL, box);
    if (bytes > j->size) {
        free(j->memory);
        j->size = 0;
        if (!(j->memory = aligned_alloc(64, bytes))) return JPEG_MEMORY;
        j->size = bytes;
    }
    lay_out(j, t, j->memory, box);
    int error = run_best(j, t);
    if (j->size > SPARE) { /* one huge image must not take memory ever after */
        free(j->memory);
        j->memory = NULL, j->size = 0;
    }
    return error;
}

/* Of the file that was opened last, whose bytes are still there: the box left, top, right, bottom (in pixels, within
   the image), resized to `height` rows of `width` RGB pixels in `out`. */
int kasoku_jpeg_crop(Jpeg *j, const double *box, int32_t width, int32_t height, uint8_t *out) {
    Task task = {.width = width, .height = height, .out = out};
    task.planes = j->components;
    return j->scan ? crop(j, &task, box) : JPEG_OTHER;
}

/* The same of pixels that are there already: three planes of `rows` rows of `columns` bytes each. */
int kasoku_planes_crop(Jpeg *j, const uint8_t *planes, int32_t columns, int32_t rows, const double *box, int32_t width,
                       int32_t height, uint8_t *out) {
    if (columns < 1 || rows < 1) return JPEG_OTHER;
    Task task = {.planes = 3, .data = planes, .width = width, .height = height, .out = out};
    j->scan = NULL;
    j->width = columns, j->height = rows, j->hmax = j->vmax = 1;
    return crop(j, &task, box);
}
