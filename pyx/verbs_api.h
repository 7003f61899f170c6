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

typedef struct {                /* work requests whose links and lists are set once */
    struct ibv_send_wr wr[VB_CHAIN];
    struct ibv_sge sge[VB_CHAIN];
    struct ibv_recv_wr rwr[64];
} vb_templates;

typedef struct {
    uint64_t id;
    uint32_t qpn, imm, len, vendor;
    int status, opcode, has_imm;
} vb_comp;

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
static inline int vb_poll(struct ibv_cq *cq, vb_comp *out, int most) {
    struct ibv_wc wc[16];
    int n = ibv_poll_cq(cq, most < 16 ? most : 16, wc);
    for (int i = 0; i < n; i++) {
        out[i].id = wc[i].wr_id;
        out[i].qpn = wc[i].qp_num;
        out[i].status = wc[i].status;
        out[i].vendor = wc[i].vendor_err;
        out[i].opcode = wc[i].opcode;
        out[i].len = wc[i].byte_len;
        out[i].has_imm = wc[i].status == IBV_WC_SUCCESS && (wc[i].wc_flags & IBV_WC_WITH_IMM) != 0;
        out[i].imm = out[i].has_imm ? ntohl(wc[i].imm_data) : 0;
    }
    return n;
}
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
static inline void *vb_qp_context(struct ibv_qp *q) { return q->context; }
static inline void *vb_cq_context(struct ibv_cq *q) { return q->context; }
static inline int vb_cq_size(struct ibv_cq *q) { return q->cqe; }
static inline void *vb_srq_context(struct ibv_srq *q) { return q->context; }
static inline int vb_async_fd(void *context) { return ((struct ibv_context *)context)->async_fd; }
static inline int vb_channel_fd(void *channel) { return ((struct ibv_comp_channel *)channel)->fd; }
/* The C object inside a pyverbs one: PyObject head, weak references, logger, table, pointer. Its caller checks what it finds. */
static inline void *vb_inside(void *pyobject) { return ((void **)pyobject)[5]; }
#endif
