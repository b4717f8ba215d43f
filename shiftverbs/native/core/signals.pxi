# SPDX-License-Identifier: BSD-3-Clause
# Signals wait while the main thread is in the driver. Included by _core.pyx.
#
# The interpreter runs signals' handlers between any two bytecodes of the main thread, and what they raise comes out
# there. In the middle of the driver that would leave half of an action done, and the application would never hear of
# it. So the driver is entered with the C handlers of all signals that have a Python handler replaced by one that only
# notes the number; at the way out they are put back, and told what came.

cdef extern from * nogil:
    """
    #include <signal.h>
    #include <string.h>
    #include <unistd.h>

    #define SV_SIGNALS 65
    static struct { struct sigaction before; volatile sig_atomic_t kept; } sv_signal[SV_SIGNALS];
    static volatile sig_atomic_t sv_signal_came[SV_SIGNALS]; /* the process it came to */
    static volatile sig_atomic_t sv_passing, sv_passed; /* for the moment they come as ever; whether any did */

    static void sv_note_signal(int number)
    {
        static volatile sig_atomic_t inside[SV_SIGNALS];

        if (sv_signal[number].kept && !sv_passing) {
            sv_signal_came[number] = (sig_atomic_t)getpid();
            __sync_synchronize();
            if (sv_signal[number].kept && !sv_passing)
                return;
            /* Too late: nobody need look here again. */
            if (!__sync_lock_test_and_set(&sv_signal_came[number], 0))
                return;
        }
        sv_passed = 1;
        if (sv_signal[number].kept && !__sync_lock_test_and_set(&inside[number], 1)) {
            sv_signal[number].before.sa_handler(number);
            inside[number] = 0;
        } else {
            /* Called by who saved us as the handler before theirs, and may be the one that we would call. */
            PyErr_SetInterruptEx(number);
        }
    }

    /* While handlers run at the way in: those that wait for others, or are broken off by them, work as ever. */
    static void sv_let_pass(void)
    {
        sv_passed = 0;
        __sync_synchronize();
        sv_passing = 1;
    }

    /* The end of that; whether any came meanwhile, or it is a verb of such a handler's that calls. */
    static int sv_note_again(void)
    {
        int was = sv_passing;

        sv_passing = 0;
        __sync_synchronize();
        return was || sv_passed;
    }

    /* Have a signal noted from now on; 1 if it was not before. */
    static int sv_put_off(int number)
    {
        struct sigaction now, ours;

        if (sigaction(number, NULL, &now) != 0)
            return 0;
        if (now.sa_handler == sv_note_signal) {
            if (sv_signal[number].kept)
                return 0;
            sv_signal[number].kept = 1; /* somebody put it back who found it while signals were off */
            return 1;
        }
        if (now.sa_flags & (SA_SIGINFO | SA_RESETHAND) || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)
            return 0; /* not one of the interpreter's */
        ours = now;
        ours.sa_handler = sv_note_signal;
        sv_signal[number].before = now;
        sv_signal[number].kept = 1;
        if (sigaction(number, &ours, NULL) != 0)
            return sv_signal[number].kept = 0;
        return 1;
    }

    /* Put back all handlers that are still ours; how many signals came meanwhile, which were told theirs. */
    static int sv_let_come(void)
    {
        struct sigaction now;
        int number, came = 0;

        for (number = 1; number < SV_SIGNALS; number++) {
            if (!sv_signal[number].kept)
                continue;
            sv_signal[number].kept = 0;
            if (sigaction(number, NULL, &now) == 0 && now.sa_handler == sv_note_signal) {
                now.sa_handler = sv_signal[number].before.sa_handler; /* flags may have changed (siginterrupt) */
                sigaction(number, &now, NULL);
            }
        }
        __sync_synchronize();
        for (number = 1; number < SV_SIGNALS; number++) {
            if (!sv_signal_came[number])
                continue;
            /* Not what came to our parent before a fork. */
            if (__sync_lock_test_and_set(&sv_signal_came[number], 0) == (sig_atomic_t)getpid()) {
                came++;
                sv_signal[number].before.sa_handler(number);
            }
        }
        return came;
    }

    /* Of this thread, and of those that it starts meanwhile: all but what an instruction of theirs raises. */
    static void sv_block_signals(sigset_t *before)
    {
        static const int own[] = {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS};
        sigset_t all;
        size_t i;

        sigfillset(&all);
        for (i = 0; i < sizeof(own) / sizeof(own[0]); i++)
            sigdelset(&all, own[i]);
        pthread_sigmask(SIG_BLOCK, &all, before);
    }

    static void sv_restore_signals(const sigset_t *before)
    {
        pthread_sigmask(SIG_SETMASK, before, NULL);
    }
    """
    ctypedef struct sigset_t:
        pass
    void sv_block_signals(sigset_t *before)
    void sv_restore_signals(const sigset_t *before)
    int sv_put_off(int number)
    int sv_let_come()
    void sv_let_pass()
    int sv_note_again()


