/* The bare libfabric program that `fabricx bench p2p` compares the ofi fabric with: one-sided writes with data between two
   processes on one provider, and nothing else. Both sides spin on their completion queue.

   cc -O2 -o ofi_pingpong ofi_pingpong.c -ldl;  ofi_pingpong LIBRARY PROVIDER NODE   (two of them, driven over stdin/stdout)

     > ready ADDRESS KEY BASE              printed once: endpoint address in hex, key and base of the 16 MiB pool
     < peer ADDRESS KEY BASE               the other side's                       > ok 0
     < bw ROLE SIZE COUNT WINDOW           role 0 writes, role 1 counts           > ok GB/s
     < pp ROLE COUNT                       8 bytes to and fro, role 0 begins      > ok ns a round trip
     < quit
   Anything that fails is printed as "error ..." and ends the program. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

enum { POOL = 16 << 20, MAX_WINDOW = 64, MAX_ADDR = 256, GIVE_UP_S = 30, BATCH = 16 };

static int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
static struct fi_info *(*dupinfo)(const struct fi_info *);
static int (*open_fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
static uint32_t (*version)(void);
static const char *(*words)(int);

static struct fi_info *info;
static struct fid_ep *ep;
static struct fid_cq *cq;
static struct fid_mr *mr;
static char *pool;
static void *desc;
static fi_addr_t peer;
static uint64_t peer_key, peer_base;
static struct fi_context2 slot[MAX_WINDOW];

static void die(const char *form, ...) {
    va_list a;
    va_start(a, form);
    printf("error ");
    vprintf(form, a);
    printf("\n");
    fflush(stdout);
    exit(1);
}
static void check(const char *what, long rc) {
    if (rc < 0) die("%s: %s", what, words ? words((int)-rc) : "?");
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void *symbol(void *lib, const char *name) {
    void *p = dlsym(lib, name);
    if (!p) die("the library has no %s", name);
    return p;
}
static void load(const char *path) {
    void *lib;
    setenv("IPATH_NO_BACKTRACE", "1", 1);       /* else Debian's build takes over SIGINT and SIGTERM */
    lib = dlopen(path, RTLD_NOW);
    if (!lib) die("%s", dlerror());
    words = symbol(lib, "fi_strerror");
    version = symbol(lib, "fi_version");
    getinfo = symbol(lib, "fi_getinfo");
    dupinfo = symbol(lib, "fi_dupinfo");
    open_fabric = symbol(lib, "fi_fabric");
}

