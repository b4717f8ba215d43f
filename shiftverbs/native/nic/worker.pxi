# SPDX-License-Identifier: BSD-3-Clause
# The command thread of one NIC. Included by _nic.pyx.
#
# Ownership
# - WorkerState is counted: one reference by the NicWorker, one by its thread. The last one frees it, on
#   either side, without Python.
# - A Command belongs to the list it is in: `head` of its lane (waiting), `current` (being carried out), `done_head`
#   (results). The thread frees a Command only after a Python job; everything else is freed by Python callers
#   with the GIL.
# - A Command's `tag` is a counted reference to a Python object: whatever the caller gave, or the job. It is
#   dropped only with the GIL: by results(), by the job's own thread, by stop() and by __dealloc__. Who dies
#   with the process or in a forked child keeps them.
# - The QP of a command must outlive it: drain(qp) or pending(qp) before destroying it, or queue that too.
#
# stop(): commands that have not begun get ECANCELED as their result, jobs that have not begun are cancelled,
#     the one under way is waited for until the timeout. If it hangs, the thread is left with the state it
#     owns, ends by itself once the command returns, and can be waited for again by another stop().

cdef enum:
    # Longest time without looking for signals (Ctrl-C) in waits of Python threads.
    SIGNAL_CHECK_NS = 100000000
    # How long after its last command, and how often, the thread looks by itself for what can wait a moment: a program
    # makes its QPs one after the other, and waking a thread that sleeps would be most of what a verb costs.
    LINGER_NS = 1000000
    LINGER_STEP_NS = 50000
    # Longest wait with the GIL: where many threads compute in Python, it takes several times that to have it back.
    WITH_GIL_NS = 1000000
    # What has not begun: transitions of QPs and the ends of MRs, the ends of QPs, all else.
    LANES = 3
    # So many commands at most go before one that came earlier.
    MOST_PASSED = 32


cdef struct Command:
    Command *next
    void *tag
    uint64_t number            # in the order in which they came
    int is_job
    int kind                   # of what a destroy() takes away, else 0
    void *target               # ibv_qp of a submit(), whatever a destroy() takes away
    ModifyStep *steps
    int n_steps
    int err
    int done_steps
    int64_t elapsed_ns


cdef struct WorkerState:
    pthread_mutex_t lock
    pthread_cond_t work        # a command came, or stopping was set
    pthread_cond_t progress    # a command ended, or the thread did
    int refs                   # atomic
    int pid
    Command *head[LANES]       # FIFOs of what has not begun
    Command *tail[LANES]
    uint64_t came              # commands, all in all
    int passed                 # since the earliest of those that have not begun was
    Command *current
    Command *done_head         # FIFO of results
    Command *done_tail
    int stopping
    int lingering              # the thread looks by itself soon
    int exited
    int in_python
    uintptr_t thread_id
    int64_t started_ns         # of the current command; 0 when idle
    uint64_t completed         # commands carried out, cancelled ones not counted
    WakePoint *wake
    int *attention
    WorkerState *next          # registry, under registry_lock
    WorkerState *previous


cdef void append(Command **head, Command **tail, Command *command) noexcept nogil:
    """Put a command at the end of a list."""
    command.next = NULL
    if tail[0] == NULL:
        head[0] = command
    else:
        tail[0].next = command
    tail[0] = command


cdef int lane_of(const Command *command) noexcept nogil:
    """Failover waits for transitions, applications for the ends of memory behind them; nobody for the rest."""
    if command.is_job:
        return 2
    if command.kind in (0, KIND_MR):
        return 0
    return 1 if command.kind == KIND_QP else 2


cdef void put(WorkerState *worker, Command *command) noexcept nogil:
    """Put a command behind those of its lane, under the lock."""
    cdef int lane = lane_of(command)
    command.number = worker.came
    worker.came += 1
    append(&worker.head[lane], &worker.tail[lane], command)


cdef Command *pop(Command **head, Command **tail) noexcept nogil:
    """Take the first command of a list; NULL if empty."""
    cdef Command *command = head[0]
    if command != NULL:
        head[0] = command.next
        if head[0] == NULL:
            tail[0] = NULL
        command.next = NULL
    return command


