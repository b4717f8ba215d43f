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
    static struct { struct sigaction before; int kept; } sv_signal[SV_SIGNALS];
    static volatile sig_atomic_t sv_signal_came[SV_SIGNALS]; /* the process it came to */

    static void sv_note_signal(int number)
    {
        sv_signal_came[number] = (sig_atomic_t)getpid();
    }

    /* Have a signal noted from now on; 1 if it was not before. */
    static int sv_put_off(int number)
    {
        struct sigaction now, ours;

        if (sigaction(number, NULL, &now) != 0 || now.sa_handler == sv_note_signal)
            return 0;
        if (now.sa_flags & (SA_SIGINFO | SA_RESETHAND) || now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)
            return 0; /* not one of the interpreter's */
        ours = now;
        ours.sa_handler = sv_note_signal;
        if (sigaction(number, &ours, NULL) != 0)
            return 0;
        sv_signal[number].before = now;
        sv_signal[number].kept = 1;
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
            if (sigaction(number, NULL, &now) == 0 && now.sa_handler == sv_note_signal)
                sigaction(number, &sv_signal[number].before, NULL);
        }
        for (number = 1; number < SV_SIGNALS; number++) {
            if (!sv_signal_came[number])
                continue;
            if (sv_signal_came[number] == (sig_atomic_t)getpid()) { /* not what came to our parent before a fork */
                came++;
                sv_signal_came[number] = 0;
                sv_signal[number].before.sa_handler(number);
            }
            sv_signal_came[number] = 0;
        }
        return came;
    }
    """
    int sv_put_off(int number)
    int sv_let_come()

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil


cdef unsigned long main_thread = 0
cdef int put_off = 0    # how deep the main thread is in what no signal breaks off
# What the kernel raises for an instruction cannot be put off, KILL and STOP cannot be caught, glibc keeps 32 and 33.
cdef tuple signal_numbers = tuple(
    number for number in range(1, 65)
    if number not in (4, 5, 6, 7, 8, 9, 11, 19, 31, 32, 33)
)


cdef int signals_off() except -1:
    """Handlers that are due run now, and may raise; until `signals_on` none does. Nothing in any other thread."""
    global put_off
    cdef int taken
    if PyThread_get_thread_ident() != main_thread:
        return 0
    if put_off:
        put_off += 1
        return 1
    try:
        while True:
            taken = 0
            for number in signal_numbers:
                if callable(_getsignal(number)):
                    taken += sv_put_off(number)
            if not taken:
                break
            # What came before: and its handlers may have set others.
            PyErr_CheckSignals()
    except BaseException:
        sv_let_come()
        raise
    put_off = 1
    return 1


cdef int signals_on() noexcept:
    """Undo one `signals_off`. Returns whether any came: their handlers run at the interpreter's next look."""
    global put_off
    if not put_off or PyThread_get_thread_ident() != main_thread:
        return 0
    put_off -= 1
    return 0 if put_off else sv_let_come() != 0


def is_main_thread() -> bool:
    """Whether the interpreter runs signals' handlers in the calling thread."""
    return PyThread_get_thread_ident() == main_thread


cdef double LOOK_FOR_SIGNALS_S = 0.05


@cython.final
cdef class Unbroken:
    """A lock, and what is done under it, which no signal's handler breaks off.

    lock: with acquire(blocking, timeout) and release(); give_back: what releases it, in place of its release().
    `with` waits for the lock as long as it takes; handlers run while it waits, and may raise: then it is not had.
    """

    cdef object _lock
    cdef object _give_back

    def __init__(self, lock, give_back=None):
        self._lock = lock
        self._give_back = give_back

    def __enter__(self):
        self.enter_within(-1)

    def enter_within(self, double timeout_s) -> bool:
        """Enter as soon as the lock is free, which may take so long; negative: for ever. `leave` is to follow if so."""
        cdef int64_t deadline = now_ns() + <int64_t>(timeout_s * 1e9)
        cdef double left
        while True:
            left = LOOK_FOR_SIGNALS_S
            if timeout_s >= 0:
                left = max(0.0, min(left, <double>(deadline - now_ns()) / 1e9))
            signals_off()
            try:
                if self._lock.acquire(True, left):
                    return True
            except BaseException:
                signals_on()
                raise
            signals_on()
            PyErr_CheckSignals()
            if timeout_s >= 0 and now_ns() >= deadline:
                return False

    def __exit__(self, *error):
        self.leave()

    def enter_now(self) -> bool:
        """Enter if the lock is free; `leave` is to follow."""
        signals_off()
        try:
            if self._lock.acquire(False):
                return True
        except BaseException:
            signals_on()
            raise
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
            signals_on()
