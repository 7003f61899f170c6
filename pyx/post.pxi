# Choosing a NIC and posting, part of worker.pyx. Posting functions return 1 when nothing is left to post.

cdef inline void nic_down(group_t* g, uint32_t i) noexcept nogil:
    if g.nic[i].up:
        g.nic[i].up = 0
        event(g, EV_NIC_DOWN, i, 0, NO_SRC)

cdef inline uint64_t slot_ctx(nic_t* d, uint32_t back) noexcept nogil:
    """The ctx that the (back + 1)th next free work-request slot would have."""
    cdef uint32_t i = d.free_wr[d.nfree - 1 - back]
    return <uint64_t>i | <uint64_t>d.wr[i].gen << 32

cdef inline void slot_take(nic_t* d, uint32_t i, req_t* r, uint64_t at, uint64_t n, uint64_t unit, uint32_t left, uint32_t peer) noexcept nogil:
    cdef wr_t* w = &d.wr[i]
    w.r = r
    w.at = at
    w.n = n
    w.unit = unit
    w.left = left
    w.peer = peer
    w.used = 1
    r.left += left
    d.out_bytes += unit * left

cdef inline void slot_free(nic_t* d, uint32_t i) noexcept nogil:
    d.wr[i].used = 0
    d.wr[i].gen += 1
    d.free_wr[d.nfree] = i
    d.nfree += 1

cdef inline int pick(group_t* g, rmr_t* m, uint32_t nic) noexcept nogil:
    """The path whose NIC has the fewest bytes outstanding (then: has carried the fewest); -1: none is up."""
    cdef int best = -1
    cdef uint32_t k
    cdef nic_t* d
    cdef nic_t* b = NULL
    if m.npaths == 1 and nic == NIC_ANY:
        return 0 if g.nic[m.path[0].nic].up else -1
    for k in range(m.npaths):
        if nic != NIC_ANY and m.path[k].nic != nic:
            continue
        d = &g.nic[m.path[k].nic]
        if not d.up:
            continue
        if b == NULL or d.out_bytes < b.out_bytes or (d.out_bytes == b.out_bytes and d.bytes < b.bytes):
            best = k
            b = d
    return best

cdef inline int path_on(rmr_t* m, uint32_t nic) noexcept nogil:
    cdef uint32_t k
    for k in range(m.npaths):
        if m.path[k].nic == nic:
            return k
    return -1


cdef inline void refuse(req_t* r, int32_t status) noexcept nogil:
    if r.status == 0:
        r.status = status
    r.stopped = 1

cdef inline uint32_t write_word(req_t* r) noexcept nogil:
    if r.tag >= 0:
        return r.imm | <uint32_t>ctz64(r.shards) << IMM_SHARD_SHIFT | <uint32_t>r.tag << IMM_TAG_SHIFT
    return r.imm

