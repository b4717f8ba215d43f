# SPDX-License-Identifier: BSD-3-Clause
# What a NIC's thread was given to do, and how somebody waits for its end. Included by _nic.pyx.
#
# No Future: its lock is Python's. The collector may run while a thread has that, and close a QP there, for which the
# driver's lock is needed; and the driver, or the NIC's thread, may be waiting for the Future's. Here the GIL is the
# lock: all is compiled, so that no other thread and no signal's handler comes between two lines, but for callbacks.

cdef enum:
    JOB_QUEUED
    JOB_BEGUN
    JOB_ENDED
    JOB_CANCELLED


cdef class Job:
    """What `NicWorker.call` returns: the end of a job, to be waited for, or to be told of.

    failure: what it raised, once it has ended; CancelledError where it never began.
    """

    cdef readonly object failure
    cdef object value
    cdef object runs
    cdef list callbacks
    cdef int state

    def __cinit__(self):
        self.callbacks = []
        self.runs = allocate_lock()
        self.runs.acquire()

    def wait(self, double timeout_s):
        """Wait without the GIL, for a bounded time.

        :param timeout_s: seconds, not negative
        :return: whether it has ended. Raises what signals' handlers raise meanwhile
        """
        # Others may have the lock for a moment, until they get the GIL; in a forked child, for good.
        if not self.done():
            runs = self.runs
            if runs.acquire(True, timeout_s):
                runs.release()
        return self.done()

    def result(self, double timeout_s):
        """What it returned; what it raised is raised.

        :param timeout_s: seconds to wait, not negative
        :raises TimeoutError: it has not ended
        """
        if not self.wait(timeout_s):
            raise TimeoutError("the job has not ended")
        if self.failure is not None:
            raise self.failure
        return self.value

    cpdef bint done(self):
        """Whether it has ended, or was cancelled."""
        return self.state >= JOB_ENDED

    def cancelled(self):
        """Whether it never began."""
        return self.state == JOB_CANCELLED

    def cancel(self):
        """Have it never begin: it ends now. Returns whether that is so."""
        if not cancel_job(self):
            return self.state == JOB_CANCELLED
        self._tell()
        return True

    def begin(self):
        """For who carries it out, first: whether to do so."""
        if self.state != JOB_QUEUED:
            return False
        self.state = JOB_BEGUN
        return True

    def end(self, value=None, failure=None):
        """For who has carried it out: what it returned, or raised. Callbacks run here."""
        end_job(self, JOB_ENDED, value, failure)
        self._tell()

    def add_done_callback(self, call):
        """Have call(job) run once it has ended: in the NIC's thread, or where it is cancelled; here if it has. What it
        raises is logged."""
        self.callbacks.append(call)
        if self.done():
            self._tell()

    cdef int _tell(self) except -1:
        """Run the callbacks. What is raised besides, by signals' handlers, comes once all have been called."""
        interrupt = None
        while self.callbacks:
            call = self.callbacks.pop(0)
            try:
                call(self)
            except Exception:
                logger.exception("a callback of a job on a NIC's thread failed")
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return 0


cdef int end_job(Job job, int state, value, failure) except -1:
    """Whoever waits goes on, before the callbacks, which may take their time."""
    job.value = value
    job.failure = failure
    job.state = state
    job.runs.release()
    return 0


cdef bint cancel_job(Job job) except -1:
    """As `cancel`, but without the callbacks. Runs nothing of Python's."""
    if job.state != JOB_QUEUED:
        return False
    failure = CancelledError()
    if job.state != JOB_QUEUED:  # the collector has run, and cancelled it
        return False
    end_job(job, JOB_CANCELLED, None, failure)
    return True


cdef int cancel_jobs(list jobs) except -1:
    """Cancel jobs, all of them before the first callback. Raises, at the end, what signals' handlers raise there."""
    cdef Job job
    interrupt = None
    cancelled = [job for job in jobs if cancel_job(job)]
    for job in cancelled:
        try:
            job._tell()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return 0
