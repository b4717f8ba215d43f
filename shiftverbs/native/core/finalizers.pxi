# SPDX-License-Identifier: BSD-3-Clause
# Where an object ends that nobody names any more. Included by _core.pyx.
#
# The interpreter calls `__del__` wherever the last reference goes, and the collector wherever something is made: in the
# middle of the driver, too, and on a NIC's thread. To close a QP there would mean to change what is being looked at,
# to wait for a NIC, or for a lock whose holder waits for this thread. So a thread that has a lock of ours, or is one
# that failover waits for, closes nothing: what ends there is put aside, alive again, and closed by a thread that does
# nothing else, or by the next control verb, whichever comes first. Everywhere else `__del__` closes, as with pyverbs.
# The same holds for a close() that a program's own finalizer calls there.
#
# Memory (MR, MW) is the exception: it goes wherever that happens, because the bytes behind it may be somebody else's
# next. To end it takes no lock but that of the keys.

cdef extern from * nogil:
    """
    /* How many locks of ours the calling thread has; one more where it never closes anything. */
    static __thread int sv_busy;
    static inline int sv_is_busy(void) { return sv_busy; }
    static inline void sv_busier(int change) { sv_busy += change; }
    static __thread int sv_closes_dropped;
    static inline int sv_set_closes_dropped(int value)
    {
        int before = sv_closes_dropped;
        sv_closes_dropped = value;
        return before;
    }
    """
    int sv_is_busy()
    void sv_busier(int change)
    int sv_set_closes_dropped(int value)

# How long a close waits for what another thread is ending, which may wait for a NIC itself.
cdef double CHILD_S = 65.0

cdef object dropped = _deque()   # [what ends it, the object, the thread that is at it], oldest first
cdef dict being_ended = {}       # those that a thread is at, by id, and objects that end at once
cdef dict left_by = {}           # threads that wait in before_close, and for what stands on which node
cdef object bell = None          # tells the thread that closes what was dropped
cdef list inherited_drops = []   # in a forked child: the parent's, which closes them


def closes_nothing_here() -> None:
    """Whatever ends in the calling thread is put aside, from now on: failover waits for this thread."""
    sv_busier(1)


def is_busy() -> bool:
    """Whether the calling thread has a lock of ours, or closes nothing for another reason."""
    return sv_is_busy() != 0


def when_dropped(call) -> None:
    """call(None) is called whenever an object is put aside, in the middle of anything; None: nobody is."""
    global bell
    bell = call


cdef int put_aside(end, obj) except -1:
    dropped.append([end, obj, 0])
    if bell is not None:
        bell(None)
    return 0


def end_when_free(end, obj) -> None:
    """end(obj) at once, or, where this thread closes nothing, when the queue is closed."""
    if sv_is_busy():
        put_aside(end, obj)
    else:
        end(obj)


def close_dropped() -> None:
    """Close all that was put aside, unless the calling thread is at it, or closes nothing. Raises nothing."""
    end_dropped()


cdef int end_dropped() except -1:
    if not dropped or sv_is_busy() or sv_set_closes_dropped(1):
        return 0
    try:
        while dropped:
            end_entry(dropped.popleft())
    finally:
        sv_set_closes_dropped(0)
    return 0


cdef int end_entry(list entry) except -1:
    """Unless another thread is at it."""
    if entry[2]:
        return 0
    # Nothing up to here makes an object that the collector counts: at any moment it is found in one of the two places.
    entry[2] = PyThread_get_thread_ident()
    being_ended[id(entry)] = entry
    end = entry[0]
    try:
        end(entry[1])
    except BaseException as error:  # as out of a `__del__`
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(<PyObject *>end)
    finally:
        being_ended.pop(id(entry), None)
        entry[1] = None
    return 0


cdef bint stands_on(child, node):
    """Whether the object of node is a parent of child's, or of one of its parents."""
    for parent in () if child is None else child.parents:
        if parent is node or stands_on(parent, node):
            return True
    return False


cdef set leavers(node):
    """The threads that are about to end what stands on it, and pyverbs does not find any more."""
    return {entry[2] for entry in list(being_ended.values()) if stands_on(getattr(entry[1], "_node", None), node)}


cdef bint waits_for_me(set threads):
    """Whether one of these threads waits for what the calling one is ending, or for one that does."""
    me = PyThread_get_thread_ident()
    seen = set()
    while threads:
        thread = threads.pop()
        if thread in seen or thread not in left_by:
            continue
        seen.add(thread)
        found = leavers(left_by[thread])
        if me in found:
            return True
        threads |= found
    return False


cdef int before_close(obj) except -1:
    """Let all that was dropped be closed before the object is: what stands on it must be."""
    cdef int64_t until = 0
    node = getattr(obj, "_node", None)
    me = PyThread_get_thread_ident()
    while True:
        end_dropped()
        if node is None or not node.children:
            return 0
        for entry in list(dropped):  # this thread is at that already, or others bring more
            if stands_on(getattr(entry[1], "_node", None), node):
                end_entry(entry)
        # Whoever is waited for may be the collector, in a thread that ends memory first and then puts the rest aside:
        # so the list is read once more when that is through.
        if not being_ended:
            return 0
        others = leavers(node)
        others.discard(me)
        if not others:
            return 0
        if not until:
            until = now_ns() + <int64_t>(CHILD_S * 1e9)
        before = left_by.get(me)  # below a handler: what the thread waits for otherwise
        left_by[me] = node
        try:
            if now_ns() > until or waits_for_me(others):
                raise PyverbsRDMAError(f"Another thread is closing what stands on this {type(obj).__name__}", EBUSY)
            _sleep(0.001)
            if put_off and me == main_thread:
                signals_off_again(signals_open())
            PyErr_CheckSignals()
        finally:
            if before is None:
                left_by.pop(me, None)
            else:
                left_by[me] = before


cdef int drops_after_fork() except -1:
    """What the parent has put aside it closes itself: here nothing is destroyed, and nothing is waited for."""
    global bell
    bell = None
    me = PyThread_get_thread_ident()
    inherited_drops.extend(dropped)
    dropped.clear()
    for thread in list(left_by):
        if thread != me:
            del left_by[thread]  # its number may be another's next
    for entry in list(being_ended.values()):
        if entry[2] != me:
            inherited_drops.append(being_ended.pop(id(entry)))
    return 0