cdef inline void cut(group_t* g, req_t* r) noexcept nogil:
    """Into how many shards a write goes: over several NICs when it is large, more when a NIC cannot carry it whole."""
    cdef uint64_t want = 1, longest = <uint64_t>-1
    cdef uint32_t k
    for k in range(r.rmr.npaths):
        longest = min(longest, g.nic[r.rmr.path[k].nic].max_msg)
    if r.nic == NIC_ANY and r.rmr.npaths > 1 and r.n >= g.split_min:
        want = min(<uint64_t>r.rmr.npaths, max(<uint64_t>1, r.n // SHARD_MIN))
    if longest and r.n > longest:
        want = max(want, (r.n + longest - 1) // longest)
    r.shards = 1
    while r.shards < want and r.shards < 16:
        r.shards *= 2
    r.shard_len = r.n
    if r.shards > 1:
        r.shard_len = (r.n // r.shards + 63) & ~<uint64_t>63
        if r.flags & F_IMM:             # the tag may be used again only when every shard has landed
            r.flags |= F_LANDED

cdef inline int post_shard(group_t* g, req_t* r, uint32_t i, uint64_t* part, int more) noexcept nogil:
    """Posts shard i from byte `part` on. 1: all of it; 0: try again; with `more` 0 one chunk at most."""
    cdef uint64_t off = <uint64_t>i * r.shard_len
    cdef uint64_t n = min(r.shard_len, r.n - off), piece
    cdef path_t* p
    cdef nic_t* d
    cdef write_t w
    cdef int k, rc
    if part[0] == 0 or not g.nic[r.rmr.path[r.path].nic].up:
        k = pick(g, r.rmr, r.nic)
        if k < 0:
            refuse(r, FE_NIC)
            return 1
        r.path = k
        part[0] = 0
    p = &r.rmr.path[r.path]
    d = &g.nic[p.nic]
    while True:
        if d.nfree == 0:
            return 0
        piece = n - part[0]
        if d.caps & CAP_SYNC and piece > d.chunk:
            piece = d.chunk
        w.src = r.src + off + part[0]
        w.len = piece
        w.dst = p.base + r.dst + off + part[0]
        w.lkey = r.lmr.lkey[p.nic]
        w.rkey = p.key
        w.ctx = slot_ctx(d, 0)
        w.peer = p.peer
        w.imm = write_word(r)
        w.flags = r.flags if part[0] + piece == n else r.flags & ~<uint32_t>F_IMM
        rc = d.ops.post_write(d.dom, &w)
        if rc == POST_DONE or rc == POST_QUEUED:
            d.posts += 1
            d.bytes += piece
            if rc == POST_QUEUED:
                d.nfree -= 1
                slot_take(d, <uint32_t>w.ctx, r, i, 1, piece, 1, p.peer)
            part[0] += piece
            if part[0] >= n:
                part[0] = 0
                return 1
            if not more:
                return 0
        elif rc == POST_FULL:
            d.fulls += 1
            return 0
        elif rc == -FE_NIC:
            nic_down(g, p.nic)
            part[0] = 0
            return 0
        else:
            d.errors += 1
            refuse(r, -rc)
            return 1

cdef inline int post_write(group_t* g, req_t* r) noexcept nogil:
    if r.shard == 0 and r.part == 0 and r.shard_len == 0:
        cut(g, r)
    if r.shards > 1 and r.flags & F_IMM and r.tag < 0:
        r.tag = tag_take(r.rmr.peer)
        if r.tag < 0 and r.rmr.peer.burnt >= IMM_TAGS - TAGS_LEFT and r.n <= g.nic[r.rmr.path[0].nic].max_msg:
            # too many are lost with writes that failed: it goes whole, over one NIC
            r.shards, r.shard_len = 1, r.n
        elif r.tag < 0:
            return 0
    while r.shard < r.shards:
        if not post_shard(g, r, r.shard, &r.part, 0):
            return 0
        if r.stopped:
            return 1
        r.shard += 1
    return 1

cdef inline int post_run(group_t* g, req_t* r, uint64_t* at, uint64_t end) noexcept nogil:
    """Posts pages [at, end) over one NIC as far as it takes them; advances `at`."""
    cdef int k = pick(g, r.rmr, r.nic), rc
    cdef path_t* p
    cdef nic_t* d
    cdef pages_t v
    cdef uint64_t most, took
    if k < 0:
        refuse(r, FE_NIC)
        return 1
    p = &r.rmr.path[k]
    d = &g.nic[p.nic]
    if d.nfree == 0:
        return 0
    if d.caps & CAP_SYNC:
        most = max(<uint64_t>1, d.chunk // r.len)
        most = min(most, <uint64_t>PAGES_A_POST)
    else:
        most = d.run
    if r.rmr.npaths > 1:
        most = min(most, max(<uint64_t>16, (r.n + r.rmr.npaths - 1) // r.rmr.npaths))
    v.at = at[0]
    v.end = min(end, at[0] + most)
    v.src = r.src
    v.dst = p.base + r.dst
    v.sstride = r.sstride
    v.dstride = r.dstride
    v.len = r.len
    v.si = r.si
    v.di = r.di
    v.swide = r.swide
    v.dwide = r.dwide
    v.lkey = r.lmr.lkey[p.nic]
    v.rkey = p.key
    v.ctx = slot_ctx(d, 0)
    v.peer = p.peer
    v.imm = r.imm
    v.flags = r.flags
    rc = d.ops.post_pages(d.dom, &v)
    took = v.at - at[0]
    d.posts += took
    d.bytes += took * r.len
    if took and rc != POST_DONE and not (rc < 0 and d.caps & CAP_SYNC):
        d.nfree -= 1
        slot_take(d, <uint32_t>v.ctx, r, at[0], took, r.len, <uint32_t>took, p.peer)
    at[0] = v.at
    if rc == POST_FULL:
        d.fulls += 1
        return 0
    if rc == -FE_NIC:
        nic_down(g, p.nic)
        return 0
    if rc < 0:
        d.errors += 1
        refuse(r, -rc)
        return 1
    return 1

cdef inline int post_pages(group_t* g, req_t* r) noexcept nogil:
    cdef int i = 0
    cdef uint64_t was
    while r.at < r.n:
        was = r.at
        if not post_run(g, r, &r.at, r.n):
            return 0
        if r.stopped:
            return 1
        i += 1
        if r.at < r.n and (i >= 4 or g.nic[0].caps & CAP_SYNC or was == r.at):
            return 0                    # others get their turn
    return 1

cdef inline void target_failed(req_t* r, uint64_t i, int32_t status) noexcept nogil:
    if r.status == 0:
        r.status = status
        r.failed_at = <uint32_t>i

cdef inline int post_targets(group_t* g, req_t* r, uint64_t* at, uint64_t end) noexcept nogil:
    """Posts targets [at, end) of a scatter; those of a lost peer are refused, the others go on."""
    cdef write_t w[BATCH]
    cdef uint64_t which[BATCH]
    cdef target_t* t
    cdef nic_t* d
    cdef int k, n, taken, i
    cdef uint32_t nic, kept
    cdef uint64_t most, j, piece
    while at[0] < end:
        t = &r.target[at[0]]
        k = pick(g, t.rmr, r.nic)
        if k < 0 or t.rmr.peer.lost:
            target_failed(r, at[0], FE_PEER_LOST if t.rmr.peer.lost else FE_NIC)
            at[0] += 1
            r.part = 0
            continue
        nic = t.rmr.path[k].nic
        d = &g.nic[nic]
        most = min(<uint64_t>BATCH, end - at[0])
        if g.nnics > 1:
            most = min(most, max(<uint64_t>1, (r.n + g.nnics - 1) // g.nnics))
        most = min(most, <uint64_t>d.nfree)
        n = 0
        j = at[0]
        while j < end and n < <int>most:
            t = &r.target[j]
            if t.rmr.peer.lost:
                target_failed(r, j, FE_PEER_LOST)
                if n == 0:
                    at[0] = j + 1
                else:
                    break
                j += 1
                continue
            k = path_on(t.rmr, nic)
            if k < 0:
                break
            piece = t.len - r.part if n == 0 else t.len
            if d.caps & CAP_SYNC and piece > d.chunk:
                if n:
                    break
                piece = d.chunk
            w[n].src = t.src + (r.part if n == 0 else 0)
            w[n].len = piece
            w[n].dst = t.rmr.path[k].base + t.off + (r.part if n == 0 else 0)
            w[n].lkey = r.lmr.lkey[nic] if r.lmr != NULL else 0
            w[n].rkey = t.rmr.path[k].key
            w[n].ctx = slot_ctx(d, n)
            w[n].peer = t.rmr.path[k].peer
            w[n].imm = r.imm
            w[n].flags = r.flags | (F_BULK if t.len >= BULK else 0)
            which[n] = j
            if n == 0 and r.part + piece < t.len:
                w[0].flags &= ~<uint32_t>F_IMM
                n = 1
                break
            n += 1
            j += 1
        if n == 0:
            if most == 0:
                return 0
            continue
        taken = d.ops.post_many(d.dom, w, n)
        kept = 0
        for i in range(taken):
            t = &r.target[which[i]]
            if w[i].rc >= 0:
                d.posts += 1
                d.bytes += w[i].len
                if w[i].rc == POST_QUEUED:
                    kept += 1
                    slot_take(d, <uint32_t>w[i].ctx, r, which[i], 1, w[i].len, 1, w[i].peer)
            elif w[i].rc == -FE_NIC:
                nic_down(g, nic)
                taken = i
                break
            else:
                d.errors += 1
                target_failed(r, which[i], -w[i].rc)
        if kept:                        # compact: refused or finished ones give their slots back
            d.nfree -= n
            for i in range(n):
                if not d.wr[<uint32_t>w[i].ctx].used:
                    d.free_wr[d.nfree] = <uint32_t>w[i].ctx
                    d.nfree += 1
        if taken:
            if taken == 1 and r.part + w[0].len < r.target[which[0]].len and w[0].rc >= 0:
                r.part += w[0].len
                at[0] = which[0]
                return 0                # one chunk of a large slice a turn
            r.part = 0
            at[0] = which[taken - 1] + 1
        if taken < n:
            d.fulls += 1
            return 0
    return 1

cdef inline int send_nic(group_t* g, req_t* r) noexcept nogil:
    """The NIC that a message goes over, -1: none. The same one as long as it is up: a fabric may keep half of a message."""
    cdef int i
    for i in range(<int>g.nnics):
        if g.nic[i].up and r.peer.at_nic[i] != NO_SRC:
            return i
    return -1

cdef inline int taken_back(group_t* g, req_t* r) noexcept nogil:
    """A message whose request has ended: 1 when nothing of it can be delivered any more."""
    cdef int i = send_nic(g, r)
    if i >= 0:
        r.send.peer = r.peer.at_nic[i]
        if not g.nic[i].ops.cancel_send(g.nic[i].dom, &r.send):
            return 0
    r.send.at = 0
    if r.peer.half == <void*>r:
        r.peer.half = NULL
    return 1

cdef inline int post_send(group_t* g, req_t* r) noexcept nogil:
    cdef nic_t* d
    cdef uint32_t peer
    cdef int rc, i = send_nic(g, r)
    if i < 0:
        refuse(r, FE_NIC)
        return 1
    d = &g.nic[i]
    peer = r.peer.at_nic[i]
    if d.nfree == 0 or (r.peer.half != NULL and r.peer.half != <void*>r):
        return 0
    r.send.peer = peer
    r.send.ctx = slot_ctx(d, 0)
    rc = d.ops.post_send(d.dom, &r.send)
    r.peer.half = <void*>r if rc == POST_FULL and r.send.at else NULL
    if rc == POST_DONE or rc == POST_QUEUED:
        d.posts += 1
        d.bytes += r.send.len
        if rc == POST_QUEUED:
            d.nfree -= 1
            slot_take(d, <uint32_t>r.send.ctx, r, 0, 1, r.send.len, 1, peer)
        return 1
    if rc == POST_FULL:
        d.fulls += 1
        return 0
    if rc == -FE_NIC:
        nic_down(g, i)
        r.send.at = 0
        return 0
    if rc == -FE_TOO_LONG:
        r.dst = d.ops.recv_len(d.dom, peer)      # for the message of the exception
    refuse(r, -rc)
    return 1

cdef inline int post_fences(group_t* g, req_t* r) noexcept nogil:
    """Asks each peer of a transfer, over each NIC that it may have gone over. Who is gone is not asked."""
    cdef nic_t* d
    cdef target_t* t
    cdef uint32_t k
    cdef int rc
    while r.at < r.n:
        t = &r.target[r.at]
        d = &g.nic[t.src]
        if d.up:
            if d.nfree == 0:
                return 0
            k = <uint32_t>slot_ctx(d, 0)
            rc = d.ops.fence(d.dom, <uint32_t>t.off, slot_ctx(d, 0))
            if rc == POST_FULL:
                return 0
            if rc == POST_QUEUED:
                d.nfree -= 1
                slot_take(d, k, r, r.at, 1, 0, 1, <uint32_t>t.off)
                g.fences += 1
        r.at += 1
    return 1

cdef inline int post_recv(group_t* g, req_t* r) noexcept nogil:
    cdef nic_t* d
    cdef uint32_t i
    for i in range(g.nnics):
        if g.nic[i].up:
            break
    else:
        return 1
    d = &g.nic[i]
    if d.ops.post_recv(d.dom, <void*>r.src, r.len, r.lmr.lkey[i], <uint64_t>r) == POST_FULL:
        return 0
    r.part = 1 + i                  # where it is
    return 1

cdef inline int post_redo(group_t* g, req_t* r) noexcept nogil:
    """What a failed NIC left undone goes over the others."""
    cdef redo_t* d
    cdef uint64_t part
    while r.redo != NULL and not r.stopped:
        d = r.redo
        if r.op == OP_WRITE:
            part = 0
            if not post_shard(g, r, <uint32_t>d.at, &part, 1):
                return 0
        elif r.op == OP_PAGES:
            part = d.at + d.n
            if not post_run(g, r, &d.at, part):
                d.n = part - d.at
                return 0
            d.n = part - d.at
            if d.n and not r.stopped:
                continue
        elif r.op == OP_SCATTER:
            part = d.at + d.n
            if not post_targets(g, r, &d.at, part):
                d.n = part - d.at
                return 0
        elif r.op == OP_SEND:
            if not post_send(g, r):
                return 0
        r.redo = d.next
        free(d)
    return 1

cdef inline int post(group_t* g, req_t* r) noexcept nogil:
    """Posts what can be posted of a request now; 1 when nothing is left to post."""
    if r.redo != NULL and not post_redo(g, r):
        return 0
    if r.stopped and (not half_sent(r) or taken_back(g, r)):
        return 1
    if r.op == OP_WRITE:
        if r.rmr.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_write(g, r)
    if r.op == OP_PAGES:
        if r.rmr.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_pages(g, r)
    if r.op == OP_SCATTER:
        return post_targets(g, r, &r.at, r.n)
    if r.op == OP_SEND:
        if r.peer.lost:
            refuse(r, FE_PEER_LOST)
            return 1
        return post_send(g, r)
    if r.op == OP_RECV:
        return post_recv(g, r)
    if r.op == OP_FENCE:
        return post_fences(g, r)
    return 1

cdef inline void close_out(group_t* g, req_t* r) noexcept nogil:
    """Everything is posted: end the request if nothing is outstanding, else let its completions do it."""
    if r.op == OP_RECV:
        return
    if r.state != PENDING:
        if r.left == 0:
            g.zombies -= 1
            retire(g, r)
    elif r.left == 0:
        finish(g, r, DONE if r.status == 0 else FAILED)
    else:
        arm_timer(g, r)

cdef inline void start(group_t* g, req_t* r) noexcept nogil:
    """First look at a request: post its first write at once."""
    if r.extra & X_TIMED:
        g.t_pick = tsc()
    g.submitted += 1
    r.started = 1
    if r.cancelled:
        r.op = OP_NOP if r.op == OP_EXPECT else r.op
        fail(g, r, FE_CANCELLED, 0)
    elif g.closed:
        if r.op == OP_RECV:
            return
        r.op = OP_NOP if r.op == OP_EXPECT else r.op
        fail(g, r, FE_CLOSED, 0)
    elif r.op == OP_EXPECT:
        expect(g, r)
    elif r.op == OP_NOP:
        finish(g, r, DONE)
    elif r.op == OP_SEND and r.peer.sends:
        backlog_add(g, r)
        arm_timer(g, r)
    elif post(g, r):
        if r.extra & X_TIMED:
            g.t_post = tsc()
        close_out(g, r)
    else:
        if r.extra & X_TIMED:
            g.t_post = tsc()
        backlog_add(g, r)
        if r.op != OP_RECV:
            arm_timer(g, r)

cdef inline int backlog_turn(group_t* g) noexcept nogil:
    """Goes on with requests too large for one turn, each a piece, in turn."""
    cdef req_t* r = g.backlog
    cdef req_t* nxt
    cdef uint64_t n = g.nbacklog
    cdef int worked = 0, tried = 0
    cdef uint64_t at, part
    cdef uint32_t shard
    while r != NULL and n > 0 and tried < 16:
        n -= 1
        nxt = r.next
        if r.op == OP_SEND and r.peer.stamp == g.turns + 1:
            r = nxt                     # behind one that found no room: messages to a peer keep their order
            continue
        tried += 1
        at = r.at + r.send.at
        part = r.part
        shard = r.shard
        if post(g, r):
            worked = 1
            backlog_del(g, r)
            close_out(g, r)
        else:
            if r.at + r.send.at != at or r.part != part or r.shard != shard:
                worked = 1
            if r.op == OP_SEND:
                r.peer.stamp = g.turns + 1
            else:                       # others get their turn
                backlog_del(g, r)
                backlog_add(g, r)
        r = nxt
    return worked