cdef unsigned long main_thread = 0
cdef object getsignal = _getsignal  # there at the interpreter's end too, when modules have been emptied
cdef int put_off = 0    # how deep the main thread is in what no signal breaks off
cdef int in_verbs = 0   # of these, how many are verbs, which may wait for long: they open to signals meanwhile
# What the kernel raises for an instruction cannot be put off, KILL and STOP cannot be caught, glibc keeps 32 and 33.
cdef tuple signal_numbers = tuple(
    number for number in range(1, 65)
    if number not in (4, 5, 6, 7, 8, 9, 11, 19, 31, 32, 33)
)


# Objects whose `__del__` is under way, by id; how many of these are in the main thread.
cdef set being_finalized = set()
cdef object is_finalizing = _is_finalizing
cdef object logger = _getLogger("shiftverbs.lifetime")
cdef int ends = 0
cdef list due = []  # what handlers raised where it would have been swallowed: in a `__del__`, or one beside another


cdef int falls_due(list raised) except -1:
    """These are to be raised, but one of each type is enough, as signals that are pending are one.

    Who presses Ctrl-C again while a verb hangs is not to be interrupted again in what he does about the first.
    """
    for error in raised:
        if not any([type(error) is type(other) for other in due]):
            due.append(error)
    return 0


cdef int put_off_all() except -1:
    """Returns how many signals were not noted yet."""
    cdef int taken = 0
    for number in signal_numbers:
        if callable(getsignal(number)):
            taken += sv_put_off(number)
    return taken


cdef int run_handlers() except -1:
    """Put off all signals, and have the handlers of those run that came before; they may raise."""
    cdef bint more = sv_note_again()
    cdef bint again = False
    while put_off_all() or more:  # its handlers may have set others
        if not again:
            sv_let_pass()
        try:
            PyErr_CheckSignals()
        finally:
            more = sv_note_again() and not again
        again = True
    return 0


cdef int signals_off() except -1:
    """Handlers that are due run now, and may raise; until `signals_on` none does. Nothing in any other thread."""
    global put_off
    if PyThread_get_thread_ident() != main_thread:
        return 0
    if put_off:
        put_off += 1
        return 1
    try:
        run_handlers()
        if due and not ends:
            raise due.pop(0)  # here, and not where the interpreter next looks: that is in the middle of us
    except BaseException:
        sv_let_come()
        raise
    put_off = 1
    return 1


cdef int signals_off_quietly(list raised) noexcept:
    """As `signals_off`, but what handlers raise is put into the list. 0 too where they go on raising."""
    for _ in range(8):
        try:
            return signals_off()
        except BaseException as error:
            raised.append(error)
    return 0


cdef int run_handlers_quietly(list raised) noexcept:
    """Those that are due; what they raise is put into the list."""
    for _ in range(8):
        try:
            PyErr_CheckSignals()
            return 0
        except BaseException as error:
            raised.append(error)
    return 0


cdef int signals_shut(int depth, list raised) except -1:
    """After `signals_open`: off as before, whatever happens. Raises the first of `raised`, and of what else is due.

    The others come out where the verb ends: in its middle nothing must.
    """
    global put_off, in_verbs
    if not signals_off_quietly(raised):
        put_off_all()
    put_off = in_verbs = depth
    if raised:
        falls_due([error for error in raised[1:] if type(error) is not type(raised[0])])
        raise raised[0]
    return 0


