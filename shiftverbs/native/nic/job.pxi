# SPDX-License-Identifier: BSD-3-Clause
# What a NIC's thread was given to do, and how somebody waits for its end. Included by _nic.pyx.
#
# A Future's lock is Python's: the collector may run while a thread has it, and close a QP there, for which the driver's
# lock is needed; and the driver, or the NIC's thread, may be waiting for the Future's. So an application's thread calls
# `wait` and reads `failure`, and leaves the Future's own methods alone. Compiled, so that no signal's handler comes
# between taking the lock here and giving it back.

class Job(Future):
    """A Future that is waited for without its lock.

    failure: what it raised, once it has ended; CancelledError where it never began.
    """

    def __init__(self):
        super().__init__()
        self.failure = None
        self._is_over = False
        self._runs = allocate_lock()
        self._runs.acquire()

    def wait(self, double timeout_s):
        """Wait without the GIL, for a bounded time.

        :param timeout_s: seconds, not negative
        :return: whether it has ended. Raises what signals' handlers raise meanwhile
        """
        if self._is_over:  # others may have the lock for a moment; in a forked child, for good
            return True
        runs = self._runs
        if not runs.acquire(True, timeout_s):
            return self._is_over
        runs.release()
        return True

    def _end(self, failure):
        """Before the callbacks, which may take their time."""
        self.failure = failure
        self._is_over = True
        self._runs.release()

    def set_running_or_notify_cancel(self):
        """As in a Future."""
        begins = super().set_running_or_notify_cancel()
        if not begins:
            self._end(CancelledError())
        return begins

    def set_result(self, result):
        """As in a Future."""
        self._end(None)
        super().set_result(result)

    def set_exception(self, exception):
        """As in a Future."""
        self._end(exception)
        super().set_exception(exception)