cdef Command *take(WorkerState *worker) noexcept nogil:
    """Take what is to be carried out next, under the lock: of the first lane, or what has waited longest, which may
    stand on what came before it, but on nothing that came later. NULL if there is nothing."""
    cdef int lane
    cdef int first = -1
    cdef int oldest = -1
    for lane in range(LANES):
        if worker.head[lane] == NULL:
            continue
        if first < 0:
            first = oldest = lane
        elif worker.head[lane].number < worker.head[oldest].number:
            oldest = lane
    if first < 0:
        return NULL
    if worker.passed >= MOST_PASSED:
        first = oldest
    worker.passed = 0 if first == oldest else worker.passed + 1
    return pop(&worker.head[first], &worker.tail[first])


cdef bint is_idle(const WorkerState *worker) noexcept nogil:
    """Whether nothing waits to be begun, under the lock."""
    return worker.head[0] == NULL and worker.head[1] == NULL and worker.head[2] == NULL


cdef void command_free(Command *command) noexcept nogil:
    """Free a command whose tag has been taken."""
    free(command.steps)
    free(command)


cdef void worker_drop(WorkerState *worker) noexcept nogil:
    """Drop a reference; the last one frees. By then the lists hold nothing that needs Python."""
    global workers
    cdef Command *command
    if sv_add(&worker.refs, -1) != 0:
        return
    pthread_mutex_lock(&registry_lock)
    if worker.previous != NULL:
        worker.previous.next = worker.next
    else:
        workers = worker.next
    if worker.next != NULL:
        worker.next.previous = worker.previous
    pthread_mutex_unlock(&registry_lock)
    while True:
        command = pop(&worker.done_head, &worker.done_tail)
        if command == NULL:
            break
        command_free(command)
    if worker.wake != NULL:
        wake_drop(worker.wake)
    pthread_mutex_destroy(&worker.lock)
    pthread_cond_destroy(&worker.work)
    pthread_cond_destroy(&worker.progress)
    free(worker)


cdef void worker_announce(WorkerState *worker) noexcept nogil:
    """A result is there: raise attention and wake the control thread."""
    if worker.attention != NULL:
        sv_store(worker.attention, 1)
    if worker.wake != NULL:
        wake_raise(worker.wake)


cdef void run_job(void *job) noexcept with gil:
    """Carry out a Python job and drop it. Everything it raises goes into its Job, or the log if it has none."""
    cdef object owned = <object>job
    Py_DECREF(owned)
    ends, fn, args, kwargs = owned
    if ends is not None and not ends.begin():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        if ends is None:
            logger.exception("a job on a NIC's thread failed")
        else:
            ends.end(None, error)
        # Error -> traceback -> this frame -> job -> error would be a cycle.
        ends = None
    else:
        if ends is not None:
            ends.end(result)


cdef enum:
    KIND_PD = 1
    KIND_MR
    KIND_CHANNEL
    KIND_CQ
    KIND_QP

_KINDS = {
    "PD": KIND_PD, "MR": KIND_MR, "completion channel": KIND_CHANNEL, "CQ": KIND_CQ, "QP": KIND_QP,
}


cdef int destroy_object(int kind, void *target) noexcept nogil:
    """The verb that takes away an object of this kind; errno."""
    cdef int err = EINVAL
    if kind == KIND_PD:
        err = ibv_dealloc_pd(<ibv_pd *>target)
    elif kind == KIND_MR:
        err = ibv_dereg_mr(<ibv_mr *>target)
    elif kind == KIND_CHANNEL:
        err = ibv_destroy_comp_channel(<ibv_comp_channel *>target)
    elif kind == KIND_CQ:
        err = ibv_destroy_cq(<ibv_cq *>target)
    elif kind == KIND_QP:
        err = ibv_destroy_qp(<ibv_qp *>target)
    if err < 0:
        err = errno if errno > 0 else EIO
    return err


cdef void wait_for_work(WorkerState *worker, int64_t idle_since) noexcept nogil:
    """Sleep, under the lock, until there is a command or the thread is to stop."""
    cdef int64_t now
    while is_idle(worker) and not worker.stopping:
        now = sv_now_ns()
        if now - idle_since < LINGER_NS:
            worker.lingering = 1
            sv_cond_wait_until(&worker.work, &worker.lock, now + LINGER_STEP_NS)
            worker.lingering = 0
        else:
            pthread_cond_wait(&worker.work, &worker.lock)


