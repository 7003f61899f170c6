/* A bare libfabric endpoint that says what it is told to: for tests of what the ofi fabric makes of strangers' messages.

   cc -O1 -o ofi_speaker ofi_speaker.c -ldl;  ofi_speaker LIBRARY PROVIDER NODE
     > ready ADDRESS                       once; hex
     < send ADDRESS BYTES                  both hex       > sent, or: error CODE (after 5 s without room: error 11)
     > got BYTES                           whenever a message comes
   Ends when its standard input does. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

enum { SLOT = 32768, RECVS = 32, MAX_ADDR = 512 };
static struct fid_ep *ep;
static struct fid_cq *cq;
static struct fid_av *av;
static char buf[RECVS + 1][SLOT], line[4 * SLOT];
static struct fi_context2 ctx[RECVS + 1];

static void check(const char *what, long rc) {
    if (rc >= 0) return;
    printf("error %ld %s\n", -rc, what);
    fflush(stdout);
    exit(1);
}
static void open_endpoint(void *lib, const char *provider, const char *node) {
    struct fi_info *(*dup)(const struct fi_info *) = (struct fi_info *(*)(const struct fi_info *))dlsym(lib, "fi_dupinfo");
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **) =
        (int (*)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **))dlsym(lib, "fi_getinfo");
    int (*fabric_)(struct fi_fabric_attr *, struct fid_fabric **, void *) =
        (int (*)(struct fi_fabric_attr *, struct fid_fabric **, void *))dlsym(lib, "fi_fabric");
    struct fi_info *h = dup(NULL), *info;
    struct fi_cq_attr ca = { .size = 1024, .format = FI_CQ_FORMAT_DATA };
    struct fi_av_attr aa = { .type = FI_AV_TABLE };
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    int i;
    h->caps = FI_MSG;
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->ep_attr->type = FI_EP_RDM;
    h->fabric_attr->prov_name = strdup(provider);
    check("fi_getinfo", getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, h, &info));
    check("fi_fabric", fabric_(info->fabric_attr, &fabric, NULL));
    check("fi_domain", fi_domain(fabric, info, &domain, NULL));
    check("fi_cq_open", fi_cq_open(domain, &ca, &cq, NULL));
    check("fi_av_open", fi_av_open(domain, &aa, &av, NULL));
    check("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
    check("bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    check("bind", fi_ep_bind(ep, &av->fid, 0));
    check("fi_enable", fi_enable(ep));
    for (i = 0; i < RECVS; i++) check("fi_recv", fi_recv(ep, buf[i], SLOT, NULL, FI_ADDR_UNSPEC, &ctx[i]));
}
static void hex(const char *word, const void *at, size_t n) {
    size_t i;
    printf("%s ", word);
    for (i = 0; i < n; i++) printf("%02x", ((const unsigned char *)at)[i]);
    printf("\n");
    fflush(stdout);
}
static size_t unhex(const char *s, void *out) {
    size_t n = 0;
    unsigned b;
    for (; sscanf(s, "%2x", &b) == 1; s += 2) ((unsigned char *)out)[n++] = (unsigned char)b;
    return n;
}
/* Completions; whether the send is over. */
static int look(void) {
    struct fi_cq_data_entry e;
    union { struct fi_cq_err_entry e; char room[256]; } x;
    int over = 0;
    long n;
    while ((n = fi_cq_read(cq, &e, 1)) == 1) {
        long i = (struct fi_context2 *)e.op_context - ctx;
        if (i == RECVS) { over = 1; continue; }
        hex("got", buf[i], e.len);
        check("fi_recv", fi_recv(ep, buf[i], SLOT, NULL, FI_ADDR_UNSPEC, &ctx[i]));
    }
    if (n == -FI_EAVAIL) {
        memset(&x, 0, sizeof x);
        fi_cq_readerr(cq, &x.e, 0);
        if (x.e.op_context == &ctx[RECVS]) { printf("error %d\n", x.e.err); fflush(stdout); return 2; }
    }
    return over;
}
static void say(char *what) {
    unsigned char to[MAX_ADDR] = { 0 };
    char *bytes = strchr(what, ' ');
    fi_addr_t peer;
    time_t end = time(NULL) + 5;
    size_t n;
    long rc;
    int over = 0;
    if (!bytes) check("send ADDRESS BYTES", -FI_EINVAL);
    *bytes++ = 0;
    unhex(what, to);
    n = unhex(bytes, buf[RECVS]);
    if (fi_av_insert(av, to, 1, &peer, 0, NULL) != 1) check("fi_av_insert", -FI_EINVAL);
    while ((rc = fi_send(ep, buf[RECVS], n, NULL, peer, &ctx[RECVS])) == -FI_EAGAIN && time(NULL) < end) look();
    while (!rc && !(over = look()) && time(NULL) < end) continue;
    if (rc) printf("error %ld\n", -rc);
    else if (over == 1) printf("sent\n");
    fflush(stdout);
}
int main(int argc, char **argv) {
    unsigned char name[MAX_ADDR];
    size_t n = sizeof name, at = 0;
    struct pollfd in = { 0, POLLIN, 0 };
    void *lib;
    if (argc != 4) return 2;
    setenv("IPATH_NO_BACKTRACE", "1", 1);
    lib = dlopen(argv[1], RTLD_NOW);
    if (!lib) { printf("error 2 %s\n", dlerror()); return 1; }
    open_endpoint(lib, argv[2], argv[3]);
    check("fi_getname", fi_getname(&ep->fid, name, &n));
    hex("ready", name, n);
    for (;;) {
        look();
        if (poll(&in, 1, 1) <= 0) continue;
        long k = read(0, line + at, sizeof line - 1 - at);
        if (k <= 0) return 0;
        at += (size_t)k;
        line[at] = 0;
        for (char *end; (end = strchr(line, '\n')); ) {
            *end = 0;
            if (!strncmp(line, "send ", 5)) say(line + 5);
            at -= (size_t)(end + 1 - line);
            memmove(line, end + 1, at + 1);
        }
    }
}
