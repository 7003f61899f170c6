"""Declarations of atom.h; no logic."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef extern from "atom.h" nogil:
    uint32_t ld_acq32(const uint32_t*) noexcept
    uint64_t ld_acq64(const uint64_t*) noexcept
    uint32_t ld_rlx32(const uint32_t*) noexcept
    uint64_t ld_rlx64(const uint64_t*) noexcept
    void st_rel32(uint32_t*, uint32_t) noexcept
    void st_rel64(uint64_t*, uint64_t) noexcept
    void st_rlx32(uint32_t*, uint32_t) noexcept
    void st_rlx64(uint64_t*, uint64_t) noexcept
    uint32_t xchg32(uint32_t*, uint32_t) noexcept
    uint64_t xchg64(uint64_t*, uint64_t) noexcept
    uint32_t fadd32(uint32_t*, uint32_t) noexcept
    uint64_t fadd64(uint64_t*, uint64_t) noexcept
    uint64_t for64(uint64_t*, uint64_t) noexcept
    int cas32(uint32_t*, uint32_t, uint32_t) noexcept
    int cas64(uint64_t*, uint64_t*, uint64_t) noexcept
    void* ld_acqp(void**) noexcept
    void st_relp(void**, void*) noexcept
    void* xchgp(void**, void*) noexcept
    int casp(void**, void*, void*) noexcept
    void full_fence() noexcept
    void compiler_fence() noexcept
    void cpu_pause() noexcept
    uint64_t tsc() noexcept
    uint64_t now_ns() noexcept
    uint64_t coarse_ns() noexcept
    long futex_wait(uint32_t*, uint32_t, int64_t) noexcept
    long futex_wake(uint32_t*, int) noexcept
    long bell_wait(uint32_t*, uint32_t, uint32_t, int64_t) noexcept
    long bell_wake(uint32_t*, uint32_t) noexcept
    int ring_bell(uint32_t*) noexcept
    void* alloc_lines(size_t) noexcept
    void* map_zeroed(size_t) noexcept
    void unmap(void*, size_t) noexcept
    int pin_to(int) noexcept
    void copy_small(void*, const void*, uint64_t) noexcept
    void copy_nt(void*, const void*, uint64_t) noexcept
    int sched_yield() noexcept
    struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*) noexcept
    int pthread_join(pthread_t, void**) noexcept