cdef int signals_off_again(int depth) except -1:
    """After `signals_open`: off as before, whatever happens. Handlers that are due run now, and may raise."""
    return signals_shut(depth, []) if depth else 0


cdef int signals_open() except -1:
    """Have handlers run until `signals_off_again`; those due do now, and may raise: then they are off as before.

    Returns how deep the thread was. 0, and nothing is done, in other threads, and where more than verbs put them off.
    """
    global put_off, in_verbs
    cdef int depth = put_off
    if PyThread_get_thread_ident() != main_thread or not depth or depth != in_verbs:
        return 0
    put_off = in_verbs = 0
    sv_let_come()
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        signals_shut(depth, [error])
    return depth


cdef int signals_on() noexcept:
    """Undo one `signals_off`. Returns whether any came: their handlers run at the interpreter's next look."""
    global put_off
    if not put_off or PyThread_get_thread_ident() != main_thread:
        return 0
    put_off -= 1
    if put_off:
        return 0
    if due and not ends:
        Py_AddPendingCall(raise_due, NULL)
    return sv_let_come() != 0


def without_signals(call, *args, **kwargs):
    """Returns call(*args, **kwargs). Threads that are started in it never take a signal.

    Each thread of ours is: the kernel would choose it for a signal that the application's threads block, as one does
    that waits for it by sigwait, and what the signal does by default would be done.
    """
    cdef sigset_t before
    cdef int off = signals_off()
    sv_block_signals(&before)
    try:
        return call(*args, **kwargs)
    finally:
        sv_restore_signals(&before)
        if off:
            signals_on()


cdef double LOOK_FOR_SIGNALS_S = 0.05
cdef list closes_under_way = []  # of each kind of object, see whole_close


@cython.final
cdef class Unbroken:
    """A lock, and what is done under it, which no signal's handler breaks off.

    lock: with acquire(blocking, timeout) and release(); give_back: what releases it, in place of its release().
    `with` waits for the lock as long as it takes; handlers run while it waits, and may raise: then it is not had.
    quietly: what they raise is raised later, where what is not to be left in the middle has ended.
    shut: none runs; for what nobody has for long, and a handler must not take away from who waits in a verb.
    What ends in a thread that has it is closed later, see finalizers.pxi.
    """

    cdef object _lock
    cdef object _give_back
    cdef bint _quietly
    cdef bint _shut

    def __init__(self, lock, give_back=None, bint quietly=False, bint shut=False):
        self._lock = lock
        self._give_back = give_back
        self._quietly = quietly
        self._shut = shut

    def __enter__(self):
        self.enter_within(-1)

    def enter_within(self, double timeout_s) -> bool:
        """Enter as soon as the lock is free, within this time; negative: for ever. `leave` follows where True."""
        cdef int64_t deadline = now_ns() + <int64_t>(timeout_s * 1e9)
        cdef double left
        cdef list raised = []
        while True:
            left = LOOK_FOR_SIGNALS_S
            if timeout_s >= 0:
                left = max(0.0, min(left, <double>(deadline - now_ns()) / 1e9))
            if self._quietly:
                signals_off_quietly(raised)
            else:
                signals_off()
            sv_busier(1)
            try:
                if self._lock.acquire(True, left):
                    if raised:
                        raise_later(raised)
                    return True
            except BaseException:
                sv_busier(-1)
                signals_on()
                raise_later(raised)
                raise
            sv_busier(-1)
            signals_on()
            try:
                if not (self._shut and put_off):
                    signals_off_again(signals_open())
                    PyErr_CheckSignals()
            except BaseException as error:
                if not self._quietly:
                    raise
                raised.append(error)
            if timeout_s >= 0 and now_ns() >= deadline:
                raise_later(raised)
                return False

    def __exit__(self, *error):
        self.leave()

    def enter_now(self) -> bool:
        """Enter if the lock is free; then `leave` must follow."""
        signals_off()
        sv_busier(1)
        try:
            if self._lock.acquire(False):
                return True
        except BaseException:
            sv_busier(-1)
            signals_on()
            raise
        sv_busier(-1)
        signals_on()
        return False

    def leave(self) -> None:
        """Undo `__enter__` or `enter_now`."""
        try:
            if self._give_back is None:
                self._lock.release()
            else:
                self._give_back()
        finally:
            sv_busier(-1)
            signals_on()


