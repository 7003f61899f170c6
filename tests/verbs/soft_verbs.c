/* An RDMA provider in software, for tests of the verbs fabric on hosts without any device: an ibv_context whose table posts, carries
 * out and completes work requests in this process, as strictly as hardware would:
 *   - a send queue's places are free again when a completion after them was polled (so unsignalled work must be covered by signals),
 *   - a completion queue that is too small overruns, which is counted,
 *   - keys and ranges are checked at both ends; an error stops the queue pair and flushes what is behind it, signalled or not,
 *   - what needs a receive waits for one (rnr_retry 7),
 *   - destroying a queue pair takes its completions out of the queues, and the receives they had used are lost, as mlx5 does.
 * Faults are injected, and work is held back and let go one by one. Objects look like pyverbs' to who reads their pointers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define QPS 4096
#define MRS 4096
#define POSTS 65536

typedef struct { PyObject_HEAD PyObject *weak, *logger; void *vtab, *ptr; } object_t;
typedef struct { uint64_t id; uint64_t addr; uint32_t len, lkey, sges; } recv_t;
typedef struct { recv_t *ring; uint32_t cap, takes; uint64_t head, tail; int refuse_after, refuse_with; uint32_t mark; int events; } queue_t;
typedef struct { struct ibv_srq v; queue_t q; } srq_t;
typedef struct { struct ibv_wc wc; uint32_t qpn; uint64_t frees; int send; } entry_t;
typedef struct { struct ibv_cq v; entry_t *ring; uint32_t cap; uint64_t head, tail, overruns, polls; int armed; } cq_t;
typedef struct {
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    uint8_t inl[512];
} work_t;
typedef struct {
    struct ibv_qp v;
    work_t *ring;
    uint32_t cap, inl, peer;
    uint64_t freed, head, tail;         /* places free again, next to be carried out, next to be posted */
    queue_t recv;                       /* of a UD queue pair */
    int held, fail_after, fail_with, refuse_after, refuse_with;
    uint64_t doorbells, waits;
} qp_t;
typedef struct { uint64_t addr, len; uint32_t access, used; } mr_t;
typedef struct { uint32_t qpn, doorbell, len, lkey, rkey, imm, sges; int opcode, flags; uint64_t id, src, dst; } post_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static qp_t *qps[QPS];
static mr_t mrs[MRS];
static post_t *posts;
static uint32_t nposts, ndoorbells, lose_datagrams;
static int recording;

/* ---------------------------------------------------------------- completions */