cdef void *worker_main(void *argument) noexcept nogil:
    """The thread: takes commands in their order until it is told to stop. Touches Python only for jobs."""
    cdef WorkerState *worker = <WorkerState *>argument
    cdef Command *command
    cdef int64_t start
    cdef int err
    cdef int done
    cdef void *job
    cdef int64_t idle_since = 0
    cdef PyThreadState *state = NULL
    sv_mark_worker_thread()
    if not sv_load(&exiting):
        state = sv_enter_python()
    pthread_mutex_lock(&worker.lock)
    worker.thread_id = sv_thread_id()
    while True:
        wait_for_work(worker, idle_since)
        if worker.stopping:
            break
        command = take(worker)
        worker.current = command
        start = sv_now_ns()
        worker.started_ns = start
        if command.is_job:
            worker.in_python = 1
            job = command.tag
            command.tag = NULL
            pthread_mutex_unlock(&worker.lock)
            run_job(job)
            pthread_mutex_lock(&worker.lock)
            worker.in_python = 0
            worker.current = NULL
            worker.started_ns = 0
            pthread_cond_broadcast(&worker.progress)
            command_free(command)
            idle_since = sv_now_ns()
            continue
        pthread_mutex_unlock(&worker.lock)
        done = 0
        if command.kind:
            err = destroy_object(command.kind, command.target)
        else:
            err = run_steps(<ibv_qp *>command.target, command.steps, command.n_steps, &done)
        pthread_mutex_lock(&worker.lock)
        command.err = err
        command.done_steps = done
        command.elapsed_ns = sv_now_ns() - start
        worker.completed += 1
        worker.current = NULL
        worker.started_ns = 0
        append(&worker.done_head, &worker.done_tail, command)
        pthread_cond_broadcast(&worker.progress)
        pthread_mutex_unlock(&worker.lock)
        worker_announce(worker)
        idle_since = sv_now_ns()
        pthread_mutex_lock(&worker.lock)
    pthread_mutex_unlock(&worker.lock)
    if state != NULL and not sv_load(&exiting):  # which goes as the process does, else
        sv_leave_python(state)
    pthread_mutex_lock(&worker.lock)
    worker.exited = 1
    pthread_cond_broadcast(&worker.progress)
    pthread_mutex_unlock(&worker.lock)
    worker_drop(worker)
    return NULL


cdef int count_pending(WorkerState *worker, void *target) noexcept nogil:
    """Commands not finished, under the lock: of one QP or other object, or everything (jobs too) if NULL."""
    cdef int n = 0
    cdef int lane
    cdef Command *command
    for lane in range(LANES):
        command = worker.head[lane]
        while command != NULL:
            if target == NULL or command.target == target:
                n += 1
            command = command.next
    if worker.current != NULL and (target == NULL or worker.current.target == target):
        n += 1
    return n


cdef bint needs_python(WorkerState *worker, void *target) noexcept nogil:
    """Whether a Python job is under way, or comes before the last command of a QP or other object (NULL: of all), under
    the lock."""
    cdef Command *command
    cdef int lane
    cdef bint job = worker.in_python
    cdef bint before = job
    for lane in range(LANES):
        command = worker.head[lane]
        while command != NULL:
            job = job or command.is_job
            if target == NULL or command.target == target:
                before = job
            command = command.next
    return before