# ---- verbs ----------------------------------------------------------------------------------------------------------

cdef inline void **pointer_of(object obj, Py_ssize_t offset) noexcept:
    return <void **>(<char *><PyObject *>obj + offset)


# Code of weak references' callbacks, which an object's end runs after its `__del__`: what is raised there is swallowed.
cdef frozenset _callbacks = frozenset({
    _weakref.WeakSet.add.__code__.co_filename, _weakref.WeakValueDictionary.update.__code__.co_filename
})


cdef int raise_due(void *nothing) noexcept:
    """A pending call: raise what is due, where the interpreter looks for signals; not in what no signal breaks off."""
    if put_off or ends or not due:
        return 0  # its end asks again
    try:
        swallows = _getframe().f_code.co_filename in _callbacks
    except Exception:  # no frame
        swallows = False
    if swallows:
        Py_AddPendingCall(raise_due, NULL)
        return 0
    error = due.pop(0)
    if due:
        Py_AddPendingCall(raise_due, NULL)
    PyErr_SetObject(type(error), error)
    return -1


cdef int raise_later(list raised) except -1:
    """What handlers raised where it would be swallowed is raised after that."""
    falls_due(raised)
    if due and not ends:
        Py_AddPendingCall(raise_due, NULL)
    return 0


def raise_where_it_ends(list raised not None):
    """What handlers raised in a verb that had to go on comes out where that ends."""
    raise_later(raised)


def interruptibly(wait, *args):
    """Returns wait(*args), during which signals' handlers run although a verb puts them off. They may raise.

    In the driver or a `__del__` it just calls `wait`. What calls this must bear being called again.
    """
    cdef int depth = signals_open()
    try:
        return wait(*args)
    finally:
        signals_off_again(depth)


def whole(verb):
    """Decorator: a control verb that no signal's handler breaks off; what handlers raise comes out where it ends.

    Where it waits for long, it must do so by `interruptibly`.
    """
    def call(*args, **kwargs):
        global in_verbs
        cdef int off
        end_dropped()
        off = signals_off()
        in_verbs += off
        try:
            return verb(*args, **kwargs)
        finally:
            if off:
                in_verbs -= 1
                signals_on()
            end_dropped()
    return _wraps(verb)(call)


cdef int tell_of_leak(object cls) except -1:
    """Log that an object of this class was leaked. It is in its `__dealloc__`, where nothing may raise."""
    cdef list raised = []
    cdef int off
    if is_finalizing():
        return 0
    off = signals_off_quietly(raised)
    try:
        logger.warning(
            "a %s.%s was dropped unclosed and is leaked: it ended without the __del__ of its base class",
            cls.__module__, cls.__qualname__,
        )
    finally:
        if off:
            signals_on()
        raise_later(raised)
    return 0


def whole_close(Py_ssize_t offset, bint anew=False, bint anywhere=False):
    """Decorator: as `whole`, of a `close()` that does nothing where the pointer at `offset` of the object is NULL.

    No bytecode runs then: a handler's exception would be swallowed, being in a `__dealloc__`. Nor is anything destroyed
    where the object's attributes are gone already, as our `__del__` did not run: with what stands on the resource still
    there it cannot be, and is leaked.

    anew: it bears being called again while it waits. Another is not: pyverbs would destroy what is destroyed already.
    Called by a signal's handler meanwhile it does nothing (what waits goes on after it), or raises EBUSY where it is
    part of a parent's close; called by another thread it returns when that one has.
    anywhere: it may be closed by a thread that has a lock of ours. Others are put aside there, see finalizers.pxi.
    """
    cdef dict under_way = {}  # the objects that are being closed, by id: the thread that does
    closes_under_way.append(under_way)

    def decorate(verb):
        def close(self, *args, **kwargs):
            global in_verbs
            cdef void **pointer = pointer_of(self, offset)
            cdef int off
            if pointer[0] == NULL:
                return None
            if PyObject_GC_IsFinalized(<PyObject *>self) and id(self) not in being_finalized and self._node is None:
                pointer[0] = NULL
                tell_of_leak(type(self))
                return None
            if not sv_is_busy():
                before_close(self)
            elif not anywhere:
                put_aside(close_quietly, self)
                return None
            address = id(self)
            me = PyThread_get_thread_ident()
            while not anew:
                closer = under_way.get(address)
                if closer is None:
                    break
                if closer == me:
                    if put_off and me == main_thread:
                        raise PyverbsRDMAError(f"{type(self).__name__} is being closed below a handler", EBUSY)
                    return None
                _sleep(0.001)
                if put_off and me == main_thread:
                    signals_off_again(signals_open())
                PyErr_CheckSignals()
            if pointer[0] == NULL:
                return None
            off = signals_off()
            in_verbs += off
            try:
                if not anew and (under_way.setdefault(address, me) != me or pointer[0] == NULL):
                    return close(self, *args, **kwargs)
                node = getattr(self, "_node", None)
                if node is not None:
                    node.close_left()
                try:
                    return verb(self, *args, **kwargs)
                except BaseException:
                    if node is not None and pointer[0] != NULL:
                        node.leave(self)
                    raise
            finally:
                if under_way.get(address) == me:
                    del under_way[address]
                if off:
                    in_verbs -= 1
                    signals_on()

        def close_quietly(self):
            end_quietly(close, self)

        close_quietly = _wraps(verb)(close_quietly)
        return _wraps(verb)(close)
    return decorate


