/* A stand-in libfabric: one RDM endpoint of a provider that calls itself "efa" and reaches device memory. It carries no data;
   it records what it is asked, for tests of the paths that need hardware. Built by tests/fabrics/test_ofi.py. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

static char said[65536];
static size_t at;
#define SAY(...) (at += snprintf(said + at, at < sizeof said ? sizeof said - at : 0, __VA_ARGS__))
const char *stub_said(void) { return said; }
static int hmem_allowed = 1;
void stub_hmem(int on) { hmem_allowed = on; }

/* What belongs to a domain must be closed before it: a real one answers EBUSY. */
static int close_any(struct fid *f) { SAY("close %zu\n", f->fclass); return 0; }
static int bind_any(struct fid *f, struct fid *b, uint64_t flags) { (void)f; (void)b; (void)flags; return 0; }
static int control(struct fid *f, int command, void *arg) { (void)f; (void)arg; return command == FI_ENABLE ? 0 : -ENOSYS; }
static struct fi_ops any = { .size = sizeof any, .close = close_any, .bind = bind_any, .control = control };

static struct fid_mr mr = { .fid = { .fclass = FI_CLASS_MR, .ops = &any }, .mem_desc = (void *)0x1234, .key = 77 };
static int mr_reg(struct fid *f, const void *buf, size_t len, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags, struct fid_mr **out, void *c) {
    (void)f; (void)access; (void)offset; (void)c;
    SAY("reg %p %zu key=%llu flags=%llx\n", buf, len, (unsigned long long)key, (unsigned long long)flags);
    *out = &mr;
    return 0;
}
struct dmabuf { int fd; uint64_t offset; size_t len; void *base; };
static int mr_regattr(struct fid *f, const struct fi_mr_attr *a, uint64_t flags, struct fid_mr **out) {
    (void)f;
    if (flags & (1ULL << 40)) {
        const struct dmabuf *d = (const struct dmabuf *)a->mr_iov;
        SAY("regattr dmabuf fd=%d offset=%llu len=%zu base=%p iface=%d device=%d\n", d->fd, (unsigned long long)d->offset, d->len, d->base, a->iface, a->device.cuda);
    } else {
        SAY("regattr %p %zu iface=%d device=%d\n", a->mr_iov->iov_base, a->mr_iov->iov_len, a->iface, a->device.cuda);
    }
    if (a->device.cuda == 7) return -EINVAL;
    *out = &mr;
    return 0;
}
static struct fi_ops_mr mr_ops = { .size = sizeof mr_ops, .reg = mr_reg, .regattr = mr_regattr };

static volatile int cq_answer = -FI_EAGAIN;
void stub_cq(int answer) { cq_answer = answer; }
static ssize_t cq_none(struct fid_cq *q, void *b, size_t n) { (void)q; (void)b; (void)n; return cq_answer; }
static ssize_t cq_nonefrom(struct fid_cq *q, void *b, size_t n, fi_addr_t *a) { (void)q; (void)b; (void)n; (void)a; return cq_answer; }
static struct fi_ops_cq cq_ops = { .size = sizeof cq_ops, .read = cq_none, .readfrom = cq_nonefrom };
static struct fid_cq cq = { .fid = { .fclass = FI_CLASS_CQ, .ops = &any }, .ops = &cq_ops };
static int cq_open(struct fid_domain *d, struct fi_cq_attr *a, struct fid_cq **out, void *c) {
    (void)d; (void)c;
    SAY("env shm=%s rdma=%s\n", getenv("FI_EFA_ENABLE_SHM_TRANSFER"), getenv("FI_EFA_USE_DEVICE_RDMA") ? "set" : "unset");
    SAY("cq size=%zu wait=%d\n", a->size, a->wait_obj);
    if (a->wait_obj != FI_WAIT_NONE) return -ENOSYS;       /* as efa answers */
    *out = &cq;
    return 0;
}
static int av_insert(struct fid_av *v, const void *addr, size_t n, fi_addr_t *out, uint64_t flags, void *c) { (void)v; (void)addr; (void)flags; (void)c; *out = 3; return (int)n; }
static struct fi_ops_av av_ops = { .size = sizeof av_ops, .insert = av_insert };
static struct fid_av av = { .fid = { .fclass = FI_CLASS_AV, .ops = &any }, .ops = &av_ops };
static int av_open(struct fid_domain *d, struct fi_av_attr *a, struct fid_av **out, void *c) { (void)d; (void)a; (void)c; *out = &av; return 0; }