static void complete(struct ibv_cq *v, uint32_t qpn, uint64_t id, int status, int opcode, uint32_t len, __be32 imm, int flags,
                     uint64_t frees, int send) {
    cq_t *q = (cq_t *)v;
    if (q->tail - q->head >= q->cap) { q->overruns++; return; }
    entry_t *e = &q->ring[q->tail++ % q->cap];
    memset(e, 0, sizeof *e);
    e->wc.wr_id = id; e->wc.status = status; e->wc.opcode = opcode; e->wc.byte_len = len; e->wc.imm_data = imm;
    e->wc.wc_flags = flags; e->wc.qp_num = qpn; e->wc.vendor_err = status ? 0x80 + status : 0;
    e->qpn = qpn; e->frees = frees; e->send = send;
    if (q->armed && q->v.channel) {
        uint64_t said = (uintptr_t)v;
        if (write(q->v.channel->refcnt, &said, 8) == 8) q->armed = 0;   /* refcnt: the end that is written to */
    }
}
static int poll_cq(struct ibv_cq *v, int most, struct ibv_wc *out) {
    cq_t *q = (cq_t *)v;
    int n = 0;
    pthread_mutex_lock(&lock);
    q->polls++;
    for (; n < most && q->head < q->tail; n++) {
        entry_t *e = &q->ring[q->head++ % q->cap];
        out[n] = e->wc;
        if (e->send && qps[e->qpn]) qps[e->qpn]->freed = e->frees;
    }
    pthread_mutex_unlock(&lock);
    return n;
}
static int notify_cq(struct ibv_cq *v, int solicited) {
    (void)solicited;
    pthread_mutex_lock(&lock);
    ((cq_t *)v)->armed = 1;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---------------------------------------------------------------- carrying out */

static int reaches(uint32_t key, uint64_t addr, uint64_t len, uint32_t access) {
    mr_t *m = &mrs[key & (MRS - 1)];
    return m->used == key && (m->access & access) == access && addr >= m->addr && len <= m->len && addr - m->addr <= m->len - len;
}
static queue_t *receives(qp_t *p) { return p->v.srq ? &((srq_t *)p->v.srq)->q : &p->recv; }

/* A receive; its bytes are written by the caller. NULL: there is none. Fewer than the mark left is told once. */
static recv_t *take(queue_t *q) {
    const uint8_t low = IBV_EVENT_SRQ_LIMIT_REACHED;
    if (q->head == q->tail) return NULL;
    recv_t *r = &q->ring[q->head++ % q->cap];
    if (q->tail - q->head < q->mark && write(q->events, &low, 1) == 1) q->mark = 0;
    return r;
}

/* What becomes of a work request: a status, or -1: it waits for a receive. */
static int carry_out(qp_t *q, work_t *w) {
    int inl = w->wr.send_flags & IBV_SEND_INLINE, op = w->wr.opcode;
    uint64_t n = w->wr.num_sge ? w->sge.length : 0;
    const void *from = inl ? (void *)w->inl : (void *)(uintptr_t)w->sge.addr;
    uint32_t to = q->v.qp_type == IBV_QPT_UD ? w->wr.wr.ud.remote_qpn : q->peer;
    qp_t *p = to < QPS ? qps[to] : NULL;
    recv_t *r;
    if (n && !inl && !reaches(w->sge.lkey, w->sge.addr, n, 0)) return IBV_WC_LOC_PROT_ERR;
    if (q->v.qp_type == IBV_QPT_UD) {
        if (lose_datagrams) { lose_datagrams--; return IBV_WC_SUCCESS; }
        if (p && p->v.qp_type == IBV_QPT_UD && (r = take(&p->recv)) && r->len >= n + 40) {
            memset((void *)(uintptr_t)r->addr, 0, 40);
            memcpy((void *)(uintptr_t)(r->addr + 40), from, n);
            complete(p->v.recv_cq, p->v.qp_num, r->id, 0, IBV_WC_RECV, n + 40, 0, IBV_WC_GRH, 0, 0);
        }
        return IBV_WC_SUCCESS;
    }
    if (!p || p->v.state != IBV_QPS_RTS || p->peer != q->v.qp_num) return IBV_WC_RETRY_EXC_ERR;
    if (op != IBV_WR_SEND && n && !reaches(w->wr.wr.rdma.rkey, w->wr.wr.rdma.remote_addr, n, IBV_ACCESS_REMOTE_WRITE)) {
        p->v.state = IBV_QPS_ERR;
        return IBV_WC_REM_ACCESS_ERR;
    }
    if (op == IBV_WR_RDMA_WRITE) { memcpy((void *)(uintptr_t)w->wr.wr.rdma.remote_addr, from, n); return IBV_WC_SUCCESS; }
    if (!(r = take(receives(p)))) { q->waits++; return -1; }
    if (op == IBV_WR_RDMA_WRITE_WITH_IMM) {
        memcpy((void *)(uintptr_t)w->wr.wr.rdma.remote_addr, from, n);
        complete(p->v.recv_cq, p->v.qp_num, r->id, 0, IBV_WC_RECV_RDMA_WITH_IMM, n, w->wr.imm_data, IBV_WC_WITH_IMM, 0, 0);
        return IBV_WC_SUCCESS;
    }
    if (!r->sges || r->len < n) {
        complete(p->v.recv_cq, p->v.qp_num, r->id, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, 0, 0, 0, 0, 0);
        p->v.state = IBV_QPS_ERR;
        return IBV_WC_REM_INV_REQ_ERR;
    }
    memcpy((void *)(uintptr_t)r->addr, from, n);
    complete(p->v.recv_cq, p->v.qp_num, r->id, 0, IBV_WC_RECV, n, 0, 0, 0, 0);
    return IBV_WC_SUCCESS;
}

/* The next work request of a queue pair; 0: there is none that can go on. */
static int step(qp_t *q) {
    work_t *w = &q->ring[q->head % q->cap];
    int status, opcode;
    if (q->head == q->tail) return 0;
    if (q->v.state == IBV_QPS_ERR) status = IBV_WC_WR_FLUSH_ERR;
    else if (q->fail_with && q->fail_after == 0) { status = q->fail_with; q->fail_with = 0; }
    else status = carry_out(q, w);
    if (status < 0) return 0;
    if (q->fail_with) q->fail_after--;
    opcode = w->wr.opcode == IBV_WR_SEND ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
    q->head++;
    if (status || w->wr.send_flags & IBV_SEND_SIGNALED)
        complete(q->v.send_cq, q->v.qp_num, w->wr.wr_id, status, opcode, 0, 0, 0, q->head, 1);
    if (status) q->v.state = IBV_QPS_ERR;
    return 1;
}
static void go(void) {
    for (int more = 1; more;) {
        more = 0;
        for (int i = 0; i < QPS; i++)
            while (qps[i] && (!qps[i]->held || qps[i]->v.state == IBV_QPS_ERR) && step(qps[i])) more = 1;
    }
}

/* ---------------------------------------------------------------- posting */

static int accept_work(qp_t *q, struct ibv_send_wr *w) {
    if (q->v.state != IBV_QPS_RTS && q->v.state != IBV_QPS_ERR) return EINVAL;
    if (q->tail - q->freed >= q->cap) return ENOMEM;
    if (w->num_sge > 1 || (w->send_flags & IBV_SEND_INLINE && w->num_sge && w->sg_list->length > q->inl)) return EINVAL;
    work_t *x = &q->ring[q->tail++ % q->cap];
    x->wr = *w;
    memset(&x->sge, 0, sizeof x->sge);
    if (w->num_sge) x->sge = *w->sg_list;
    if (w->send_flags & IBV_SEND_INLINE) memcpy(x->inl, (void *)(uintptr_t)x->sge.addr, x->sge.length);
    if (recording && nposts < POSTS)
        posts[nposts++] = (post_t){ q->v.qp_num, ndoorbells, x->sge.length, x->sge.lkey, w->wr.rdma.rkey, ntohl(w->imm_data),
                                    w->num_sge, w->opcode, w->send_flags, w->wr_id, x->sge.addr, w->wr.rdma.remote_addr };
    return 0;
}
static int post_send(struct ibv_qp *v, struct ibv_send_wr *w, struct ibv_send_wr **bad) {
    qp_t *q = (qp_t *)v;
    int rc = 0;
    pthread_mutex_lock(&lock);
    q->doorbells++;
    ndoorbells++;
    for (; w && !rc; w = rc ? w : w->next) {
        if (q->refuse_with && q->refuse_after-- == 0) { rc = q->refuse_with; q->refuse_with = 0; }
        else rc = accept_work(q, w);
        if (rc) *bad = w;
    }
    go();
    pthread_mutex_unlock(&lock);
    return rc;
}
static int add_receives(queue_t *q, struct ibv_recv_wr *w, struct ibv_recv_wr **bad) {
    for (; w; w = w->next) {
        int rc = q->refuse_with && q->refuse_after-- == 0 ? q->refuse_with : q->tail - q->head >= q->cap ? ENOMEM : 0;
        if (rc) { if (q->refuse_after < 0) q->refuse_with = 0; *bad = w; return rc; }
        recv_t *r = &q->ring[q->tail++ % q->cap];
        *r = (recv_t){ .id = w->wr_id, .sges = w->num_sge };
        if (w->num_sge) { r->addr = w->sg_list->addr; r->len = w->sg_list->length; r->lkey = w->sg_list->lkey; }
    }
    return 0;
}
static int post_srq_recv(struct ibv_srq *v, struct ibv_recv_wr *w, struct ibv_recv_wr **bad) {
    pthread_mutex_lock(&lock);
    int rc = add_receives(&((srq_t *)v)->q, w, bad);
    go();
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---------------------------------------------------------------- the reference loop: see test_soft_cost.py */

typedef struct { uint64_t ctrl, id, raddr, keys, addr, len; } wqe_t;
static wqe_t wqes[1024];
static struct { uint64_t id; struct ibv_qp *qp; } ended[1024];
static uint32_t wqe_at, bell, ended_at, ended_seen, quick_rings;

/* The least that a provider does: turns each work request into a queue entry in the device's byte order, then rings once. */
static int __attribute__((noinline)) quick_post_send(struct ibv_qp *v, struct ibv_send_wr *w, struct ibv_send_wr **bad) {
    (void)bad;
    for (; w; w = w->next) {
        wqe_t *e = &wqes[wqe_at++ & 1023];
        e->ctrl = __builtin_bswap32((uint32_t)w->opcode << 8 | (uint32_t)w->send_flags) | (uint64_t)v->qp_num << 32;
        e->id = w->wr_id;
        e->raddr = __builtin_bswap64(w->wr.rdma.remote_addr);
        e->keys = (uint64_t)__builtin_bswap32(w->wr.rdma.rkey) << 32 | w->imm_data;
        for (int i = 0; i < w->num_sge; i++) {
            e->addr = __builtin_bswap64(w->sg_list[i].addr);
            e->len = (uint64_t)__builtin_bswap32(w->sg_list[i].length) << 32 | __builtin_bswap32(w->sg_list[i].lkey);
        }
        if (w->send_flags & IBV_SEND_SIGNALED) {
            ended[ended_at & 1023].id = w->wr_id;
            ended[ended_at++ & 1023].qp = v;
        }
    }
    quick_rings++;
    __atomic_store_n(&bell, wqe_at, __ATOMIC_RELEASE);
    return 0;
}
static int __attribute__((noinline)) quick_poll(struct ibv_cq *v, int most, struct ibv_wc *wc) {
    int n = 0;
    for (; n < most && ended_seen != ended_at && ended[ended_seen & 1023].qp->send_cq == v; n++, ended_seen++) {
        memset(&wc[n], 0, sizeof wc[n]);
        wc[n].wr_id = ended[ended_seen & 1023].id;
        wc[n].qp_num = ended[ended_seen & 1023].qp->qp_num;
        wc[n].opcode = IBV_WC_RDMA_WRITE;
    }
    return n;
}

/* A bandwidth tool's loop: lists of `chain` requests of which the last is signalled, addresses stepping on from one to the next,
 * `depth` outstanding at most, completions taken 16 at a time. */
void __attribute__((noinline)) reference_loop(struct ibv_qp *qp, uint64_t src, uint64_t dst, uint32_t len, uint64_t pages, int chain,
                                              uint64_t depth) {
    struct ibv_sge sge[16];
    struct ibv_send_wr wr[16], *bad;
    struct ibv_wc wc[16];
    uint64_t posted = 0, over = 0;
    memset(wr, 0, sizeof wr);
    for (int k = 0; k < chain; k++) {
        sge[k] = (struct ibv_sge){ src + (uint64_t)k * len, len, 1 };
        wr[k] = (struct ibv_send_wr){ .sg_list = &sge[k], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM };
        wr[k].next = k + 1 < chain ? &wr[k + 1] : NULL;
        wr[k].send_flags = k + 1 == chain ? IBV_SEND_SIGNALED : 0;
        wr[k].wr.rdma.remote_addr = dst + (uint64_t)k * len;
        wr[k].wr.rdma.rkey = 2;
    }
    while (over < pages) {
        while (posted < pages && posted - over + chain <= depth) {
            if (ibv_post_send(qp, wr, &bad)) return;
            posted += chain;
            for (int k = 0; k < chain; k++) {
                sge[k].addr += (uint64_t)chain * len;
                wr[k].wr.rdma.remote_addr += (uint64_t)chain * len;
            }
        }
        for (int n; (n = ibv_poll_cq(qp->send_cq, 16, wc)) > 0;)
            for (int i = 0; i < n; i++) {
                if (wc[i].status != IBV_WC_SUCCESS) return;
                over += chain;
            }
    }
}

/* ---------------------------------------------------------------- Python */

static PyTypeObject Object = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pyverbs.soft.Object", .tp_basicsize = sizeof(object_t),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, .tp_new = PyType_GenericNew,
};
static void *inside(PyObject *o) {
    if (!PyObject_TypeCheck(o, &Object) || !((object_t *)o)->ptr) { PyErr_SetString(PyExc_ValueError, "closed, or no such object"); return NULL; }
    return ((object_t *)o)->ptr;
}
#define GET(type, name, o) type *name = inside(o); if (!name) return NULL
#define SET(o, p) (((object_t *)(o))->ptr = (p))

static PyObject *open_context(PyObject *m, PyObject *a) {
    PyObject *o; int fds[2];
    if (!PyArg_ParseTuple(a, "O!", &Object, &o)) return NULL;
    struct ibv_context *c = calloc(1, sizeof *c);
    if (!c || pipe2(fds, O_CLOEXEC | O_NONBLOCK)) { free(c); return PyErr_NoMemory(); }
    c->async_fd = fds[0]; c->cmd_fd = fds[1];
    c->ops.post_send = post_send;
    c->ops.poll_cq = poll_cq;
    c->ops.req_notify_cq = notify_cq; c->ops.post_srq_recv = post_srq_recv;
    if (!posts && !(posts = calloc(POSTS, sizeof *posts))) return PyErr_NoMemory();
    SET(o, c);
    return Py_BuildValue("ii", fds[0], fds[1]);                 /* asynchronous events: where they are read, and written */
}
static PyObject *open_channel(PyObject *m, PyObject *a) {
    PyObject *o, *c; int fds[2];
    if (!PyArg_ParseTuple(a, "O!O!", &Object, &o, &Object, &c)) return NULL;
    GET(struct ibv_context, ctx, c);
    struct ibv_comp_channel *ch = calloc(1, sizeof *ch);
    if (!ch || pipe2(fds, O_CLOEXEC | O_NONBLOCK)) { free(ch); return PyErr_NoMemory(); }
    ch->context = ctx; ch->fd = fds[0]; ch->refcnt = fds[1];
    SET(o, ch);
    return PyLong_FromLong(ch->fd);
}
static PyObject *open_cq(PyObject *m, PyObject *a) {
    PyObject *o, *c, *ch; unsigned n;
    if (!PyArg_ParseTuple(a, "O!O!IO", &Object, &o, &Object, &c, &n, &ch)) return NULL;
    GET(struct ibv_context, ctx, c);
    cq_t *q = calloc(1, sizeof *q);
    if (!q || !(q->ring = calloc(n, sizeof *q->ring))) { free(q); return PyErr_NoMemory(); }
    q->v.context = ctx; q->v.channel = ch == Py_None ? NULL : inside(ch); q->v.cqe = q->cap = n;
    pthread_mutex_init(&q->v.mutex, NULL); pthread_cond_init(&q->v.cond, NULL);
    SET(o, q);
    Py_RETURN_NONE;
}
static int make_queue(queue_t *q, uint32_t n) { q->cap = n; return !n || (q->ring = calloc(n, sizeof *q->ring)) != NULL; }
static PyObject *open_srq(PyObject *m, PyObject *a) {
    PyObject *o, *c; unsigned n;
    if (!PyArg_ParseTuple(a, "O!O!I", &Object, &o, &Object, &c, &n)) return NULL;
    GET(struct ibv_context, ctx, c);
    srq_t *s = calloc(1, sizeof *s);
    if (!s || !make_queue(&s->q, n)) { free(s); return PyErr_NoMemory(); }
    s->v.context = ctx; s->q.events = ctx->cmd_fd;
    SET(o, s);
    Py_RETURN_NONE;
}
static PyObject *open_qp(PyObject *m, PyObject *a) {
    PyObject *o, *c, *sc, *rc, *s; unsigned sends, recvs, inl; int type, i;
    static uint32_t next;
    if (!PyArg_ParseTuple(a, "O!O!O!O!OiIII", &Object, &o, &Object, &c, &Object, &sc, &Object, &rc, &s, &type, &sends, &recvs, &inl))
        return NULL;
    GET(struct ibv_context, ctx, c); GET(cq_t, scq, sc); GET(cq_t, rcq, rc);
    qp_t *q = calloc(1, sizeof *q);
    if (!q || !(q->ring = calloc(sends, sizeof *q->ring)) || !make_queue(&q->recv, recvs)) { free(q); return PyErr_NoMemory(); }
    q->v.context = ctx; q->v.pd = (void *)ctx; q->v.send_cq = &scq->v; q->v.recv_cq = &rcq->v; q->v.qp_type = type; q->v.state = IBV_QPS_RESET;
    q->v.srq = s == Py_None ? NULL : inside(s);
    q->cap = sends; q->inl = inl < 512 ? inl : 512;
    pthread_mutex_lock(&lock);
    for (i = 0; i < QPS && (next % QPS == 0 || qps[next % QPS]); i++) next++;
    if (i < QPS) { q->v.qp_num = next % QPS; qps[q->v.qp_num] = q; next++; }   /* numbers are not used again soon */
    pthread_mutex_unlock(&lock);
    if (i == QPS) { free(q->ring); free(q); return PyErr_NoMemory(); }
    SET(o, q);
    return PyLong_FromLong(q->v.qp_num);
}
static void forget(struct ibv_cq *v, uint32_t qpn) {
    cq_t *q = (cq_t *)v;
    uint64_t to = q->head;
    for (uint64_t i = q->head; i < q->tail; i++)
        if (q->ring[i % q->cap].qpn != qpn) q->ring[to++ % q->cap] = q->ring[i % q->cap];
    q->tail = to;
}
static PyObject *close_qp(PyObject *m, PyObject *o) {
    GET(qp_t, q, o);
    pthread_mutex_lock(&lock);
    forget(q->v.send_cq, q->v.qp_num);
    forget(q->v.recv_cq, q->v.qp_num);
    qps[q->v.qp_num] = NULL;
    go();
    pthread_mutex_unlock(&lock);
    free(q->ring); free(q->recv.ring); free(q);
    SET(o, NULL);
    Py_RETURN_NONE;
}
static PyObject *close_cq(PyObject *m, PyObject *o) { GET(cq_t, q, o); free(q->ring); free(q); SET(o, NULL); Py_RETURN_NONE; }
static PyObject *close_srq(PyObject *m, PyObject *o) { GET(srq_t, s, o); free(s->q.ring); free(s); SET(o, NULL); Py_RETURN_NONE; }
static PyObject *close_channel(PyObject *m, PyObject *o) {
    GET(struct ibv_comp_channel, c, o);
    close(c->fd); close(c->refcnt); free(c); SET(o, NULL);
    Py_RETURN_NONE;
}
static PyObject *close_context(PyObject *m, PyObject *o) {
    GET(struct ibv_context, c, o);
    close(c->async_fd); close(c->cmd_fd); free(c); SET(o, NULL);
    Py_RETURN_NONE;
}
static PyObject *set_qp(PyObject *m, PyObject *a) {             /* state, and the peer's number; -1: as it is */
    PyObject *o; int state; long peer = -1;
    if (!PyArg_ParseTuple(a, "O!i|l", &Object, &o, &state, &peer)) return NULL;
    GET(qp_t, q, o);
    pthread_mutex_lock(&lock);
    q->v.state = state;
    if (peer >= 0) q->peer = (uint32_t)peer;
    go();
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}
static PyObject *qp_state(PyObject *m, PyObject *o) { GET(qp_t, q, o); return PyLong_FromLong(q->v.state); }
static PyObject *ud_send(PyObject *m, PyObject *a) {
    PyObject *o; unsigned long long id, addr; unsigned len, lkey, qpn;
    if (!PyArg_ParseTuple(a, "O!KKIII", &Object, &o, &id, &addr, &len, &lkey, &qpn)) return NULL;
    GET(qp_t, q, o);
    struct ibv_sge s = { addr, len, lkey };
    struct ibv_send_wr w = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
    w.wr.ud.remote_qpn = qpn;
    int rc = ibv_post_send(&q->v, &w, &bad);
    return rc ? PyErr_SetFromErrno((errno = rc, PyExc_OSError)) : Py_NewRef(Py_None);
}
static PyObject *ud_recv(PyObject *m, PyObject *a) {
    PyObject *o; unsigned long long id, addr; unsigned len, lkey;
    if (!PyArg_ParseTuple(a, "O!KKII", &Object, &o, &id, &addr, &len, &lkey)) return NULL;
    GET(qp_t, q, o);
    struct ibv_sge s = { addr, len, lkey };
    struct ibv_recv_wr w = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;
    pthread_mutex_lock(&lock);
    int rc = add_receives(&q->recv, &w, &bad);
    pthread_mutex_unlock(&lock);
    return rc ? PyErr_SetFromErrno((errno = rc, PyExc_OSError)) : Py_NewRef(Py_None);
}
static PyObject *poll(PyObject *m, PyObject *a) {               /* [(id, status, opcode, bytes, queue pair)] */
    PyObject *o, *list; int most; struct ibv_wc wc[64];
    if (!PyArg_ParseTuple(a, "O!i", &Object, &o, &most)) return NULL;
    GET(cq_t, q, o);
    int n = poll_cq(&q->v, most < 64 ? most : 64, wc);
    if (!(list = PyList_New(0))) return NULL;
    for (int i = 0; i < n; i++) {
        PyObject *t = Py_BuildValue("KiiII", (unsigned long long)wc[i].wr_id, wc[i].status, wc[i].opcode, wc[i].byte_len, wc[i].qp_num);
        if (!t || PyList_Append(list, t)) { Py_XDECREF(t); Py_DECREF(list); return NULL; }
        Py_DECREF(t);
    }
    return list;
}
static PyObject *notify(PyObject *m, PyObject *o) { GET(cq_t, q, o); notify_cq(&q->v, 0); Py_RETURN_NONE; }
static uint32_t new_key(uint64_t addr, uint64_t len, uint32_t access) {
    static uint32_t next = 1;
    uint32_t key = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MRS && !key; i++, next++)
        if (next & (MRS - 1) && !mrs[next & (MRS - 1)].used) { key = next; mrs[key & (MRS - 1)] = (mr_t){ addr, len, access, key }; }
    pthread_mutex_unlock(&lock);
    return key;
}
static PyObject *add_mr(PyObject *m, PyObject *a) {
    unsigned long long addr, len; unsigned access;
    if (!PyArg_ParseTuple(a, "KKI", &addr, &len, &access)) return NULL;
    uint32_t key = new_key(addr, len, access);
    return key ? PyLong_FromUnsignedLong(key) : PyErr_NoMemory();
}
static PyObject *drop_mr(PyObject *m, PyObject *a) {
    unsigned key;
    if (!PyArg_ParseTuple(a, "I", &key)) return NULL;
    pthread_mutex_lock(&lock);
    mrs[key & (MRS - 1)].used = 0;
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

/* -- what the fabric calls by name, in libibverbs and in the CUDA driver */

static struct { uint64_t offset, len, iova; int fd, access, refuse, open; } dmabuf;
static struct { uint64_t start, len; int fd, refuse; } exported = { .fd = -1 };

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len, uint64_t iova, int fd, int access) {
    struct ibv_mr *mr;
    if (dmabuf.refuse) { errno = dmabuf.refuse; return NULL; }
    if (fcntl(fd, F_GETFD) < 0 || !(mr = calloc(1, sizeof *mr))) return NULL;
    dmabuf.offset = offset; dmabuf.len = len; dmabuf.iova = iova; dmabuf.fd = fd; dmabuf.access = access; dmabuf.open++;
    mr->pd = pd; mr->length = len;
    mr->lkey = mr->rkey = new_key(iova, len, (uint32_t)access);
    return mr;
}
#undef ibv_dereg_mr
int ibv_dereg_mr(struct ibv_mr *mr) {
    mrs[mr->lkey & (MRS - 1)].used = 0;
    free(mr);
    dmabuf.open--;
    return 0;
}
int cuMemGetHandleForAddressRange(void *handle, uint64_t start, size_t len, int kind, unsigned long long flags) {
    if (exported.refuse || kind != 1 || flags || start % 4096 || len % 4096) return exported.refuse ? exported.refuse : 1;
    exported.start = start; exported.len = len; exported.fd = dup(2);
    *(int *)handle = exported.fd;
    return 0;
}
static PyObject *refuse_device(PyObject *m, PyObject *a) {      /* errno of ibv_reg_dmabuf_mr, code of the driver */
    return PyArg_ParseTuple(a, "ii", &dmabuf.refuse, &exported.refuse) ? Py_NewRef(Py_None) : NULL;
}
static PyObject *device_figures(PyObject *m, PyObject *unused) {
    int left = exported.fd >= 0 && fcntl(exported.fd, F_GETFD) >= 0;
    return Py_BuildValue("{sKsKsKsisisisKsKsi}", "offset", (unsigned long long)dmabuf.offset, "len", (unsigned long long)dmabuf.len,
                         "iova", (unsigned long long)dmabuf.iova, "fd", dmabuf.fd, "access", dmabuf.access, "open", dmabuf.open,
                         "start", (unsigned long long)exported.start, "exported", (unsigned long long)exported.len, "left", left);
}

