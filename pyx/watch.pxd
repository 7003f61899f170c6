"""A watched 64-bit word, shared by the watcher's thread and the callback thread."""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from ring cimport cnode_t

cdef struct watch_t:
    cnode_t node
    uint64_t* word
    uint64_t seen           # value the watcher saw last
    uint64_t told           # value the callback was last given
    uint32_t queued         # the node is with the callback thread
    uint32_t freed
    uint32_t refs           # the watcher's list, the Python object, a queued node
    void (*native)(uint64_t, uint64_t, uint64_t) noexcept nogil    # arg, old, new
    uint64_t native_arg
    void* obj               # PyObject*: the UvmWatcher, borrowed while not freed
