/* libibverbs as it is used here: posting and polling, which are inlines over the provider's table, so that nothing is linked. */
#ifndef FABRICX_VERBS_API_H
#define FABRICX_VERBS_API_H
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>

#define VB_CHAIN 16
#define VB_POLL 16              /* completions taken at once */

typedef struct {                /* work requests whose links and lists are set once */
    struct ibv_send_wr wr[VB_CHAIN];
    struct ibv_sge sge[VB_CHAIN];
    struct ibv_recv_wr rwr[64];
} vb_templates;

typedef struct {                /* chains of pages: of each only the addresses change, and of the last of a short one its end */
    struct ibv_send_wr wr[VB_CHAIN];
    struct ibv_sge sge[VB_CHAIN];
    uint64_t src, sstride, base, dst, dstride, top;
    const void *si, *di;
    int kinds, chain;           /* kinds of index arrays: 3 * source + target; 0 none, 1 of 32 bits, 2 of 64 */
    int stop, rest;
} vb_pages;

static inline void vb_prepare(vb_templates *t) {
    memset(t, 0, sizeof *t);
    for (int i = 0; i < VB_CHAIN; i++) {
        t->wr[i].sg_list = &t->sge[i];
        t->wr[i].num_sge = 1;
        t->wr[i].next = i + 1 < VB_CHAIN ? &t->wr[i + 1] : NULL;
    }
    for (int i = 0; i < 64; i++) t->rwr[i].next = i < 63 ? &t->rwr[i + 1] : NULL;
}
/* Fills place i; what does not change between pages of a chain is filled for each all the same: it is one cache line. */
static inline void vb_fill(vb_templates *t, int i, uint64_t id, uint64_t src, uint32_t len, uint32_t lkey, uint64_t dst,
                           uint32_t rkey, uint32_t imm, int has_imm, int inl) {
    struct ibv_send_wr *w = &t->wr[i];
    w->wr_id = id;
    t->sge[i].addr = src;
    t->sge[i].length = len;
    t->sge[i].lkey = lkey;
    w->num_sge = len != 0;
    w->opcode = has_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    w->send_flags = inl ? IBV_SEND_INLINE : 0;
    w->imm_data = htonl(imm);
    w->wr.rdma.remote_addr = dst;
    w->wr.rdma.rkey = rkey;
}
/* Places 0 .. n-1 under one doorbell; only the last gives a completion. 0, or an errno: the queue pair is of no use any more. */
static inline int vb_ring(struct ibv_qp *qp, vb_templates *t, int n) {
    struct ibv_send_wr *bad = NULL, *next = t->wr[n - 1].next;
    t->wr[n - 1].send_flags |= IBV_SEND_SIGNALED;
    t->wr[n - 1].next = NULL;
    int rc = ibv_post_send(qp, t->wr, &bad);
    t->wr[n - 1].next = next;
    return rc;
}
/* What all pages of a list have in common; the low byte of a wr_id is the place in its chain. */
static inline void vb_pages_begin(vb_pages *t, int chain, uint64_t id, uint32_t len, uint32_t lkey, uint32_t rkey, uint32_t imm,
                                  int has_imm, int inl) {
    t->chain = chain;
    for (int i = 0; i < chain; i++) {
        struct ibv_send_wr *w = &t->wr[i];
        t->sge[i].length = len;
        t->sge[i].lkey = lkey;
        w->wr_id = id + i;
        w->next = i + 1 < chain ? w + 1 : NULL;
        w->sg_list = &t->sge[i];
        w->num_sge = len != 0;
        w->opcode = has_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
        w->send_flags = (inl ? IBV_SEND_INLINE : 0) | (i + 1 < chain ? 0 : IBV_SEND_SIGNALED);
        w->imm_data = htonl(imm);
        w->wr.rdma.rkey = rkey;
    }
}
static inline __attribute__((always_inline)) uint64_t vb_index(const void *a, int kind, uint64_t i) {
    return kind == 0 ? i : kind == 1 ? ((const uint32_t *)a)[i] : ((const uint64_t *)a)[i];
}
/* The first n, fewer than a chain, under one doorbell; only the last gives a completion. */
static inline int vb_pages_ring(struct ibv_qp *qp, vb_pages *t, int n) {
    struct ibv_send_wr *bad = NULL, *last = &t->wr[n - 1], *next = last->next;
    last->next = NULL;
    last->send_flags |= IBV_SEND_SIGNALED;
    int rc = ibv_post_send(qp, t->wr, &bad);
    last->send_flags &= ~IBV_SEND_SIGNALED;
    last->next = next;
    return rc;
}
static inline __attribute__((always_inline)) uint32_t vb_pages_of(struct ibv_qp *qp, vb_pages *t, uint64_t at, uint32_t n, int chain,
                                                                   int skind, int dkind) {
    const uint64_t src = t->src, sstride = t->sstride, base = t->base, dst = t->dst, dstride = t->dstride, top = t->top;
    const void *si = t->si, *di = t->di;
    struct ibv_send_wr *bad = NULL;
    uint32_t done = 0, k = 0;
    uint64_t to;
#define VB_PAGE                                                             \
    to = dst + vb_index(di, dkind, at + done + k) * dstride;                \
    if (__builtin_expect(to > top, 0)) { t->stop = 1; goto rest; }          \
    t->wr[k].wr.rdma.remote_addr = base + to;                               \
    t->sge[k].addr = src + vb_index(si, skind, at + done + k) * sstride;
    for (; n - done >= (uint32_t)chain; done += chain) {
#pragma GCC unroll 4
        for (k = 0; k < (uint32_t)chain; k++) { VB_PAGE }
        if (__builtin_expect(ibv_post_send(qp, t->wr, &bad) != 0, 0)) { t->stop = 2; return done; }
    }
    for (k = 0; k < n - done; k++) { VB_PAGE }
#undef VB_PAGE
rest:
    if (k == 0) return done;
    if (vb_pages_ring(qp, t, (int)k)) { t->stop = 2; return done; }
    t->rest = (int)k;
    return done + k;
}
/* Posts pages at .. at + n - 1 in chains; how many it posted. `rest` of them were under the last doorbell if that was a short one, else
 * 0; `stop`: 0, 1: the next is not within the target's region, 2: the queue pair refuses. */