/* -- what tests do to it */

static PyObject *hold(PyObject *m, PyObject *a) {
    PyObject *o; int on;
    if (!PyArg_ParseTuple(a, "O!p", &Object, &o, &on)) return NULL;
    GET(qp_t, q, o);
    pthread_mutex_lock(&lock);
    q->held = on;
    go();
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}
static PyObject *let_go(PyObject *m, PyObject *a) {             /* carries out up to n that are held; how many it did */
    PyObject *o; int n, k = 0;
    if (!PyArg_ParseTuple(a, "O!i", &Object, &o, &n)) return NULL;
    GET(qp_t, q, o);
    pthread_mutex_lock(&lock);
    while (k < n && step(q)) k++;
    go();
    pthread_mutex_unlock(&lock);
    return PyLong_FromLong(k);
}
static PyObject *fail(PyObject *m, PyObject *a) {               /* the work request after `after` others ends with `status` */
    PyObject *o; int after, status;
    if (!PyArg_ParseTuple(a, "O!ii", &Object, &o, &after, &status)) return NULL;
    GET(qp_t, q, o);
    q->fail_after = after; q->fail_with = status;
    Py_RETURN_NONE;
}
static PyObject *refuse(PyObject *m, PyObject *a) {             /* posting refuses the one after `after` others with an errno */
    PyObject *o; int after, with;
    if (!PyArg_ParseTuple(a, "O!ii", &Object, &o, &after, &with)) return NULL;
    GET(qp_t, q, o);
    q->refuse_after = after; q->refuse_with = with;
    Py_RETURN_NONE;
}
static PyObject *refuse_srq(PyObject *m, PyObject *a) {
    PyObject *o; int after, with;
    if (!PyArg_ParseTuple(a, "O!ii", &Object, &o, &after, &with)) return NULL;
    GET(srq_t, s, o);
    s->q.refuse_after = after; s->q.refuse_with = with;
    Py_RETURN_NONE;
}
static PyObject *mark_srq(PyObject *m, PyObject *a) {
    PyObject *o; unsigned mark;
    if (!PyArg_ParseTuple(a, "O!I", &Object, &o, &mark)) return NULL;
    GET(srq_t, s, o);
    pthread_mutex_lock(&lock);
    s->q.mark = mark;
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}
static PyObject *drop_datagrams(PyObject *m, PyObject *a) {
    return PyArg_ParseTuple(a, "I", &lose_datagrams) ? Py_NewRef(Py_None) : NULL;
}
static PyObject *record(PyObject *m, PyObject *a) {
    if (!PyArg_ParseTuple(a, "p", &recording)) return NULL;
    nposts = 0;
    Py_RETURN_NONE;
}
static PyObject *recorded(PyObject *m, PyObject *unused) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < nposts; i++) {
        post_t *p = &posts[i];
        PyObject *d = Py_BuildValue("{sIsIsIsIsIsIsIsisisKsKsK}", "qpn", p->qpn, "doorbell", p->doorbell, "len", p->len, "lkey", p->lkey,
                                    "rkey", p->rkey, "imm", p->imm, "sges", p->sges, "opcode", p->opcode, "flags", p->flags,
                                    "id", (unsigned long long)p->id, "src", (unsigned long long)p->src, "dst", (unsigned long long)p->dst);
        if (!d || PyList_Append(list, d)) { Py_XDECREF(d); Py_CLEAR(list); break; }
        Py_DECREF(d);
    }
    return list;
}
static PyObject *cq_figures(PyObject *m, PyObject *o) {
    GET(cq_t, q, o);
    return Py_BuildValue("{sIsKsKsK}", "cap", q->cap, "entries", (unsigned long long)(q->tail - q->head), "overruns",
                         (unsigned long long)q->overruns, "polls", (unsigned long long)q->polls);
}
static PyObject *srq_figures(PyObject *m, PyObject *o) {
    GET(srq_t, s, o);
    return Py_BuildValue("{sIsK}", "cap", s->q.cap, "posted", (unsigned long long)(s->q.tail - s->q.head));
}
static PyObject *qp_figures(PyObject *m, PyObject *o) {
    GET(qp_t, q, o);
    return Py_BuildValue("{sKsKsKsKsi}", "doorbells", (unsigned long long)q->doorbells, "waits", (unsigned long long)q->waits, "waiting",
                         (unsigned long long)(q->tail - q->head), "taken", (unsigned long long)(q->tail - q->freed), "state", q->v.state);
}
static PyObject *run_reference(PyObject *m, PyObject *a) {
    PyObject *o; unsigned long long pages, depth; unsigned len; int chain;
    if (!PyArg_ParseTuple(a, "O!IKiK", &Object, &o, &len, &pages, &chain, &depth)) return NULL;
    GET(qp_t, q, o);
    reference_loop(&q->v, 1 << 20, 1 << 30, len, pages, chain, depth);
    Py_RETURN_NONE;
}
static PyObject *quick(PyObject *m, PyObject *a) {              /* whether the provider of a context only records */
    PyObject *o; int on;
    if (!PyArg_ParseTuple(a, "O!p", &Object, &o, &on)) return NULL;
    GET(struct ibv_context, c, o);
    c->ops.post_send = on ? quick_post_send : post_send;
    c->ops.poll_cq = on ? quick_poll : poll_cq;
    Py_RETURN_NONE;
}
static PyObject *quick_figures(PyObject *m, PyObject *u) { return Py_BuildValue("{sIsI}", "posts", wqe_at, "rings", quick_rings); }