cdef class NicWorker:
    """One C thread per NIC that carries out commands in order, without the GIL between them.

    Transitions of QPs and the ends of MRs go before all else that has not begun, the ends of QPs before the rest: jobs
    are set-up, and of the ends of CQs, channels, and PDs nobody waits for one. So a fence waits for what is under way,
    for other transitions and memory. But what came first goes next when 32 others have gone before it, set-up too.

    A dying NIC may block a command for a minute: nobody else waits for it. Results are announced by setting
    the attention flag and waking the control thread, from C.

    :param name: for people and debuggers (the thread's name, cut to 15 bytes)
    :param attention_address: address of a C int to be set to 1 with each result; 0 = none. It must outlive
        the thread
    :param waiter: Waiter to be woken with each result (it sets its own attention flag too), or None
    :raises OSError: no thread could be started
    """

    cdef WorkerState *worker
    cdef readonly str name
    cdef object __weakref__

    def __cinit__(self, str name not None, uintptr_t attention_address=0, Waiter waiter=None):
        global workers
        cdef bytes c_name = name.encode()
        cdef WorkerState *worker
        cdef int err
        self.worker = NULL
        self.name = name
        if waiter is not None:
            must_be_ours(waiter.wake_point.pid, "this Waiter")
        worker = <WorkerState *>calloc(1, sizeof(WorkerState))
        if worker == NULL:
            raise MemoryError()
        worker.pid = getpid()
        worker.attention = <int *>attention_address
        worker.refs = 2
        worker.stopping = sv_load(&exiting)  # the exit hook will not come by any more
        pthread_mutex_init(&worker.lock, NULL)
        sv_cond_init(&worker.work)
        sv_cond_init(&worker.progress)
        if waiter is not None:
            worker.wake = waiter.wake_point
            wake_hold(worker.wake)
        pthread_mutex_lock(&registry_lock)
        worker.next = workers
        if workers != NULL:
            workers.previous = worker
        workers = worker
        pthread_mutex_unlock(&registry_lock)
        err = sv_start_thread(worker_main, worker, c_name)
        if err:
            worker_drop(worker)
            worker_drop(worker)
            raise verb_error("pthread_create", err)
        self.worker = worker

    def __dealloc__(self):
        # Do not wait: the command under way ends by itself, and those that have not begun never run.
        cdef WorkerState *worker = self.worker
        cdef void *tag = NULL
        if worker == NULL or worker.pid != getpid():
            return
        self.worker = NULL
        cancelled = self._halt(worker)
        pthread_mutex_lock(&worker.lock)
        if worker.current != NULL:
            tag = worker.current.tag
            worker.current.tag = NULL
        pthread_mutex_unlock(&worker.lock)
        if tag != NULL:
            Py_DECREF(<object>tag)
        self._take_results(worker)
        try:
            cancel_jobs(cancelled)
        finally:
            worker_drop(worker)

    cdef int _check(self) except -1:
        """Raise when used in a forked child."""
        return must_be_ours(self.worker.pid, f"NicWorker {self.name}")

    cdef list _halt(self, WorkerState *worker):
        """Tell the thread to stop and cancel what has not begun. Returns the futures of cancelled jobs."""
        cdef Command *waiting = NULL
        cdef Command *last = NULL
        cdef Command *command
        cdef list futures = []
        cdef int cancelled = 0
        cdef int lane
        pthread_mutex_lock(&worker.lock)
        worker.stopping = 1
        for lane in range(LANES):
            while worker.head[lane] != NULL:
                append(&waiting, &last, pop(&worker.head[lane], &worker.tail[lane]))
        pthread_cond_broadcast(&worker.work)
        pthread_mutex_unlock(&worker.lock)
        while waiting != NULL:
            command = waiting
            waiting = command.next
            if command.is_job:
                future = (<object>command.tag)[0]
                if future is not None:
                    futures.append(future)
                Py_DECREF(<object>command.tag)
                command_free(command)
            else:
                command.err = ECANCELED
                cancelled = 1
                pthread_mutex_lock(&worker.lock)
                append(&worker.done_head, &worker.done_tail, command)
                pthread_mutex_unlock(&worker.lock)
        if cancelled:
            worker_announce(worker)
        return futures

    cdef list _take_results(self, WorkerState *worker):
        """Empty the list of results."""
        cdef Command *command
        cdef list results = []
        pthread_mutex_lock(&worker.lock)
        command = worker.done_head
        worker.done_head = worker.done_tail = NULL
        pthread_mutex_unlock(&worker.lock)
        cdef Command *following
        while command != NULL:
            following = command.next
            if command.tag != NULL:
                tag = <object>command.tag
                Py_DECREF(tag)
                results.append((tag, command.err, command.done_steps, command.elapsed_ns))
            command_free(command)
            command = following
        return results

    cdef int _queue(self, Command *command, bint urgent) noexcept:
        """Hand a command to the thread; 0 if that has been stopped (the command stays the caller's).

        urgent: begun at once; otherwise within LINGER_STEP_NS, which is cheaper.
        """
        cdef WorkerState *worker = self.worker
        cdef int accepted
        pthread_mutex_lock(&worker.lock)
        accepted = not worker.stopping
        if accepted:
            put(worker, command)
            if urgent or not worker.lingering:
                pthread_cond_signal(&worker.work)
        pthread_mutex_unlock(&worker.lock)
        return accepted

    def submit(self, tag, uintptr_t qp, ModifySteps steps not None):
        """Queue transitions of a QP; they are carried out in order until one fails. Never blocks.

        They go before the ends of QPs, set-up, and the ends of what was set up.

        After stop() the result is ECANCELED at once.

        :param tag: any object; comes back in the result
        :param qp: ibv_qp pointer; the QP must live until the result is there
        :param steps: copied
        """
        cdef Command *command
        self._check()
        need(qp, "qp")
        command = <Command *>calloc(1, sizeof(Command))
        if command == NULL:
            raise MemoryError()
        try:
            command.steps = steps_copy(steps, &command.n_steps)
        except MemoryError:
            free(command)
            raise
        command.target = <void *>qp
        Py_INCREF(tag)
        command.tag = <void *>tag
        if not self._queue(command, True):
            self._finish_cancelled(command)

    def destroy(self, tag, str kind not None, uintptr_t pointer):
        """Queue the end of an object. Never blocks; needs no GIL to be done.

        An MR's goes as transitions do, a QP's behind those and before set-up, others behind all there is.

        After stop() the result is ECANCELED at once, and the object stays.

        :param tag: any object; comes back in the result
        :param kind: "PD", "MR", "completion channel", "CQ" or "QP"
        :param pointer: of the object, which is the worker's from now on; drain(pointer) waits until it is gone
        """
        cdef Command *command
        cdef int code = _KINDS[kind]
        self._check()
        need(pointer, "pointer")
        command = <Command *>calloc(1, sizeof(Command))
        if command == NULL:
            raise MemoryError()
        command.kind = code
        command.target = <void *>pointer
        Py_INCREF(tag)
        command.tag = <void *>tag
        # Somebody waits for the end of an MR: the application may unmap the memory next.
        if not self._queue(command, code == KIND_MR):
            self._finish_cancelled(command)

    cdef int _finish_cancelled(self, Command *command) except -1:
        """Make a command that never began a result."""
        cdef WorkerState *worker = self.worker
        command.err = ECANCELED
        pthread_mutex_lock(&worker.lock)
        append(&worker.done_head, &worker.done_tail, command)
        pthread_mutex_unlock(&worker.lock)
        worker_announce(worker)
        return 0

    def call(self, fn, *args, **kwargs):
        """Queue a Python job, behind all there is; for set-up, where waiting for the GIL is no
        matter.

        The job runs in the NIC's thread with the GIL, and should give it up in its verbs (those of this
        module do).

        :return: Job, with what fn returns or raises; cancelled by stop(). Its callbacks run in the NIC's thread
        """
        self._check()
        job = Job()
        if not self._queue_job((job, fn, args, kwargs), True):
            cancel_jobs([job])
        return job

    def post(self, fn, *args):
        """Queue a Python job as `call` does, but one whose end nobody waits for; cheaper. Exceptions are logged.

        :return: whether it was queued; False after stop(). stop() drops what has not begun
        """
        self._check()
        return self._queue_job((None, fn, args, {}), False) != 0

    cdef int _queue_job(self, tuple job, bint urgent) except -1:
        """Hand a job to the thread; 0 if that has been stopped."""
        cdef Command *command = <Command *>calloc(1, sizeof(Command))
        if command == NULL:
            raise MemoryError()
        command.is_job = 1
        Py_INCREF(job)
        command.tag = <void *>job
        if not self._queue(command, urgent):
            Py_DECREF(job)
            command_free(command)
            return 0
        return 1

    def results(self):
        """Take what has finished, in order.

        :return: list of (tag, errno, step, elapsed_ns): errno 0 = all done, ECANCELED = never begun; step =
            how many transitions succeeded, so also the index of the one that failed; elapsed_ns = time
            carried out, without the time in the queue. Empty in a forked child
        """
        if self.worker.pid != getpid():
            return []
        return self._take_results(self.worker)

    def pending(self, uintptr_t qp=0):
        """How many commands of a QP have not finished; for 0 of all QPs, and jobs too. 0 in a forked
        child."""
        cdef int n
        if self.worker.pid != getpid():
            return 0
        pthread_mutex_lock(&self.worker.lock)
        n = count_pending(self.worker, <void *>qp)
        pthread_mutex_unlock(&self.worker.lock)
        return n

    def cancel(self, uintptr_t qp):
        """Cancel the commands of a QP that have not begun; their results are ECANCELED.

        :return: how many were cancelled. One under way is not: see drain
        """
        cdef WorkerState *worker = self.worker
        cdef Command *command
        cdef Command *following
        cdef int cancelled = 0
        self._check()
        need(qp, "qp")
        pthread_mutex_lock(&worker.lock)
        command = worker.head[0]
        worker.head[0] = worker.tail[0] = NULL
        while command != NULL:
            following = command.next
            if command.target == <void *>qp and not command.kind:
                command.err = ECANCELED
                append(&worker.done_head, &worker.done_tail, command)
                cancelled += 1
            else:
                append(&worker.head[0], &worker.tail[0], command)
            command = following
        pthread_cond_broadcast(&worker.progress)
        pthread_mutex_unlock(&worker.lock)
        if cancelled:
            worker_announce(worker)
        return cancelled

    cdef int _wait(self, void *target, bint for_exit, int64_t deadline) except -1:
        """Wait until nothing of target is pending, or the thread has ended; 1 if so, 0 at the deadline. Without the
        GIL, but for the first moment, in which most waits end."""
        cdef WorkerState *worker = self.worker
        cdef int64_t until = min(deadline, sv_now_ns() + WITH_GIL_NS)
        cdef int there = 0
        cdef bint hangs
        # Who gives up the GIL may wait long to have it back.
        pthread_mutex_lock(&worker.lock)
        if worker.lingering:
            pthread_cond_signal(&worker.work)
        while True:
            there = worker.exited if for_exit else count_pending(worker, target) == 0
            # What has taken longer than that already will hardly end in the next moment.
            hangs = worker.started_ns and until - worker.started_ns > 2 * WITH_GIL_NS
            if there or for_exit or hangs or needs_python(worker, target):
                break
            if sv_cond_wait_until(&worker.progress, &worker.lock, until) != 0:
                break
        pthread_mutex_unlock(&worker.lock)
        if there or sv_now_ns() >= deadline:
            return there
        while True:
            with nogil:
                until = min(deadline, sv_now_ns() + SIGNAL_CHECK_NS)
                pthread_mutex_lock(&worker.lock)
                while True:
                    there = worker.exited if for_exit else count_pending(worker, target) == 0
                    if there or sv_cond_wait_until(&worker.progress, &worker.lock, until) != 0:
                        break
                pthread_mutex_unlock(&worker.lock)
                back_to_python()
            if there or sv_now_ns() >= deadline:
                return there
            PyErr_CheckSignals()

    def drain(self, uintptr_t qp=0, timeout_s=None):
        """Wait, without the GIL, until no command of a QP (0: nothing at all) is queued or under way.

        :param qp: ibv_qp pointer, or that of any object given to destroy
        :param timeout_s: seconds; None = for ever
        :return: whether that is so now
        :raises RuntimeError: called from this worker's own job, which would wait for itself
        :raises KeyboardInterrupt: and whatever else signal handlers raise
        """
        cdef WorkerState *worker = self.worker
        cdef int64_t deadline = deadline_after(timeout_s)
        if worker.pid != getpid():
            return True
        if worker.thread_id == sv_thread_id():
            raise RuntimeError("drain() from a job of the same NicWorker")
        return self._wait(<void *>qp, False, deadline) != 0

    def stop(self, timeout_s=5.0):
        """Cancel what has not begun and wait for the thread to end. Again and again is allowed.

        :param timeout_s: seconds to wait for what is under way
        :return: whether the thread has ended; False = a command hangs (or this is called from a job). It ends
            by itself when the command returns and cannot keep the process alive. True in a forked child
        """
        cdef WorkerState *worker = self.worker
        cdef int64_t deadline = deadline_after(timeout_s)
        if worker.pid != getpid():
            return True
        cancel_jobs(self._halt(worker))
        if worker.thread_id == sv_thread_id():
            return False
        return self._wait(NULL, True, deadline) != 0

    @property
    def stopped(self):
        """Whether stop() was called; nothing queued later is carried out."""
        return self.worker.stopping != 0

    @property
    def busy_since_ns(self):
        """CLOCK_MONOTONIC in ns at which what is under way began; 0 when idle. A hang shows here."""
        cdef int64_t since = 0
        if self.worker.pid == getpid():
            pthread_mutex_lock(&self.worker.lock)
            since = self.worker.started_ns
            pthread_mutex_unlock(&self.worker.lock)
        return since

    @property
    def completed(self):
        """How many commands have been carried out (jobs and cancelled ones are not counted)."""
        cdef uint64_t n = 0
        if self.worker.pid == getpid():
            pthread_mutex_lock(&self.worker.lock)
            n = self.worker.completed
            pthread_mutex_unlock(&self.worker.lock)
        return n

    def __repr__(self):
        return f"<NicWorker {self.name}>"