static void open_endpoint(const char *provider, const char *node) {
    uint32_t v = version() < FI_VERSION(1, 18) ? version() : FI_VERSION(1, 18);
    struct fi_info *hints = dupinfo(NULL);
    struct fi_cq_attr cq_attr = { .size = 4096, .format = FI_CQ_FORMAT_DATA };
    struct fi_av_attr av_attr = { .type = FI_AV_TABLE };
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup(provider);
    check("fi_getinfo", getinfo(v, node, NULL, FI_SOURCE, hints, &info));
    check("fi_fabric", open_fabric(info->fabric_attr, &fabric, NULL));
    check("fi_domain", fi_domain(fabric, info, &domain, NULL));
    check("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
    check("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
    check("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
    check("bind cq", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    check("bind av", fi_ep_bind(ep, &av->fid, 0));
    check("fi_enable", fi_enable(ep));
    if (posix_memalign((void **)&pool, 4096, POOL)) die("no memory");
    memset(pool, 1, POOL);
    check("fi_mr_reg", fi_mr_reg(domain, pool, POOL, FI_WRITE | FI_REMOTE_WRITE, 0, 7, 0, &mr, NULL));
    desc = fi_mr_desc(mr);
    ep->fid.context = av;                       /* the one thing that is needed of it later */
}

static void say_ready(void) {
    unsigned char name[MAX_ADDR];
    size_t n = sizeof name, i;
    check("fi_getname", fi_getname(&ep->fid, name, &n));
    printf("ready ");
    for (i = 0; i < n; i++) printf("%02x", name[i]);
    printf(" %llu %llu\n", (unsigned long long)fi_mr_key(mr),
           info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (unsigned long long)(uintptr_t)pool : 0ull);
    fflush(stdout);
}
static void set_peer(const char *hex) {
    unsigned char name[MAX_ADDR] = { 0 };
    size_t i, n = strlen(hex) / 2;
    unsigned byte;
    if (n > sizeof name) die("the peer's address has %zu bytes", n);
    for (i = 0; i < n; i++) {
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1) die("the peer's address is no hex");
        name[i] = (unsigned char)byte;
    }
    if (fi_av_insert(ep->fid.context, name, 1, &peer, 0, NULL) != 1) die("fi_av_insert");
}

/* Counts completions of our own writes and arrivals; the only place that reads the queue. */
static void poll_cq(long *done, long *arrived) {
    struct fi_cq_data_entry e[BATCH];
    union { struct fi_cq_err_entry e; char room[256]; } err;    /* newer libraries write more than our headers know */
    long n = fi_cq_read(cq, e, BATCH), i;
    if (n == -FI_EAGAIN) return;
    if (n == -FI_EAVAIL) {
        memset(&err, 0, sizeof err);
        fi_cq_readerr(cq, &err.e, 0);
        die("completion: %s", words(err.e.err));
    }
    check("fi_cq_read", n);
    for (i = 0; i < n; i++) {
        if (e[i].flags & FI_REMOTE_CQ_DATA) ++*arrived;
        else ++*done;
    }
}
static void patience(long *turns, double *end) {
    if ((++*turns & 0xfffff) == 0) {
        if (*end == 0) *end = now() + GIVE_UP_S * 1e9;
        else if (now() > *end) die("the other side did not come within %d s", GIVE_UP_S);
    }
}

static double bandwidth(int role, size_t size, long count, long window) {
    long posted = 0, done = 0, arrived = 0, turns = 0, slots = POOL / (long)size, rc;
    double end = 0, t0 = now();
    if (slots > window) slots = window;
    while (role == 0 && done < count) {
        while (posted < count && posted - done < window) {
            size_t at = (size_t)(posted % slots) * size;
            rc = fi_writedata(ep, pool + at, size, desc, 1, peer, peer_base + at, peer_key, &slot[posted % window]);
            if (rc == -FI_EAGAIN) break;
            check("fi_writedata", rc);
            posted++;
        }
        poll_cq(&done, &arrived);
        patience(&turns, &end);
    }
    while (arrived < (role == 0 ? 1 : count)) {
        poll_cq(&done, &arrived);
        patience(&turns, &end);
    }
    if (role == 1)                              /* the word that all of it is there */
        while ((rc = fi_inject_writedata(ep, pool, 8, 2, peer, peer_base, peer_key)) != 0) {
            if (rc != -FI_EAGAIN) check("fi_inject_writedata", rc);
            poll_cq(&done, &arrived);
            patience(&turns, &end);
        }
    return (double)size * count / (now() - t0);
}

static double pingpong(int role, long count) {
    long i, done = 0, arrived = 0, turns = 0, rc;
    double end = 0, t0 = now();
    for (i = 1; i <= count; i++) {
        while (role == 1 && arrived < i) { poll_cq(&done, &arrived); patience(&turns, &end); }
        while ((rc = fi_inject_writedata(ep, pool, 8, 3, peer, peer_base, peer_key)) != 0) {
            if (rc != -FI_EAGAIN) check("fi_inject_writedata", rc);
            poll_cq(&done, &arrived);
            patience(&turns, &end);
        }
        while (role == 0 && arrived < i) { poll_cq(&done, &arrived); patience(&turns, &end); }
    }
    return (now() - t0) / count;
}

/* What an injected write left in the endpoint goes out only while somebody looks at the queue. */
static void flush_out(void) {
    long done = 0, arrived = 0;
    double end = now() + 2e6;
    while (now() < end) poll_cq(&done, &arrived);
    if (arrived) die("%ld writes arrived after the last", arrived);
}

int main(int argc, char **argv) {
    char line[2048], hex[2 * MAX_ADDR + 1];
    unsigned long long key, base;
    int role;
    long size, count, window;
    if (argc != 4) die("usage: ofi_pingpong LIBRARY PROVIDER NODE");
    load(argv[1]);
    open_endpoint(argv[2], argv[3]);
    say_ready();
    while (fgets(line, sizeof line, stdin)) {
        double value = 0;
        if (sscanf(line, "peer %512s %llu %llu", hex, &key, &base) == 3) {
            set_peer(hex);
            peer_key = key;
            peer_base = base;
        } else if (sscanf(line, "bw %d %ld %ld %ld", &role, &size, &count, &window) == 4) {
            if (size < 8 || size > POOL || count < 1 || window < 1 || window > MAX_WINDOW) die("out of range: %s", line);
            value = bandwidth(role, (size_t)size, count, window);
            flush_out();
        } else if (sscanf(line, "pp %d %ld", &role, &count) == 2 && count > 0) {
            value = pingpong(role, count);
            flush_out();
        } else if (!strncmp(line, "quit", 4)) {
            return 0;
        } else {
            die("no such command: %s", line);
        }
        printf("ok %.9g\n", value);
        fflush(stdout);
    }
    return 0;
}