#define V(f) { #f, f, METH_VARARGS, NULL }
#define O(f) { #f, f, METH_O, NULL }
#define N(f) { #f, f, METH_NOARGS, NULL }
static PyMethodDef methods[] = {
    V(open_context), V(open_channel), V(open_cq), V(open_srq), V(open_qp), O(close_context), O(close_channel), O(close_cq), O(close_srq),
    O(close_qp), V(set_qp), O(qp_state), V(ud_send), V(ud_recv), V(poll), O(notify), V(add_mr), V(drop_mr), V(hold), V(let_go), V(fail),
    V(refuse), V(refuse_srq), V(mark_srq), V(refuse_device), N(device_figures), V(drop_datagrams), V(record), N(recorded), O(cq_figures), O(srq_figures), O(qp_figures),
    V(run_reference), V(quick), N(quick_figures), { NULL, NULL, 0, NULL },
};
static struct PyModuleDef def = { PyModuleDef_HEAD_INIT, .m_name = "soft_verbs", .m_size = -1, .m_methods = methods };
PyMODINIT_FUNC PyInit_soft_verbs(void) {
    if (PyType_Ready(&Object) < 0) return NULL;
    PyObject *m = PyModule_Create(&def);
    if (m && PyModule_AddObjectRef(m, "Object", (PyObject *)&Object)) Py_CLEAR(m);
    return m;
}
