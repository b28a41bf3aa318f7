/* What the kernels for AVX-512 with bfloat16 share. AVX512 is defined where the compiler knows these instructions; WIDE
   lets it use them in a function. */

#ifndef KASOKU_AVX512_H
#define KASOKU_AVX512_H

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && (__GNUC__ >= 10 || defined(__clang__))
#define AVX512
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE WIDE static inline __attribute__((always_inline))
#define EACH _Pragma("GCC unroll 16") /* unrolls the next loop, of at most 16 iterations */
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))

/* A product of matrices keeps SINGLES rows of up to VECTORS registers of LANES float32 sums. */
enum { LANES = 16, VECTORS = 4, TILE = LANES * VECTORS, SINGLES = 6 };

/* KERNELS defines kernel_v_n for v registers and n rows, by the including file's KERNEL(v, n); NAMES is their table. */
#define KERNELS_OF(v) KERNEL(v, 1) KERNEL(v, 2) KERNEL(v, 3) KERNEL(v, 4) KERNEL(v, 5) KERNEL(v, 6)
#define KERNELS KERNELS_OF(1) KERNELS_OF(2) KERNELS_OF(3) KERNELS_OF(4)
#define NAMES_OF(v) {kernel_##v##_1, kernel_##v##_2, kernel_##v##_3, kernel_##v##_4, kernel_##v##_5, kernel_##v##_6}
#define NAMES {NAMES_OF(1), NAMES_OF(2), NAMES_OF(3), NAMES_OF(4)}
#endif

#endif
