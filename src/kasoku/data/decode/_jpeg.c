/* A crop of a JPEG file, resized: only what the crop needs is decoded.

   Baseline and extended sequential JPEGs of 8 bits with Huffman codes, grey or YCbCr, chroma as fine as luma or half as
   fine in either direction, in one scan. Anything else is left to another decoder (JPEG_OTHER), and so is whatever looks
   damaged (JPEG_DAMAGED): what such files mean is for a library to say.

   How time is saved. Entropy decoding is most of a JPEG's cost. A code and the value behind it are found by one look
   into a table where they fit it; blocks outside the crop are read over without storing anything; rows below it are not
   decoded at all, and rows above it neither where restart markers show where they end. The cosine transform, upsampling
   and colour touch only the pixels that the filter of the resizing reaches. All of them work on 16 numbers at a time, in
   16ths of a level in the transform (two blocks at once), then in 64ths: mostly within a quarter of a level of exact,
   and the same with AVX2 and without.

   Ref: ITU-T T.81; weights of the filter as Pillow's resize(BILINEAR, box); upsampling and colour as libjpeg's. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

/* Under sanitizers (make fuzz) the scratch memory is unwritten for each image, and has forbidden gaps between its parts. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define FORBID(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define ALLOW(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
enum { GAP = 256 };
#elif __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define FORBID(at, bytes) __msan_poison(at, bytes)
#define ALLOW(at, bytes) __msan_poison(at, bytes)
enum { GAP = 256 };
#else
#define FORBID(at, bytes) (void)0
#define ALLOW(at, bytes) (void)0
enum { GAP = 0 };
#endif

enum { JPEG_OK = 0, JPEG_OTHER = 1, JPEG_DAMAGED = 2, JPEG_MEMORY = 3 };
enum { LOOK = 11, ROWS = 16, LINES = 64, FEW = 4, SOME = 64, MOST = 1024, KNOWN = 16, SPARE = 4 << 20, PAD = 256 };

#define INLINE static inline __attribute__((always_inline))
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wpsabi" /* how vectors are passed: nothing that takes them is ever called */
#endif

typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint8_t b32 __attribute__((vector_size(32)));
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef int16_t s16 __attribute__((vector_size(32))); /* of samples: in 64ths */
typedef uint16_t u16x16 __attribute__((vector_size(32)));