cdef int end_quietly(verb, self) except -1:
    """verb(self), which no signal's handler breaks off, and where none raises."""
    global ends
    cdef list raised = []
    cdef int off = signals_off_quietly(raised)
    cdef int main = PyThread_get_thread_ident() == main_thread
    cdef list entry = [verb, self, PyThread_get_thread_ident()]
    address = id(self)
    being_finalized.add(address)
    being_ended[id(entry)] = entry
    ends += main
    try:
        verb(self)
    finally:
        being_ended.pop(id(entry), None)
        being_finalized.discard(address)
        ends -= main
        if off:
            signals_on()
            if not put_off:
                run_handlers_quietly(raised)
        raise_later(raised)
    return 0


def whole_end(verb):
    """Decorator: a `__del__`, which no signal's handler breaks off, and where none raises.

    A thread that has a lock of ours puts the object aside instead, see finalizers.pxi.
    """
    return ending(verb, False)


def whole_end_anywhere(verb):
    """As `whole_end`, of an object that ends at once wherever that is: memory."""
    return ending(verb, True)


cdef object ending(verb, bint anywhere):
    def end(self):
        end_quietly(verb, self)

    def __del__(self):
        if sv_is_busy() and not anywhere:
            put_aside(end, self)
        else:
            end(self)

    end = _wraps(verb)(end)
    __del__ = _wraps(verb)(__del__)
    __del__.our_end = __del__
    __del__.anywhere = anywhere
    return __del__


def and_end(theirs, end):
    """Returns a `__del__` that runs `theirs`, a program's own, and then `end`, of `whole_end`, whatever comes of it.

    Handlers run in theirs as ever; no bytecode is between the two. An object that theirs keeps goes on living: the
    interpreter will not call its `__del__` again. Both are put off together.
    """
    cdef bint anywhere = end.anywhere

    def both(self):
        cdef Py_ssize_t references = Py_REFCNT(<PyObject *>self)
        cdef bint kept = False
        try:
            theirs(self)
            kept = Py_REFCNT(<PyObject *>self) > references
        finally:
            if not kept:
                end(self)

    def __del__(self):
        if sv_is_busy() and not anywhere:
            put_aside(both, self)
        else:
            both(self)

    both = _wraps(theirs)(both)
    __del__ = _wraps(theirs)(__del__)
    __del__.our_end = end
    __del__.anywhere = anywhere
    return __del__


cdef int signals_after_fork() except -1:
    """In a forked child: what other threads do goes on in the parent only."""
    global main_thread, put_off, in_verbs, ends
    me = PyThread_get_thread_ident()
    for under_way in closes_under_way:
        for address, thread in list(under_way.items()):
            if thread != me:
                del under_way[address]
    drops_after_fork()
    if main_thread != me:
        main_thread = me
        put_off = in_verbs = ends = 0
        due.clear()
        being_finalized.clear()
        sv_note_again()
        sv_let_come()
    return 0
