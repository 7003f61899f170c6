/* libfabric as this fabric uses it: objects of one NIC, and thin calls. Included by ofi.pyx alone.

   Compiled against 1.17 headers; runs on 1.17 and every later 1.x/2.x: structures that grew are never allocated by sizeof
   here but made by the library (fi_dupinfo), or padded (the error entry). */
#ifndef FABRICX_OFI_API_H
#define FABRICX_OFI_API_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

/* Every call below answers ESHUTDOWN once the endpoint is closed: another thread may be on its way in when an engine closes. */
enum { OFI_REMOTE_DATA = 1, OFI_RECV = 2, OFI_SEND = 4, OFI_WRITE = 8 };

typedef struct {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    uint32_t (*version)(void);
    const char *(*strerror_)(int);
    char *(*tostr)(const void *, enum fi_type);
} ofi_api;

typedef struct {
    ofi_api *api;
    struct fi_info *info;
    struct fid_fabric *fab;
    struct fid_domain *dom;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_mr *internal[2];
    int has_fd, fd;
    int data8, contexts2, virt_addr, prov_key, need_desc, mr_endpoint, landed, delivery, hmem;
    uint64_t max_msg, inject, key_size;
    uint32_t tx_depth;
    char provider[64], domain[128], fabric[128];
    uint8_t addr[512];
    uint64_t addrlen;
    char what[128];
} ofi_nic;

typedef struct { void *ctx; uint64_t flags, data, len, src; int err, prov; } ofi_comp;

static ofi_api *ofi_api_new(void **sym) {
    ofi_api *a = (ofi_api *)calloc(1, sizeof *a);
    if (a) memcpy(a, sym, 7 * sizeof(void *));
    return a;
}
static ofi_nic *ofi_nic_new(void) { return (ofi_nic *)calloc(1, sizeof(ofi_nic)); }
static uint32_t ofi_version(ofi_api *a) { return a->version(); }
static const char *ofi_strerror(ofi_api *a, int e) { return a->strerror_(e < 0 ? -e : e); }

/* The version to ask for: what the library has, but not more than 1.18, whose structures 1.17's headers describe. Below
   1.18 EFA would turn device RDMA off. */
static uint32_t ofi_ask(ofi_api *a) {
    uint32_t v = a->version(), top = FI_VERSION(1, 18);
    return v < top ? v : top;
}