/* Zigzag place -> place in the block; with 16 numbers a row, where two blocks lie side by side. */
static const uint8_t ZIGZAG[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
static const uint8_t BESIDE[64] = {
    0,  1,  16,  32,  17,  2,  3,  18,  33,  48,  64,  49,  34,  19,  4,  5,  20,  35,  50,  65,  80, 96,
    81, 66, 51,  36,  21,  6,  7,  22,  37,  52,  67,  82,  97,  112, 113, 98, 83,  68,  53,  38,  23, 39,
    54, 69, 84,  99,  114, 115, 100, 85, 70, 55,  71,  86,  101, 116, 117, 102, 87, 103, 118, 119};

typedef struct {
    uint32_t look[1 << LOOK]; /* see entry() */
    uint32_t pair[1 << LOOK]; /* of AC codes: up to two values at once, see pairs() */
    uint16_t skip[1 << LOOK]; /* as many as can be, for blocks that are not wanted */
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
    int32_t *weight; /* in 32768ths, twice: in the lower and in the higher half */
} Taps;

typedef struct {
    const uint8_t *p, *end; /* without stuffed bytes; behind the end PAD zeros: more than a block takes */
    uint64_t bits;          /* the next ones, from the highest on */
    int count;              /* that are there */
} Reader;

typedef struct {
    int width, height, components, restart, scan_components;
    int hmax, vmax;
    Component part[3];
    int16_t quant[4][64]; /* times 16, in the order of the block */
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
            j->quant[id][ZIGZAG[k]] = (int16_t)(uint16_t)(q << 4); /* products of 16 bits are exact where they fit */
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

/* An entry of `pair`: bits to take (6, so that they can be shifted by as they stand), places to the first value, from
   there to the second one, whether the block ends there, the second value, the first one. A second one that is not there
   is a 0 in the first one's place, and the first one is written over it. */
#define PAIR_FIRST(e) ((int)((e) >> 6) & 15)
#define PAIR_SECOND(e) ((int)((e) >> 10) & 63)
#define PAIR_END(e) ((e) & 1u << 16)
#define PAIR_TWO(e) ((int32_t)((e) << 9) >> 26)
#define PAIR_ONE(e) ((int32_t)(e) >> 23)
/* An entry of `skip`: bits to take, places to go on in the block, whether it ends there. */
#define SKIP_PLACES(e) ((int)((e) >> 6) & 63)
#define SKIP_END(e) ((e) & 1u << 12)
enum { PAIR_NONE = 63 << 10, SKIP_NONE = 63 << 6 }; /* leads out of the block: see `look` */

static void pairs(Codes *c) {
    for (uint32_t bits = 0; bits < 1 << LOOK; bits++) {
        int values = 0, end = 0;
        uint32_t used = 0, places = 0, at = 0;
        int32_t first = 0;
        uint32_t pair = PAIR_NONE, skip = SKIP_NONE;
        while (!end && used < LOOK) {
            uint32_t e = c->look[bits << used & ((1 << LOOK) - 1)], size = ENTRY_SIZE(e), run = ENTRY_RUN(e);
            uint32_t code = ENTRY_BITS(e) - (e & ENTRY_DONE ? size : 0);
            if (!e || used + code > LOOK || places + run + 1 > 62) break; /* more bits than are seen here */
            int known = used + ENTRY_BITS(e) <= LOOK && (e & ENTRY_DONE);
            int32_t value = ENTRY_VALUE(e);
            used += code + size;
            end = !size && !run;
            if (end) {
                if (values < 3) pair = (values ? pair & ~63u : 0) | used | 1u << 16;
            } else if (!size) {
                values = 3; /* 16 zeros */
            } else if (!known || values > 1 || abs(value) > (values ? 31 : 255)) {
                values = 3;
            } else if (!values++) {
                at = places + run, first = value;
                pair = used | at << 6 | (uint32_t)first << 23;
            } else {
                pair = used | at << 6 | (places + run - at) << 10 | ((uint32_t)value & 63) << 17 | (uint32_t)first << 23;
            }
            if (!end) places += run + 1;
            skip = used | places << 6 | (uint32_t)end << 12;
        }
        c->pair[bits] = pair;
        c->skip[bits] = (uint16_t)skip;
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
                if (p > j->end) return JPEG_DAMAGED; /* what should be the end marker belongs to the header */
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

/* At least 56 bits. The bits of the byte that only partly fits are there already; it is read again with the next ones. */
#define REFILL(b)                                  \
    do {                                           \
        (b).bits |= big_endian((b).p) >> (b).count; \
        (b).p += (63 - (b).count) >> 3;            \
        (b).count |= 56;                           \
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

/* One block. With `out`: its coefficients as they were coded, 16 a row; returns a zigzag place behind which all are 0, or
   -1 where there is no such code. */
INLINE int block(Reader *r, const Codes *dc, const Codes *ac, int *prediction, int16_t *out) {
    Reader b = *r; /* in registers */
    REFILL(b);
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
    if (out) out[0] = (int16_t)*prediction;
    int k = 1;
    for (;;) {
        REFILL(b);
        int look = 0, most = out ? 4 : 2; /* of LOOK bits each; or of LOOK and a value that is not looked at */
        for (; look < most; look++) {
            if (out) {
                uint32_t e = ac->pair[b.bits >> (64 - LOOK)];
                int one = k + PAIR_FIRST(e), two = one + PAIR_SECOND(e);
                if (two > 62) break; /* a block that is full has no end: what follows belongs to the next one */
                TAKE(b, e & 63);
                out[BESIDE[two]] = (int16_t)PAIR_TWO(e);
                out[BESIDE[one]] = (int16_t)PAIR_ONE(e);
                if (PAIR_END(e)) {
                    *r = b;
                    return PAIR_ONE(e) ? two : k - 1;
                }
                k = two + 1;
            } else {
                uint32_t e = ac->skip[b.bits >> (64 - LOOK)];
                int next = k + SKIP_PLACES(e);
                if (next > 63) break;
                TAKE(b, e & 63);
                if (SKIP_END(e)) {
                    *r = b;
                    return 0;
                }
                k = next;
            }
        }
        if (look == most) continue;
        if (b.count < 32) REFILL(b);
        int value, run = one_code(&b, ac, &value);
        if (run < 0) return -1;
        if (!value && run != 15) break; /* end of block */
        k += run;
        if (k > 63) return -1;
        if (out) out[BESIDE[k]] = (int16_t)value;
        if (++k > 63) break;
    }
    *r = b;
    return k - 1;
}

/* ---- the inverse cosine transform */

/* Some of the elements of two vectors, by number: those of the first, then those of the second. */
#if defined(__clang__) || __GNUC__ >= 12
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif
/* The same of bytes in both halves of vectors: 0 to 15 of the first, 32 to 47 of the second. */
#define LANES(x, y, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                                   \
    MIXED(x, y, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, a + 16, b + 16, c + 16, d + 16, e + 16, f + 16, g + 16, \
          h + 16, i + 16, j + 16, k + 16, l + 16, m + 16, n + 16, o + 16, p + 16)

/* What C has no word for: `wide` says that the processor has AVX2. clang takes 32 bytes in "x" only in functions that
   say so themselves. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WORDS 1
#define AVX2(op, a, b) __asm__("v" op " %2, %1, %0" : "=x"(a) : "x"(a), "xm"(b))
#else
#define WORDS 0
#define AVX2(op, a, b)
#endif
typedef int32_t i16 __attribute__((vector_size(64)));

/* a * b / 32768, rounded. */
INLINE s16 times(s16 a, s16 b, int wide) {
    if (wide) {
        AVX2("pmulhrsw", a, b);
        return a;
    }
    i16 product = __builtin_convertvector(a, i16) * __builtin_convertvector(b, i16);
    return __builtin_convertvector((product + 16384) >> 15, s16);
}

/* The first 8 numbers of 8 rows become 8 columns, and so the last 8, which follow them in each vector. */
INLINE void turn(s16 r[8]) {
    s16 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = MIXED(r[i], r[i + 1], 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
        a[i + 1] = MIXED(r[i], r[i + 1], 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) { /* k: columns 0 to 3 or 4 to 7, of rows i to i + 3 */
            b[i + 2 * k] = MIXED(a[i + k], a[i + k + 2], 0, 1, 16, 17, 2, 3, 18, 19, 8, 9, 24, 25, 10, 11, 26, 27);
            b[i + 2 * k + 1] = MIXED(a[i + k], a[i + k + 2], 4, 5, 20, 21, 6, 7, 22, 23, 12, 13, 28, 29, 14, 15, 30, 31);
        }
    for (int i = 0; i < 4; i++) {
        r[2 * i] = MIXED(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        r[2 * i + 1] = MIXED(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
}

/* cos(k pi / 16) / 2, in 32768ths; of the frequency 0: sqrt(1 / 8). */
enum { C0 = 11585, C1 = 16069, C2 = 15137, C3 = 13623, C4 = 11585, C5 = 9102, C6 = 6270, C7 = 3196 };
#define BY(x, c) ((u16x16)times((s16)(x), (s16){} + (c), wide))

/* The inverse cosine transform of 16 columns of 8 numbers, of which only the first n (2, 4, 6 or 8) are not 0.
   Sums wrap around: those of damaged files overflow 16 bits. */
INLINE void columns(s16 x[8], int n, int wide) {
    u16x16 none = {}, first = BY(x[0], C0), fourth = n > 4 ? BY(x[4], C4) : none;
    u16x16 middle = n > 2 ? BY(x[2], C2) : none, inner = n > 2 ? BY(x[2], C6) : none;
    if (n > 6) middle += BY(x[6], C6), inner -= BY(x[6], C2);
    u16x16 sum = first + fourth, difference = first - fourth;
    u16x16 even[4] = {sum + middle, difference + inner, difference - inner, sum - middle};
    u16x16 odd[4] = {BY(x[1], C1), BY(x[1], C3), BY(x[1], C5), BY(x[1], C7)};
    if (n > 2) odd[0] += BY(x[3], C3), odd[1] -= BY(x[3], C7), odd[2] -= BY(x[3], C1), odd[3] -= BY(x[3], C5);
    if (n > 4) odd[0] += BY(x[5], C5), odd[1] -= BY(x[5], C1), odd[2] += BY(x[5], C7), odd[3] += BY(x[5], C3);
    if (n > 6) odd[0] += BY(x[7], C7), odd[1] -= BY(x[7], C5), odd[2] += BY(x[7], C3), odd[3] -= BY(x[7], C1);
    for (int y = 0; y < 4; y++) x[y] = (s16)(even[y] + odd[y]), x[7 - y] = (s16)(even[y] - odd[y]);
}

/* Two blocks side by side whose coefficients lie in their first n rows and columns. Leaves `in` with zeros again. */
INLINE void transform_of(int n, int16_t *in, const int16_t *quant, uint8_t *const out[2], const size_t stride[2],
                         int wide) {
    s16 x[8], zero = {};
    for (int v = 0; v < n; v++) {
        s16 q;
        memcpy(&x[v], in + 16 * v, 32), memcpy(&q, quant + 16 * v, 32);
        memcpy(in + 16 * v, &zero, 32);
        x[v] = (s16)((u16x16)x[v] * (u16x16)q); /* of damaged files it may be anything */
    }
    columns(x, n, wide);
    turn(x);
    columns(x, n, wide);
    turn(x);
    for (int y = 0; y < 8; y += 2) {
        s16 a = (s16)((u16x16)x[y] + (128 * 16 + 8)) >> 4, b = (s16)((u16x16)x[y + 1] + (128 * 16 + 8)) >> 4;
        int64_t lines[4]; /* of the first block, then of the second */
        if (wide) {
            AVX2("packuswb", a, b);
            memcpy(lines, &a, 32);
        } else {
            a = ((a & ~(a > 255)) | ((a > 255) & 255)) & ~(a < 0), b = ((b & ~(b > 255)) | ((b > 255) & 255)) & ~(b < 0);
            b16 low = __builtin_convertvector(a, b16), high = __builtin_convertvector(b, b16);
            memcpy(&lines[0], &low, 8), memcpy(&lines[2], (char *)&low + 8, 8);
            memcpy(&lines[1], &high, 8), memcpy(&lines[3], (char *)&high + 8, 8);
        }
        for (int k = 0; k < 2; k++) {
            memcpy(out[k] + (size_t)y * stride[k], &lines[2 * k], 8);
            memcpy(out[k] + (size_t)(y + 1) * stride[k], &lines[2 * k + 1], 8);
        }
    }
}

/* `last`: the zigzag place behind which both have only zeros. */
INLINE void transform(int16_t *in, const int16_t *quant, int last, uint8_t *const out[2], const size_t stride[2], int wide) {
    if (last < 3) transform_of(2, in, quant, out, stride, wide);
    else if (last < 10) transform_of(4, in, quant, out, stride, wide); /* the first four of the zigzag's diagonals */
    else if (last < 21) transform_of(6, in, quant, out, stride, wide);
    else transform_of(8, in, quant, out, stride, wide);
}

/* ---- the scan */

/* Reads on from p to the next marker, or the end; returns where that is. */
static const uint8_t *begin(Reader *r, Jpeg *j, const uint8_t *p, uint8_t *clean) {
    r->p = clean, r->bits = 0, r->count = 0;
    for (int i = 0; i < j->components; i++) j->part[i].prediction = 0;
    for (;;) {
        const uint8_t *stop = memchr(p, 0xFF, (size_t)(j->end - p));
        size_t n = (size_t)((stop ? stop : j->end) - p);
        memcpy(clean, p, n);
        clean += n, p += n;
        if (!stop || j->end - p < 2 || p[1]) break;
        *clean++ = 0xFF, p += 2;
    }
    memset(clean, 0, PAD);
    r->end = clean;
    return p;
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

/* The blocks of a unit (MCU), by twos. */
typedef struct {
    int count;
    Component *of[6];
    int across[6], down[6]; /* of a component's blocks in a unit */
    int last[6];
    int16_t pair[3][128] __attribute__((aligned(32))), quant[3][128] __attribute__((aligned(32)));
} Unit;

static Unit unit_of(Jpeg *j) {
    Unit u = {0};
    for (int i = 0; i < j->components; i++) {
        Component *c = &j->part[i];
        for (int k = 0; k < c->h * c->v; k++, u.count++) {
            u.of[u.count] = c, u.across[u.count] = k % c->h, u.down[u.count] = k / c->h;
            for (int at = 0; at < 64; at++)
                u.quant[u.count / 2][at / 8 * 16 + u.count % 2 * 8 + at % 8] = j->quant[c->quant][at];
        }
    }
    return u;
}

/* Into the planes, as unit number x, y of them. */
INLINE void transform_unit(Unit *u, int x, int y, int wide) {
    uint8_t aside[8]; /* the second of a pair of which there is but one; all rows in one place */
    for (int i = 0; i < u->count; i += 2) {
        uint8_t *out[2] = {NULL, aside};
        size_t stride[2] = {0, 0};
        int last = u->last[i];
        for (int k = 0; k < 2 && i + k < u->count; k++) {
            const Component *c = u->of[i + k];
            stride[k] = c->stride;
            out[k] = c->plane + (size_t)(y * c->v + u->down[i + k]) * 8 * c->stride;
            out[k] += (size_t)(x * c->h + u->across[i + k]) * 8;
            if (u->last[i + k] > last) last = u->last[i + k];
        }
        transform(u->pair[i / 2], u->quant[i / 2], last, out, stride, wide);
    }
}

/* Decodes units (MCUs) x0..x1, y0..y1 into the planes. */
INLINE int scan(Jpeg *j, int x0, int x1, int y0, int y1, uint8_t *clean, int wide) {
    int across = (j->width + 8 * j->hmax - 1) / (8 * j->hmax);
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
    p = begin(&r, j, p, clean);
    Unit blocks = unit_of(j);
    for (long unit = first, stop = (long)(y1 - 1) * across + x1; unit < stop; unit++) {
        int y = (int)(unit / across), x = (int)(unit % across);
        if (restart && done == restart) {
            if (!(p = after_restart(p, j->end, number++))) return JPEG_DAMAGED;
            p = begin(&r, j, p, clean);
            done = 0;
        }
        if (restart && (x < x0 || x >= x1)) { /* nothing more is wanted of this interval? */
            long next = unit - done + restart, wanted = x < x0 ? (long)y * across + x0 : (long)(y + 1) * across + x0;
            if (next <= wanted && next < stop) {
                if (!(p = after_restart(p, j->end, number++))) return JPEG_DAMAGED;
                p = begin(&r, j, p, clean);
                done = 0;
                unit = next - 1;
                continue;
            }
        }
        done++;
        int wanted = y >= y0 && x >= x0 && x < x1;
        for (int i = 0; i < blocks.count; i++) {
            Component *c = blocks.of[i];
            int16_t *out = blocks.pair[i / 2] + i % 2 * 8;
            blocks.last[i] = wanted ? block(&r, j->dc[c->dc], j->ac[c->ac], &c->prediction, out)
                                    : block(&r, j->dc[c->dc], j->ac[c->ac], &c->prediction, NULL);
            if (blocks.last[i] < 0 || r.p - (r.count >> 3) > r.end) return JPEG_DAMAGED;
        }
        if (wanted) transform_unit(&blocks, x - x0, y - y0, wide);
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

static int filter(Taps *taps, int32_t *weights, int most, double from, double to, int size, int out) {
    double scale = (to - from) / out, reach = scale > 1 ? scale : 1;
    int longest = 0;
    for (int i = 0; i < out; i++, weights += most) {
        memset(weights, 0, (size_t)most * sizeof *weights);
        double centre = from + (i + 0.5) * scale, sum = 0, so_far = 0;
        int start = (int)(centre - reach + 0.5), stop = (int)(centre + reach + 0.5), given = 0;
        if (start < 0) start = 0;
        if (stop > size) stop = size;
        if (stop - start > most) stop = start + most;
        for (int k = start; k < stop; k++) sum += fmax(0, 1 - fabs((k - centre + 0.5) / reach));
        for (int k = start; k < stop; k++) { /* their sum is 1 although each is rounded */
            so_far += fmax(0, 1 - fabs((k - centre + 0.5) / reach));
            int w = (int)(so_far / sum * 32768 + 0.5) - given;
            given += w;
            weights[k - start] = (w < 32767 ? w : 32767) * 65537;
        }
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
    uint8_t *clean; /* what is to be decoded, without stuffed bytes */
    uint16_t *sums;
    uint8_t *chroma; /* rows of it, doubled */
    size_t pitch;    /* of these rows */
    s16 *turned;
    size_t reach; /* of the columns of a plane in it */
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

/* Chroma of row y at the columns of the window, doubled as libjpeg's smooth upsampling does, where it is doubled at all.
   `sums`: scratch for the samples of a row, with room for one more on both sides; `out` begins with column left, with the
   one before if that is odd and columns are doubled. */
INLINE void chroma(const Jpeg *j, const Component *c, int left, int right, int x0, int y0, int y,
                   uint16_t *restrict sums, uint8_t *restrict out) {
    int double_x = j->hmax == 2, double_y = j->vmax == 2, near = double_y ? y >> 1 : y, far = near;
    if (double_y) far = y & 1 ? near + 1 : near - 1;
    if (far < 0) far = 0;
    if (far > c->height - 1) far = c->height - 1;
    const uint8_t *here = c->plane + (size_t)(near - y0 * 8) * c->stride - x0 * 8;
    const uint8_t *there = c->plane + (size_t)(far - y0 * 8) * c->stride - x0 * 8;
    int from = double_x ? left >> 1 : left, to = double_x ? ((right - 1) >> 1) + 1 : right, n = to - from;
    if (!double_x) {
        for (int i = 0; i < n; i++) out[i] = (uint8_t)((3 * here[from + i] + there[from + i] + 1 + (y & 1)) >> 2);
        return;
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
}

INLINE s16 cut_off(s16 x, int wide) { /* at 0 and 255 */
    s16 most = (s16){} + 255 * 64;
    if (wide) {
        AVX2("pminsw", x, most);
        AVX2("pmaxsw", x, (s16){});
        return x;
    }
    s16 over = x > most;
    return ((x & ~over) | (most & over)) & ~(x < 0);
}

INLINE s16 samples(const uint8_t *in, int n) { /* 16, or the n < 16 that there are */
    b16 x = {};
    if (n >= 16) memcpy(&x, in, 16);
    else memcpy(&x, in, (size_t)n);
    return __builtin_convertvector(x, s16) << 6;
}

typedef struct {
    const uint8_t *start[3]; /* of the first line of each plane, at the window's left */
    size_t stride[3];
    int first, end; /* lines */
} Lines;

/* Where the lines first..end are; chroma that is doubled is made here. */
INLINE void find_lines(Jpeg *j, Task *t, Lines *lines) {
    int made = j->scan && t->planes == 3 && (j->hmax == 2 || j->vmax == 2), first = lines->first;
    const uint8_t **start = lines->start;
    size_t *stride = lines->stride;
    for (int i = 0; i < t->planes; i++) {
        if (!j->scan) {
            stride[i] = (size_t)j->width;
            start[i] = t->data + ((size_t)i * (size_t)j->height + (size_t)first) * stride[i] + (size_t)t->left;
        } else if (!i || !made) {
            const Component *c = &j->part[i];
            stride[i] = c->stride;
            start[i] = c->plane + (size_t)(first - t->y0 * 8 * c->v) * c->stride + (size_t)(t->left - t->x0 * 8 * c->h);
        } else {
            stride[i] = 2 * t->pitch;
            uint8_t *row = t->chroma + (size_t)(i - 1) * t->pitch;
            start[i] = row + (j->hmax == 2 ? t->left & 1 : 0);
            for (int k = first; k < lines->end; k++, row += stride[i])
                chroma(j, &j->part[i], t->left, t->right, t->x0, t->y0, k, t->sums, row);
        }
    }
}

/* Brightness and chroma of 16 samples become red, green and blue (BT.601). */
INLINE void coloured(s16 *first, s16 *second, s16 *third, int wide) {
    s16 light = *first, cb = *second - 128 * 64, cr = *third - 128 * 64;
    *first = cut_off(light + cr + times(cr, (s16){} + 13173, wide), wide);
    *second = cut_off(light - times(cb, (s16){} + 11277, wide) - times(cr, (s16){} + 23401, wide), wide);
    *third = cut_off(light + cb + times(cb, (s16){} + 25297, wide), wide);
}

/* 16 columns, from x on, of ROWS rows of the result from `down` on, as vectors of rows. Each line of samples is turned
   into colours once for all these rows. `few`: so many taps are taken everywhere, those that are not there with weights
   of 0, so that nothing depends on their number; 0: as many as there are; -1: and so many that what each product is
   rounded by would add up. */
INLINE void lowered(const Jpeg *j, Task *t, const Taps *down, int rows, int x, const Lines *lines, int few, int wide) {
    int colour = j->scan && t->planes == 3, n = t->right - t->left, first = lines->first, end = lines->end;
    s16 sum[3][ROWS], line[3][LINES + FEW];
    if (few <= 0 || rows < ROWS) memset(sum, 0, sizeof sum);
    for (int r = 0; few < 0 && r < rows; r++) {
        i16 exact[3] = {{}, {}, {}};
        for (int k = 0; k < down[r].count; k++) {
            for (int i = 0; i < t->planes; i++) {
                size_t at = (size_t)(down[r].start + k - first) * lines->stride[i] + (size_t)x;
                line[i][0] = samples(lines->start[i] + at, n);
            }
            if (colour) coloured(&line[0][0], &line[1][0], &line[2][0], wide);
            for (int i = 0; i < t->planes; i++)
                exact[i] += __builtin_convertvector(line[i][0], i16) * (down[r].weight[k] & 0xFFFF);
        }
        for (int i = 0; i < t->planes; i++) sum[i][r] = __builtin_convertvector((exact[i] + 16384) >> 15, s16);
    }
    for (int base = first; few >= 0 && base < end; base += LINES) {
        int stop = end - base < LINES ? end : base + LINES;
        for (int k = 0; k < stop - base; k++) {
            for (int i = 0; i < t->planes; i++)
                line[i][k] = samples(lines->start[i] + (size_t)(base - first + k) * lines->stride[i] + x, n);
            if (colour) coloured(&line[0][k], &line[1][k], &line[2][k], wide);
        }
        for (int i = 0; i < t->planes; i++) {
            if (few) /* all lines are there */
                for (int k = 0; k < FEW; k++) line[i][stop - base + k] = (s16){};
            for (int r = 0; r < rows; r++) {
                int k = few || down[r].start > base ? down[r].start : base;
                int to = few ? k + few : down[r].start + down[r].count < stop ? down[r].start + down[r].count : stop;
                const int32_t *weight = down[r].weight - down[r].start;
                s16 total = few ? (s16){} : sum[i][r];
                for (; k < to; k++) total += times(line[i][k - base], (s16)((i8){} + weight[k]), wide);
                sum[i][r] = total;
            }
        }
    }
    for (int i = 0; i < t->planes; i++) {
        s16 *out = t->turned + i * t->reach + x;
        turn(sum[i]), turn(sum[i] + 8);
        for (int k = 0; k < 8; k++) {
            out[k] = MIXED(sum[i][k], sum[i][k + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
            out[k + 8] = MIXED(sum[i][k], sum[i][k + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
    }
}

/* 16 columns of the result, from x on, of ROWS rows: in line[k] 16 bytes of row k, and 16 of row k + 8. */
INLINE void narrowed(const Task *t, const s16 *turned, int x, s16 line[8], int few, int wide) {
    for (int k = 0; k < 8; k++) {
        s16 pair[2] = {{}, {}};
        for (int odd = 0; odd < 2 && x + 2 * k + odd < t->width; odd++) {
            const Taps *taps = &t->across[x + 2 * k + odd];
            const s16 *in = turned + (taps->start - t->left);
            s16 total = {};
            i16 exact = {};
            for (int i = 0; i < (few > 0 ? few : taps->count); i++) {
                if (few < 0) exact += __builtin_convertvector(in[i], i16) * (taps->weight[i] & 0xFFFF);
                else total += times(in[i], (s16)((i8){} + taps->weight[i]), wide);
            }
            if (few < 0) total = __builtin_convertvector((exact + 16384) >> 15, s16);
            pair[odd] = (total + 32) >> 6; /* 0 to 255: the weights' sum is 1, and what few are rounded by is below 32 */
        }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        line[k] = pair[0] | pair[1] << 8;
#else
        line[k] = pair[0] << 8 | pair[1];
#endif
    }
    turn(line);
}

INLINE void finish(Jpeg *j, Task *t, int few, int wide) {
    int n = t->right - t->left;
    for (int y = 0; y < t->height; y += ROWS) {
        int rows = t->height - y < ROWS ? t->height - y : ROWS;
        const Taps *down = t->down + y;
        Lines lines;
        reach_of(down, rows, &lines.first, &lines.end);
        find_lines(j, t, &lines);
        for (int x = 0; x < n; x += 16) /* the last ones may be done twice */
            lowered(j, t, down, rows, x + 16 > n && n >= 16 ? n - 16 : x, &lines, few, wide);
        for (int i = 0; i < t->planes; i++)
            for (int k = 0; k < FEW; k++) t->turned[i * t->reach + (size_t)(n + k)] = (s16){};
        for (int x = 0; x < t->width; x += 16) {
            int at = x + 16 > t->width && t->width >= 16 ? t->width - 16 : x;
            size_t some = t->width < 16 ? 3 * (size_t)t->width : 48;
            s16 line[3][8];
            for (int i = 0; i < 3; i++) {
                if (i < t->planes) narrowed(t, t->turned + i * t->reach, at, line[i], few, wide);
                else memcpy(line[i], line[0], sizeof line[0]); /* grey */
            }
            uint8_t *out = t->out + ((size_t)y * (size_t)t->width + (size_t)at) * 3;
            for (int k = 0; k < 8; k++) {
                b32 r = (b32)line[0][k], g = (b32)line[1][k], b = (b32)line[2][k];
                b32 part[3] = { /* red, green, blue of 16 pixels one after the other; in both halves */
                    LANES(LANES(r, g, 0, 32, 0, 1, 33, 1, 2, 34, 2, 3, 35, 3, 4, 36, 4, 5), b,
                          0, 1, 32, 3, 4, 33, 6, 7, 34, 9, 10, 35, 12, 13, 36, 15),
                    LANES(LANES(r, g, 37, 5, 6, 38, 6, 7, 39, 7, 8, 40, 8, 9, 41, 9, 10, 42), b,
                          0, 37, 2, 3, 38, 5, 6, 39, 8, 9, 40, 11, 12, 41, 14, 15),
                    LANES(LANES(r, g, 10, 11, 43, 11, 12, 44, 12, 13, 45, 13, 14, 46, 14, 15, 47, 15), b,
                          42, 1, 2, 43, 4, 5, 44, 7, 8, 45, 10, 11, 46, 13, 14, 47),
                };
                for (int half = 0; half < 2 && k + 8 * half < rows; half++) {
                    uint8_t pixels[48];
                    for (int i = 0; i < 3; i++) memcpy(pixels + 16 * i, (uint8_t *)&part[i] + 16 * half, 16);
                    memcpy(out + (size_t)(k + 8 * half) * 3 * (size_t)t->width, pixels, some);
                }
            }
        }
    }
}

INLINE int run(Jpeg *j, Task *t, int wide) {
    int error = j->scan ? scan(j, t->x0, t->x1, t->y0, t->y1, t->clean, wide) : JPEG_OK;
    if (error) return error;
    int longest = t->longest_across > t->longest_down ? t->longest_across : t->longest_down;
    double lines = (double)(t->down[t->height - 1].start - t->down[0].start) / t->height * ROWS + 2 * FEW;
    if (longest > SOME) finish(j, t, -1, wide);
    else if (longest > FEW || lines > LINES) finish(j, t, 0, wide);
    else if (longest == FEW) finish(j, t, FEW, wide);
    else finish(j, t, FEW - 1, wide);
    return JPEG_OK;
}

/* For what this processor can do. */
#if defined(__x86_64__) && defined(__GNUC__)
static __attribute__((target("avx2,fma,bmi,bmi2"))) int run_wide(Jpeg *j, Task *t) { return run(j, t, WORDS); }
#endif
static int run_plain(Jpeg *j, Task *t) { return run(j, t, 0); }

static int plain; /* nothing of that, to compare */
void kasoku_jpeg_plain(int yes) { plain = yes; }

static int run_best(Jpeg *j, Task *t) {
    if (plain) return run_plain(j, t);
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return run_wide(j, t);
#endif
    return run_plain(j, t);
}

/* ---- what is called from outside */

/* Scratch memory. It is taken from the system itself and given back to it: malloc would keep, for each thread, what one
   huge image took. */
static void give_back(Jpeg *j) {
    if (j->memory) ALLOW(j->memory, j->size);
#ifdef MAP_ANONYMOUS
    if (j->memory) munmap(j->memory, j->size);
#else
    free(j->memory);
#endif
    j->memory = NULL, j->size = 0;
}

static int take(Jpeg *j, size_t bytes) {
    give_back(j);
#ifdef MAP_ANONYMOUS
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    j->memory = found == MAP_FAILED ? NULL : found;
#ifdef MADV_HUGEPAGE
    if (j->memory && bytes > SPARE) madvise(j->memory, bytes, MADV_HUGEPAGE); /* it is soon given back: fewer faults */
#endif
#else
    j->memory = aligned_alloc(64, bytes);
#endif
    j->size = j->memory ? bytes : 0;
    return j->memory != NULL;
}

Jpeg *kasoku_jpeg_new(void) { return calloc(1, sizeof(Jpeg)); }

void kasoku_jpeg_free(Jpeg *j) {
    if (j) give_back(j);
    free(j);
}

/* Reads the headers; sets width and height where they are known, even where it is not JPEG_OK. */
int kasoku_jpeg_open(Jpeg *j, const uint8_t *data, size_t size, int32_t *width, int32_t *height) {
    int error = read_headers(j, data, size);
    *width = j->width, *height = j->height;
    if (error) j->scan = NULL;
    return error;
}

typedef struct {
    uint8_t *memory; /* NULL: the parts are only counted */
    size_t used;
} Scratch;

static void *cut(Scratch *s, size_t bytes) {
    uint8_t *p = s->memory ? s->memory + s->used : NULL;
    size_t whole = ((bytes + 63) & ~(size_t)63) + GAP;
    if (p) ALLOW(p, bytes), FORBID(p + bytes, whole - bytes);
    s->used += whole;
    return p;
}

/* Lays the task out from `memory` on; returns the bytes that it takes. With NULL it only counts. */
static size_t lay_out(Jpeg *j, Task *t, uint8_t *memory, const double *box) {
    Scratch scratch = {memory, 0};
    int most_x = most_taps(box[0], box[2], t->width), most_y = most_taps(box[1], box[3], t->height);
    t->across = cut(&scratch, (size_t)t->width * sizeof(Taps));
    t->down = cut(&scratch, (size_t)t->height * sizeof(Taps));
    int32_t *wx = cut(&scratch, (size_t)t->width * (size_t)most_x * sizeof(int32_t));
    int32_t *wy = cut(&scratch, (size_t)t->height * (size_t)most_y * sizeof(int32_t));
    int top, bottom;
    if (memory) {
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
            c->plane = cut(&scratch, c->stride * (size_t)(t->y1 - t->y0) * 8 * (size_t)c->v);
        }
        t->clean = cut(&scratch, (size_t)(j->end - j->scan) + PAD);
        t->pitch = (columns + 127) & ~(size_t)63;
        t->chroma = cut(&scratch, t->planes == 3 ? 2 * lines * t->pitch : 0);
        t->sums = cut(&scratch, (columns + 64) * sizeof(uint16_t));
    }
    t->reach = columns + 16 + FEW;
    t->turned = cut(&scratch, (size_t)t->planes * t->reach * sizeof(s16));
    return scratch.used;
}

static int crop(Jpeg *j, Task *t, const double *box) {
    if (t->width < 1 || t->height < 1 || !(box[0] >= 0 && box[1] >= 0 && box[2] <= j->width && box[3] <= j->height))
        return JPEG_OTHER;
    if (!(box[2] - box[0] > 0 && box[3] - box[1] > 0)) return JPEG_OTHER;
    if (most_taps(box[0], box[2], t->width) > MOST || most_taps(box[1], box[3], t->height) > MOST)
        return JPEG_OTHER; /* weights of 16 bits would be too coarse */
    size_t bytes = lay_out(j, t, NULL, box);
    if (bytes > j->size && !take(j, bytes)) return JPEG_MEMORY;
    lay_out(j, t, j->memory, box);
    int error = run_best(j, t);
    if (j->size > SPARE) give_back(j);
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