static inline uint32_t vb_pages_post(struct ibv_qp *qp, vb_pages *t, uint64_t at, uint32_t n) {
    t->stop = t->rest = 0;
#define VB_KINDS(s, d) \
    case 3 * s + d: return t->chain == 4 ? vb_pages_of(qp, t, at, n, 4, s, d) : vb_pages_of(qp, t, at, n, t->chain, s, d);
    switch (t->kinds) {
        VB_KINDS(0, 0) VB_KINDS(0, 1) VB_KINDS(0, 2) VB_KINDS(1, 0) VB_KINDS(1, 1) VB_KINDS(1, 2) VB_KINDS(2, 0) VB_KINDS(2, 1)
    default: return t->chain == 4 ? vb_pages_of(qp, t, at, n, 4, 2, 2) : vb_pages_of(qp, t, at, n, t->chain, 2, 2);
    }
#undef VB_KINDS
}
static inline int vb_send(struct ibv_qp *qp, uint64_t id, void *buf, uint32_t len, uint32_t lkey, uint32_t inl) {
    struct ibv_sge s = { (uintptr_t)buf, len, lkey };
    struct ibv_send_wr w = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED | (len <= inl ? IBV_SEND_INLINE : 0) }, *bad;
    return ibv_post_send(qp, &w, &bad);
}
static inline int vb_recv(struct ibv_srq *srq, uint64_t id, void *buf, uint32_t len, uint32_t lkey) {
    struct ibv_sge s = { (uintptr_t)buf, len, lkey };
    struct ibv_recv_wr w = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;
    return ibv_post_srq_recv(srq, &w, &bad);
}
/* n <= 64 empty receives, for immediates; how many of them were taken. */
static inline int vb_recv_empty(struct ibv_srq *srq, vb_templates *t, uint64_t id, int n) {
    struct ibv_recv_wr *bad = NULL, *next = t->rwr[n - 1].next;
    for (int i = 0; i < n; i++) t->rwr[i].wr_id = id;
    t->rwr[n - 1].next = NULL;
    int rc = ibv_post_srq_recv(srq, t->rwr, &bad);
    t->rwr[n - 1].next = next;
    return rc == 0 ? n : bad == NULL ? 0 : (int)(bad - t->rwr);
}
static inline int vb_poll(struct ibv_cq *cq, struct ibv_wc *wc) { return ibv_poll_cq(cq, VB_POLL, wc); }
/* How many completions from here on, before the end, are alike, all of them good. */
static inline int vb_alike(const struct ibv_wc *wc, const struct ibv_wc *end) {
    const struct ibv_wc *w = wc;
    const uint64_t id = wc->wr_id;
    while (w < end && w->wr_id == id && w->status == IBV_WC_SUCCESS) w++;
    return (int)(w - wc);
}
static inline uint32_t vb_imm(const struct ibv_wc *wc) { return ntohl(wc->imm_data); }
/* Takes what the completion channel has to say, acknowledging each event to its queue as ibv_ack_cq_events() would. */
static inline void vb_drain(int fd) {
    uint64_t e[16];
    ssize_t k;
    while ((k = read(fd, e, sizeof e)) > 0)
        for (size_t i = 0; i < (size_t)k / 8; i++) {
            struct ibv_cq *cq = (struct ibv_cq *)(uintptr_t)e[i];
            pthread_mutex_lock(&cq->mutex);
            cq->comp_events_completed++;
            pthread_cond_signal(&cq->cond);
            pthread_mutex_unlock(&cq->mutex);
        }
}
static inline int vb_notify(struct ibv_cq *cq) { return ibv_req_notify_cq(cq, 0); }
static inline uint32_t vb_qp_num(struct ibv_qp *q) { return q->qp_num; }
static inline void *vb_qp_pd(struct ibv_qp *q) { return q->pd; }
static inline void *vb_qp_context(struct ibv_qp *q) { return q->context; }
static inline void *vb_cq_context(struct ibv_cq *q) { return q->context; }
static inline int vb_cq_size(struct ibv_cq *q) { return q->cqe; }
static inline void *vb_srq_context(struct ibv_srq *q) { return q->context; }
static inline int vb_async_fd(void *context) { return ((struct ibv_context *)context)->async_fd; }
static inline int vb_channel_fd(void *channel) { return ((struct ibv_comp_channel *)channel)->fd; }
/* The C object inside a pyverbs one: PyObject head, weak references, logger, table, pointer. Its caller checks what it finds. */
static inline void *vb_inside(void *pyobject) { return ((void **)pyobject)[5]; }
#endif