static int setopt(struct fid *f, int level, int name, const void *v, size_t n) {
    (void)f; (void)level;
    SAY("setopt %d size=%zu value=%d\n", name, n, *(const unsigned char *)v);
    return 0;
}
static int getname(struct fid *f, void *addr, size_t *n) { (void)f; memcpy(addr, "stubaddr", 8); *n = 8; return 0; }
static ssize_t post_recv(struct fid_ep *e, void *b, size_t n, void *d, fi_addr_t a, void *c) { (void)e; (void)b; (void)n; (void)d; (void)a; (void)c; return 0; }
static ssize_t post_send(struct fid_ep *e, const void *b, size_t n, void *d, fi_addr_t a, void *c) { (void)e; (void)b; (void)d; (void)a; (void)c; SAY("send %zu\n", n); return 0; }
static struct fi_ops_ep ep_ops = { .size = sizeof ep_ops, .setopt = setopt };
static struct fi_ops_cm cm_ops = { .size = sizeof cm_ops, .getname = getname };
static struct fi_ops_msg msg_ops = { .size = sizeof msg_ops, .recv = post_recv, .send = post_send };
static struct fi_ops_rma rma_ops = { .size = sizeof rma_ops };
static struct fid_ep ep = { .fid = { .fclass = FI_CLASS_EP, .ops = &any }, .ops = &ep_ops, .cm = &cm_ops, .msg = &msg_ops, .rma = &rma_ops };
static int endpoint(struct fid_domain *d, struct fi_info *i, struct fid_ep **out, void *c) { (void)d; (void)i; (void)c; *out = &ep; return 0; }
static struct fi_ops_domain dom_ops = { .size = sizeof dom_ops, .av_open = av_open, .cq_open = cq_open, .endpoint = endpoint };
static struct fid_domain dom = { .fid = { .fclass = FI_CLASS_DOMAIN, .ops = &any }, .ops = &dom_ops, .mr = &mr_ops };
static int domain(struct fid_fabric *f, struct fi_info *i, struct fid_domain **out, void *c) {
    (void)f; (void)c;
    SAY("domain source=%d hmem=%d mr_mode=%x order=%llx api=%x\n", (i->caps & FI_SOURCE) != 0, (i->caps & FI_HMEM) != 0, i->domain_attr->mr_mode, (unsigned long long)i->tx_attr->msg_order, i->fabric_attr->api_version);
    *out = &dom;
    return 0;
}
static struct fi_ops_fabric fab_ops = { .size = sizeof fab_ops, .domain = domain };
static struct fid_fabric fab = { .fid = { .fclass = FI_CLASS_FABRIC, .ops = &any }, .ops = &fab_ops };

uint32_t fi_version(void) { return FI_VERSION(2, 1); }
const char *fi_strerror(int e) { return strerror(e); }
char *fi_tostr(const void *d, enum fi_type t) { (void)d; (void)t; return "stub"; }
/* longer than the headers know, as a newer library's are: a caller that allocated by sizeof would be found out */
static struct fi_info *make(void) {
    struct fi_info *i = calloc(1, sizeof *i + 256);
    i->tx_attr = calloc(1, sizeof *i->tx_attr + 64);
    i->rx_attr = calloc(1, sizeof *i->rx_attr + 64);
    i->ep_attr = calloc(1, sizeof *i->ep_attr + 64);
    i->domain_attr = calloc(1, sizeof *i->domain_attr + 64);
    i->fabric_attr = calloc(1, sizeof *i->fabric_attr + 64);
    return i;
}
struct fi_info *fi_dupinfo(const struct fi_info *s) {
    struct fi_info *i = make();
    if (!s) return i;
    i->caps = s->caps;
    i->mode = s->mode;
    *i->tx_attr = *s->tx_attr;
    *i->rx_attr = *s->rx_attr;
    *i->ep_attr = *s->ep_attr;
    *i->domain_attr = *s->domain_attr;
    *i->fabric_attr = *s->fabric_attr;
    if (s->domain_attr->name) i->domain_attr->name = strdup(s->domain_attr->name);
    if (s->fabric_attr->name) i->fabric_attr->name = strdup(s->fabric_attr->name);
    if (s->fabric_attr->prov_name) i->fabric_attr->prov_name = strdup(s->fabric_attr->prov_name);
    return i;
}
void fi_freeinfo(struct fi_info *i) { (void)i; }
int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *h, struct fi_info **out) {
    struct fi_info *i;
    const char *want = h->fabric_attr->prov_name;
    (void)node; (void)service; (void)flags;
    if (want && strncmp(want, "efa", 3)) return -FI_ENODATA;
    if ((h->caps & FI_HMEM) && !hmem_allowed) return -FI_ENODATA;
    i = make();
    i->caps = h->caps;
    i->mode = want && !strcmp(want, "efa-direct") ? FI_CONTEXT2 : 0;
    i->ep_attr->type = FI_EP_RDM;
    i->ep_attr->max_msg_size = 1ull << 30;
    i->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | (h->caps & FI_HMEM ? FI_MR_HMEM : 0);
    i->domain_attr->mr_key_size = 4;
    i->domain_attr->cq_data_size = 4;
    i->domain_attr->name = strdup("rdmap0s0-rdm");
    i->tx_attr->size = 256;
    i->tx_attr->msg_order = h->tx_attr->msg_order;
    i->fabric_attr->prov_name = strdup(want ? want : "efa");
    i->fabric_attr->name = strdup("efa");
    i->fabric_attr->api_version = version;
    *out = i;
    return 0;
}
int fi_fabric(struct fi_fabric_attr *a, struct fid_fabric **out, void *c) { (void)a; (void)c; *out = &fab; return 0; }
