/* Disturbs schedules: included ahead of everything (-include), it puts a seeded pause before every atomic operation of
   the code that is compiled after it, which stays as it is. Each thread draws from a stream of its own. */
#ifndef FABRICX_PERTURB_H
#define FABRICX_PERTURB_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdint.h>
#include <time.h>

static uint64_t perturb_seed = 0;                       /* 0: leave everything alone */
static uint64_t perturb_threads = 0, perturb_count = 0;
static __thread uint64_t perturb_x = 0, perturb_mine = 0;

static inline void perturb(void) {
    uint64_t x;
    if (perturb_seed == 0) return;
    if (perturb_mine != perturb_seed) {                 /* first time under this seed */
        perturb_mine = perturb_seed;
        perturb_x = perturb_seed * 0x9E3779B97F4A7C15ull
            + __sync_add_and_fetch(&perturb_threads, 1) * 0xD1B54A32D192ED03ull;
    }
    x = perturb_x;
    x ^= x << 13; x ^= x >> 7; x ^= x << 17;
    perturb_x = x;
    switch ((x >> 40) & 127) {                          /* most pass; a few let the other core far ahead */
    case 0: case 1: case 2: case 3:
        __sync_add_and_fetch(&perturb_count, 1); sched_yield(); break;
    case 4: case 5: case 6: case 7: case 8: case 9:
        __sync_add_and_fetch(&perturb_count, 1);
        for (x = (x >> 20) & 255; x; x--) __asm__ volatile("" ::: "memory");
        break;
    case 10:
        if (((x >> 20) & 3) == 0) { struct timespec t = { 0, 2000 }; nanosleep(&t, 0); }
        break;
    }
}

#define __atomic_load_n(p, o) (perturb(), __atomic_load_n(p, o))
#define __atomic_store_n(p, v, o) (perturb(), __atomic_store_n(p, v, o))
#define __atomic_exchange_n(p, v, o) (perturb(), __atomic_exchange_n(p, v, o))
#define __atomic_fetch_add(p, v, o) (perturb(), __atomic_fetch_add(p, v, o))
#define __atomic_fetch_or(p, v, o) (perturb(), __atomic_fetch_or(p, v, o))
#define __atomic_compare_exchange_n(p, e, v, w, s, f) (perturb(), __atomic_compare_exchange_n(p, e, v, w, s, f))
#endif