static struct fi_info *ofi_hints(ofi_api *a, const char *provider, const char *domain, int hmem) {
    struct fi_info *h = a->dupinfo(NULL);              /* never calloc(sizeof): it grew */
    if (!h) return NULL;
    h->caps = FI_MSG | FI_RMA;
    h->mode = FI_CONTEXT | FI_CONTEXT2;                 /* efa-direct insists on FI_CONTEXT2; our contexts have the room */
    h->ep_attr->type = FI_EP_RDM;
    h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    h->domain_attr->threading = FI_THREAD_DOMAIN;       /* the progress lock serialises us */
    h->domain_attr->resource_mgmt = FI_RM_ENABLED;
    h->tx_attr->msg_order = h->rx_attr->msg_order = 0;  /* no order is asked for, and none relied on */
    h->tx_attr->comp_order = h->rx_attr->comp_order = 0;
    /* efa's CQ data has 32 bits, all taken by the immediate: who wrote is read from the completion, which efa only says to
       those that ask for it */
    if (provider && !strncmp(provider, "efa", 3)) h->caps |= FI_SOURCE;
    if (hmem) {                                         /* device memory, registered by fi_mr_regattr */
        h->caps |= FI_HMEM;
        h->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    if (provider && *provider) h->fabric_attr->prov_name = strdup(provider);
    if (domain && *domain) h->domain_attr->name = strdup(domain);
    return h;
}

/* One line a NIC: provider TAB domain. */
static int ofi_list(ofi_api *a, const char *provider, const char *node, char *out, uint64_t n) {
    struct fi_info *h = ofi_hints(a, provider, NULL, 0), *list = NULL, *i;
    uint64_t at = 0;
    int rc;
    if (!h) return -ENOMEM;
    rc = a->getinfo(ofi_ask(a), node && *node ? node : NULL, NULL, node && *node ? FI_SOURCE : 0, h, &list);
    a->freeinfo(h);
    if (rc) return rc;
    out[0] = 0;
    for (i = list; i && at + 256 < n; i = i->next)
        at += snprintf(out + at, n - at, "%s\t%s\n", i->fabric_attr->prov_name, i->domain_attr->name ? i->domain_attr->name : "");
    a->freeinfo(list);
    return 0;
}

#define OFI_TRY(call, name) do { rc = (call); if (rc) { snprintf(n->what, sizeof n->what, "%s", name); return rc; } } while (0)

/* What EFA is told before the endpoint is enabled. The numbers are the library's ABI (1.17's headers know the first only);
   an option that the library does not know is refused by it, which is no fault. */
enum {
    OFI_OPT_CUDA_API_PERMITTED = 10, OFI_OPT_SHARED_MEMORY_PERMITTED = 11,
    OFI_OPT_EFA_RNR_RETRY = -(0xefa << 16), OFI_OPT_EFA_USE_DEVICE_RDMA = -(0xefa << 16) + 4,
    OFI_OPT_EFA_UNSOLICITED_WRITE_RECV = -(0xefa << 16) + 8
};
static void ofi_efa_options(ofi_nic *n, int direct) {
    _Bool yes = 1, no = 0;
    size_t retry = 7;
    /* 7 is "for ever": a receiver that is not ready is waited for until our own deadline; an error would lose a message */
    fi_setopt(&n->ep->fid, FI_OPT_ENDPOINT, OFI_OPT_EFA_RNR_RETRY, &retry, sizeof retry);
    /* one way for every peer: the shared-memory path inside efa hangs when a peer is killed */
    fi_setopt(&n->ep->fid, FI_OPT_ENDPOINT, OFI_OPT_SHARED_MEMORY_PERMITTED, &no, sizeof no);
    /* data transfer must not call CUDA behind our back: it could wait for a kernel that waits for us */
    fi_setopt(&n->ep->fid, FI_OPT_ENDPOINT, OFI_OPT_CUDA_API_PERMITTED, &no, sizeof no);
    if (direct)
        /* no receive is used up by an immediate; the completion queue must then be long enough for all that may arrive */
        fi_setopt(&n->ep->fid, FI_OPT_ENDPOINT, OFI_OPT_EFA_UNSOLICITED_WRITE_RECV, &yes, sizeof yes);
    else
        /* writes by the NIC where it can (NICs that cannot refuse the option); needs API 1.18, see ofi_ask() */
        fi_setopt(&n->ep->fid, FI_OPT_ENDPOINT, OFI_OPT_EFA_USE_DEVICE_RDMA, &yes, sizeof yes);
}

static int ofi_open(ofi_api *a, ofi_nic *n, const char *provider, const char *node, const char *domain, int skip, uint64_t cq_size, int hmem) {
    struct fi_info *h = ofi_hints(a, provider, domain, hmem), *list = NULL, *i, *chosen = NULL;
    struct fi_av_attr av = {0};
    struct fi_cq_attr cq = {0};
    size_t len = sizeof n->addr;
    int rc;
    n->api = a;
    n->fd = -1;
    if (!h) return -ENOMEM;
    rc = a->getinfo(ofi_ask(a), node && *node ? node : NULL, NULL, node && *node ? FI_SOURCE : 0, h, &list);
    a->freeinfo(h);
    if (rc) { snprintf(n->what, sizeof n->what, "fi_getinfo"); return rc; }
    /* exactly this provider, not a layered one that contains it ("tcp;ofi_rxm"); the skip-th of its NICs, or its last */
    for (i = list; i; i = i->next) {
        if (provider && *provider && strcmp(i->fabric_attr->prov_name, provider)) continue;
        chosen = i;
        if (skip-- == 0) break;
    }
    if (!chosen) { a->freeinfo(list); snprintf(n->what, sizeof n->what, "fi_getinfo (no %s itself)", provider); return -FI_ENODATA; }
    n->info = a->dupinfo(chosen);
    a->freeinfo(list);
    if (!n->info) return -ENOMEM;
    i = n->info;
    n->contexts2 = (i->mode & FI_CONTEXT2) != 0;
    n->virt_addr = (i->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    n->prov_key = (i->domain_attr->mr_mode & FI_MR_PROV_KEY) != 0;
    n->need_desc = (i->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    n->mr_endpoint = (i->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0;
    n->data8 = i->domain_attr->cq_data_size >= 8;
    n->hmem = (i->caps & FI_HMEM) != 0;
    n->max_msg = i->ep_attr->max_msg_size;
    n->inject = i->tx_attr->inject_size;
    n->key_size = i->domain_attr->mr_key_size;
    n->tx_depth = (uint32_t)(i->tx_attr->size ? i->tx_attr->size : 128);
    /* efa's SRD acknowledges delivery; tcp's completion only says that the buffer may be reused */
    n->landed = i->fabric_attr->prov_name && !strncmp(i->fabric_attr->prov_name, "efa", 3);
    /* "efa" emulates writes where a NIC has none of its own; its completion then means "landed" only if that is asked for.
       Writes by the NIC ignore the flag. "efa-direct" knows neither emulation nor the flag. */
    n->delivery = n->landed && strcmp(i->fabric_attr->prov_name, "efa-direct");
    snprintf(n->provider, sizeof n->provider, "%s", i->fabric_attr->prov_name ? i->fabric_attr->prov_name : "");
    snprintf(n->domain, sizeof n->domain, "%s", i->domain_attr->name ? i->domain_attr->name : "");
    snprintf(n->fabric, sizeof n->fabric, "%s", i->fabric_attr->name ? i->fabric_attr->name : "");
    OFI_TRY(a->fabric(i->fabric_attr, &n->fab, NULL), "fi_fabric");
    OFI_TRY(fi_domain(n->fab, i, &n->dom, NULL), "fi_domain");
    av.type = i->domain_attr->av_type == FI_AV_UNSPEC ? FI_AV_TABLE : i->domain_attr->av_type;
    av.count = 256;
    OFI_TRY(fi_av_open(n->dom, &av, &n->av, NULL), "fi_av_open");
    cq.format = FI_CQ_FORMAT_DATA;
    cq.size = cq_size;
    cq.wait_obj = FI_WAIT_FD;
    rc = fi_cq_open(n->dom, &cq, &n->cq, NULL);
    if (rc) {                                           /* efa has no wait object: it is polled */
        cq.wait_obj = FI_WAIT_NONE;
        OFI_TRY(fi_cq_open(n->dom, &cq, &n->cq, NULL), "fi_cq_open");
    } else if (fi_control(&n->cq->fid, FI_GETWAIT, &n->fd) == 0 && n->fd >= 0) {
        n->has_fd = 1;
    }
    OFI_TRY(fi_endpoint(n->dom, i, &n->ep, NULL), "fi_endpoint");
    if (n->landed) ofi_efa_options(n, !strcmp(n->provider, "efa-direct"));
    OFI_TRY(fi_ep_bind(n->ep, &n->av->fid, 0), "fi_ep_bind (av)");
    OFI_TRY(fi_ep_bind(n->ep, &n->cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind (cq)");
    OFI_TRY(fi_enable(n->ep), "fi_enable");
    OFI_TRY(fi_getname(&n->ep->fid, n->addr, &len), "fi_getname");
    n->addrlen = len;
    return 0;
}

static void ofi_close(ofi_nic *n) {
    if (n->ep) fi_close(&n->ep->fid);
    if (n->cq) fi_close(&n->cq->fid);
    if (n->av) fi_close(&n->av->fid);
    if (n->internal[0]) fi_close(&n->internal[0]->fid);     /* before their domain, which would be busy */
    if (n->internal[1]) fi_close(&n->internal[1]->fid);
    if (n->dom) fi_close(&n->dom->fid);
    if (n->fab) fi_close(&n->fab->fid);
    if (n->info) n->api->freeinfo(n->info);
    memset(n, 0, sizeof *n);
    n->fd = -1;
}

/* FI_MR_DMABUF and its attribute came with 1.20; 1.17's headers do not know them. The layouts are the library's ABI. */
#define OFI_MR_DMABUF (1ULL << 40)
struct ofi_mr_dmabuf { int fd; uint64_t offset; size_t len; void *base_addr; };

static int ofi_reg(ofi_nic *n, uint64_t addr, uint64_t len, uint64_t key, int iface, int device, int dmabuf_fd, uint64_t dmabuf_off,
                   void **mr, void **desc, uint64_t *got) {
    if (!n->dom) return -ESHUTDOWN;
    struct fid_mr *m = NULL;
    uint64_t access = FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV;
    struct iovec v = { (void *)(uintptr_t)addr, len };
    int rc;
    if (iface == 0) {
        rc = fi_mr_reg(n->dom, v.iov_base, len, access, 0, key, 0, &m, NULL);
    } else {
        struct fi_mr_attr at;
        struct ofi_mr_dmabuf db = { dmabuf_fd, dmabuf_off, len, (void *)(uintptr_t)addr };
        memset(&at, 0, sizeof at);
        at.mr_iov = &v;
        at.iov_count = 1;
        at.access = access;
        at.requested_key = key;
        at.iface = iface == 1 ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
        at.device.cuda = device;
        if (dmabuf_fd >= 0) at.mr_iov = (const struct iovec *)&db;      /* a union in newer headers */
        rc = fi_mr_regattr(n->dom, &at, dmabuf_fd >= 0 ? OFI_MR_DMABUF : 0, &m);
    }
    if (rc) return rc;
    if (n->mr_endpoint) {
        rc = fi_mr_bind(m, &n->ep->fid, 0);
        if (!rc) rc = fi_mr_enable(m);
        if (rc) { fi_close(&m->fid); return rc; }
    }
    *mr = m;
    *desc = fi_mr_desc(m);
    *got = fi_mr_key(m);
    return 0;
}
/* The buffers of control messages; closed with the rest. */
static int ofi_reg_internal(ofi_nic *n, int which, void *at, uint64_t len, void **desc) {
    void *mr;
    uint64_t key;
    int rc = ofi_reg(n, (uintptr_t)at, len, 1 + which, 0, 0, -1, 0, &mr, desc, &key);
    if (!rc) n->internal[which] = mr;
    return rc;
}
static int ofi_dereg(void *mr) { return fi_close(&((struct fid_mr *)mr)->fid); }

static int ofi_av_insert(ofi_nic *n, const void *addr, uint64_t *out) {
    if (!n->av) return -ESHUTDOWN;
    fi_addr_t a = FI_ADDR_UNSPEC;
    int rc = fi_av_insert(n->av, addr, 1, &a, 0, NULL);
    *out = a;
    return rc == 1 ? 0 : rc < 0 ? rc : -EINVAL;
}
static void ofi_av_remove(ofi_nic *n, uint64_t a) { fi_addr_t x = a; fi_av_remove(n->av, &x, 1, 0); }

static inline int ofi_write(ofi_nic *n, const void *src, uint64_t len, void *desc, uint64_t peer, uint64_t dst, uint64_t key,
                            uint64_t data, int imm, int landed, void *ctx) {
    if (!n->ep) return -ESHUTDOWN;
    struct iovec v = { (void *)src, len };
    struct fi_rma_iov r = { dst, len, key };
    struct fi_msg_rma m = { &v, &desc, 1, peer, &r, 1, ctx, data };    /* zero-length: iov and a valid desc all the same */
    uint64_t flags = FI_COMPLETION;
    if (imm) flags |= FI_REMOTE_CQ_DATA;
    if (n->delivery || (landed && !n->landed)) flags |= FI_DELIVERY_COMPLETE;
    return (int)fi_writemsg(n->ep, &m, flags);
}
/* Small writes whose landing nobody asked for: copied at once, no completion of their own to be read. */
static inline int ofi_inject(ofi_nic *n, const void *src, uint64_t len, uint64_t peer, uint64_t dst, uint64_t key,
                             uint64_t data, int imm) {
    if (!n->ep) return -ESHUTDOWN;
    return (int)(imm ? fi_inject_writedata(n->ep, src, len, data, peer, dst, key)
                     : fi_inject_write(n->ep, src, len, peer, dst, key));
}
static inline int ofi_send(ofi_nic *n, const void *buf, uint64_t len, void *desc, uint64_t peer, void *ctx) {
    if (!n->ep) return -ESHUTDOWN;
    return (int)fi_send(n->ep, buf, len, desc, peer, ctx);
}
static inline int ofi_recv(ofi_nic *n, void *buf, uint64_t len, void *desc, void *ctx) {
    if (!n->ep) return -ESHUTDOWN;
    return (int)fi_recv(n->ep, buf, len, desc, FI_ADDR_UNSPEC, ctx);
}

static inline uint64_t ofi_what(uint64_t flags) {
    return (flags & FI_REMOTE_CQ_DATA ? OFI_REMOTE_DATA : 0) | (flags & FI_RECV ? OFI_RECV : 0) |
           (flags & FI_SEND ? OFI_SEND : 0) | (flags & FI_WRITE ? OFI_WRITE : 0);
}

/* Up to `most` completions; -1: the queue itself has failed. A remote write's event may have len 0 and no FI_RMA flag:
   FI_REMOTE_CQ_DATA is what counts. */
static inline int ofi_poll(ofi_nic *n, ofi_comp *out, int most) {
    if (!n->cq) return 0;
    struct fi_cq_data_entry e[16];
    fi_addr_t from[16];
    int i, k;
    if (most > 16) most = 16;
    k = (int)(n->data8 ? fi_cq_read(n->cq, e, most) : fi_cq_readfrom(n->cq, e, most, from));
    if (k > 0) {
        for (i = 0; i < k; i++) {
            out[i].ctx = e[i].op_context;
            out[i].flags = ofi_what(e[i].flags);
            out[i].data = e[i].data;
            out[i].len = e[i].len;
            out[i].src = n->data8 ? (uint64_t)-1 : from[i];
            out[i].err = 0;
        }
        return k;
    }
    if (k == -FI_EAVAIL) {
        /* from 1.20 on the library writes more than 1.17's headers describe */
        union { struct fi_cq_err_entry e; char room[sizeof(struct fi_cq_err_entry) + 64]; } x;
        memset(&x, 0, sizeof x);
        if (fi_cq_readerr(n->cq, &x.e, 0) == 1) {
            out[0].ctx = x.e.op_context;
            out[0].flags = ofi_what(x.e.flags & ~FI_REMOTE_CQ_DATA);
            out[0].err = x.e.err ? x.e.err : FI_EOTHER;
            out[0].prov = x.e.prov_errno;
            out[0].data = out[0].len = 0;
            return 1;
        }
        return 0;
    }
    return k == 0 || k == -FI_EAGAIN || k == -FI_EINTR ? 0 : -1;
}
static inline int ofi_trywait(ofi_nic *n) {
    struct fid *f = &n->cq->fid;
    return n->has_fd ? fi_trywait(n->fab, &f, 1) != 0 : 0;
}
#endif
