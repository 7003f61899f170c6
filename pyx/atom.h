/* The few C lines that Cython cannot say: atomics with a stated order, futexes, fork guard, copies. */
#ifndef FABRICX_ATOM_H
#define FABRICX_ATOM_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>
#include <linux/futex.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Building with -DFX_NO_FENCE_<name> takes that one fence out: the stress test's mutation control. */
static inline uint32_t ld_acq32(const volatile uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint64_t ld_acq64(const volatile uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint32_t ld_rlx32(const volatile uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t ld_rlx64(const volatile uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void st_rel32(volatile uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void st_rel64(volatile uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void st_rlx32(volatile uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void st_rlx64(volatile uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline uint32_t xchg32(volatile uint32_t *p, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t xchg64(volatile uint64_t *p, uint64_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint32_t fadd32(volatile uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t fadd64(volatile uint64_t *p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t for64(volatile uint64_t *p, uint64_t v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
static inline int cas32(volatile uint32_t *p, uint32_t old, uint32_t v) {
    return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); }
static inline int cas64(volatile uint64_t *p, uint64_t *old, uint64_t v) {
    return __atomic_compare_exchange_n(p, old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); }
static inline void *ld_acqp(void *const volatile *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void st_relp(void *volatile *p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void *xchgp(void *volatile *p, void *v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline int casp(void *volatile *p, void *old, void *v) {
    return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); }
static inline void full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void compiler_fence(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static inline uint64_t now_ns(void) {
    struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}
/* To the tick of the scheduler (4 ms at worst), for a fifth of the price: deadlines need no more. */
static inline uint64_t coarse_ns(void) {
    struct timespec t; clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}
/* Cycle counter for measurements only; its rate is measured, never assumed. */
static inline uint64_t tsc(void) {
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t v; __asm__ volatile("mrs %0, cntvct_el0" : "=r"(v)); return v;
#else
    return now_ns();
#endif
}

/* Futexes are shared (no PRIVATE flag): a word may live in a memfd that other processes map.
   ns < 0 waits without end. */
static inline long futex_wait(volatile uint32_t *p, uint32_t v, int64_t ns) {
    struct timespec ts = { ns / 1000000000, ns % 1000000000 };
    return syscall(SYS_futex, p, FUTEX_WAIT, v, ns < 0 ? NULL : &ts, NULL, 0);
}
static inline long futex_wake(volatile uint32_t *p, int n) { return syscall(SYS_futex, p, FUTEX_WAKE, n, NULL, NULL, 0); }
/* A bell is one word with two kinds of sleeper; its value and the wake mask say which one is meant. */
static inline long bell_wait(volatile uint32_t *p, uint32_t v, uint32_t who, int64_t ns) {
    struct timespec ts;
    if (ns >= 0) {                                     /* WAIT_BITSET takes an absolute time */
        clock_gettime(CLOCK_MONOTONIC, &ts);
        ts.tv_nsec += ns % 1000000000; ts.tv_sec += ns / 1000000000 + ts.tv_nsec / 1000000000;
        ts.tv_nsec %= 1000000000;
    }
    return syscall(SYS_futex, p, FUTEX_WAIT_BITSET, v, ns < 0 ? NULL : &ts, NULL, who);
}
static inline long bell_wake(volatile uint32_t *p, uint32_t who) {
    return syscall(SYS_futex, p, FUTEX_WAKE_BITSET, 1, NULL, NULL, who); }

/* Wakes whoever sleeps on `bell`, after something was published. The full fence orders the publication
   before the look at the bell: x86 needs it too (store, then load of another word). Returns 1 on a wake-up. */
static inline int ring_bell(volatile uint32_t *bell) {
#ifndef FX_NO_FENCE_bell
    full_fence();
#endif
    if (ld_rlx32(bell)) {
        uint32_t who = xchg32(bell, 0);
        if (who) { bell_wake(bell, who); return 1; }
    }
    return 0;
}

static inline void *alloc_lines(size_t n) {            /* zeroed, cache-line aligned */
    void *p = 0;
    if (posix_memalign(&p, 64, n ? n : 64)) return 0;
    memset(p, 0, n);
    return p;
}
/* Large tables of which little is used: zero pages that cost nothing until they are touched. */
static inline void *map_zeroed(size_t n) {
    void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}
static inline void unmap(void *p, size_t n) { if (p) munmap(p, n); }
static inline int pin_to(int core) {
    cpu_set_t s; CPU_ZERO(&s); CPU_SET(core, &s);
    return pthread_setaffinity_np(pthread_self(), sizeof s, &s);
}

/* Small copies as single stores where the size allows: no call into libc. */
static inline void copy_small(void *d, const void *s, uint64_t n) {
    if (n == 8) { uint64_t v; memcpy(&v, s, 8); memcpy(d, &v, 8); }
    else memcpy(d, s, n);
}
/* Non-temporal copy for bulk data; ends with sfence, so that what announces it may follow. */
#if defined(__x86_64__)
/* The source is fetched 2 KiB ahead into all caches: a non-temporal prefetch halves the rate, measured on Sapphire Rapids. */
#define COPY_NT(name, isa, vec, load, stream, line)                                                          \
    __attribute__((target(isa))) static inline void name(void *dv, const void *sv, uint64_t n) {             \
        char *d = (char *)dv; const char *s = (const char *)sv;                                              \
        uint64_t head = (64 - ((uintptr_t)d & 63)) & 63, body, i, k;                                         \
        if (n < 512) { memcpy(d, s, n); return; }                                                            \
        memcpy(d, s, head); d += head; s += head; n -= head;                                                 \
        body = n & ~(uint64_t)(4 * line - 1);                                                                \
        for (i = 0; i < body; i += 4 * line) {                                                               \
            vec a = load((const void *)(s + i)), b = load((const void *)(s + i + line));                     \
            vec c = load((const void *)(s + i + 2 * line)), e = load((const void *)(s + i + 3 * line));      \
            for (k = 0; k < 4 * line; k += 64) _mm_prefetch(s + i + 2048 + k, _MM_HINT_T0);                  \
            stream((vec *)(d + i), a); stream((vec *)(d + i + line), b);                                     \
            stream((vec *)(d + i + 2 * line), c); stream((vec *)(d + i + 3 * line), e);                      \
        }                                                                                                    \
        _mm_sfence();                                                                                        \
        memcpy(d + body, s + body, n - body);                                                                \
    }
#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD512(p) _mm512_loadu_si512(p)
COPY_NT(copy_nt_avx2, "avx2", __m256i, LOAD256, _mm256_stream_si256, 32)
COPY_NT(copy_nt_avx512, "avx512f", __m512i, LOAD512, _mm512_stream_si512, 64)
static inline void copy_nt(void *d, const void *s, uint64_t n) {
    static int best = -1;
    if (best < 0) best = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
    if (best == 2) copy_nt_avx512(d, s, n);
    else if (best == 1) copy_nt_avx2(d, s, n);
    else memcpy(d, s, n);
}
#else
static inline void copy_nt(void *d, const void *s, uint64_t n) { memcpy(d, s, n); }
#endif
#endif
