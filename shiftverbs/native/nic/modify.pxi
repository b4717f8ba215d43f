# SPDX-License-Identifier: BSD-3-Clause
# QP transitions as a C array, and the attributes they are made of. Included by _nic.pyx.


cdef ModifyStep *steps_copy(ModifySteps steps, int *n) except? NULL:
    """A copy to be freed by the caller, so that another thread may change the object meanwhile. NULL if
    empty."""
    cdef ModifyStep *copy
    n[0] = steps.count
    if steps.count == 0:
        return NULL
    copy = <ModifyStep *>malloc(steps.count * sizeof(ModifyStep))
    if copy == NULL:
        raise MemoryError()
    memcpy(copy, steps.steps, steps.count * sizeof(ModifyStep))
    return copy


cdef int run_steps(ibv_qp *qp, ModifyStep *steps, int n, int *done) noexcept nogil:
    """ibv_modify_qp for each step. Returns 0 or the errno of the first that failed; done = how many
    succeeded."""
    cdef int err
    cdef int i
    for i in range(n):
        done[0] = i
        sv_clear_errno()
        err = ibv_modify_qp(qp, &steps[i].attr, steps[i].mask)
        if err < 0:
            err = errno
            if err <= 0:
                err = EIO
        if err:
            return err
    done[0] = n
    return 0


cdef int fill_ah_attr(ibv_ah_attr *attr, object fields) except -1:
    """Read a mapping named after ibv_ah_attr; GRH fields flat or under `grh`; `dgid` (16 bytes) makes it
    global."""
    values = dict(fields)
    grh = values.pop("grh", None)
    if grh is not None:
        values.update(grh)
    dgid = values.pop("dgid", None)
    is_global = values.pop("is_global", None)
    memset(attr, 0, sizeof(ibv_ah_attr))
    attr.grh.hop_limit = 64
    if dgid is not None:
        raw = bytes(dgid)
        if len(raw) != 16:
            raise ValueError(f"dgid has {len(raw)} bytes instead of 16")
        memcpy(attr.grh.dgid.raw, PyBytes_AS_STRING(raw), 16)
    attr.is_global = (dgid is not None) if is_global is None else bool(is_global)
    for name, value in values.items():
        if name == "dlid":
            attr.dlid = value
        elif name == "sl":
            attr.sl = value
        elif name == "src_path_bits":
            attr.src_path_bits = value
        elif name == "static_rate":
            attr.static_rate = value
        elif name == "port_num":
            attr.port_num = value
        elif name == "flow_label":
            attr.grh.flow_label = value
        elif name == "sgid_index":
            attr.grh.sgid_index = value
        elif name == "hop_limit":
            attr.grh.hop_limit = value
        elif name == "traffic_class":
            attr.grh.traffic_class = value
        else:
            raise TypeError(f"not an address handle attribute: {name}")
    return 0


cdef uint32_t psn(object value) except? 0xffffffff:
    """A 24-bit packet sequence number."""
    if not 0 <= value < 1 << 24:
        raise ValueError(f"PSN {value} does not fit in 24 bits")
    return value


cdef int fill_attr(ModifyStep *step, str name, object value) except -1:
    """Set one attribute of a transition and its mask bit."""
    cdef ibv_qp_attr *attr = &step.attr
    if name == "state" or name == "qp_state":
        attr.qp_state = <ibv_qp_state><int>value
        step.mask |= IBV_QP_STATE
    elif name == "cur_qp_state":
        attr.cur_qp_state = <ibv_qp_state><int>value
        step.mask |= IBV_QP_CUR_STATE
    elif name == "path_mtu":
        attr.path_mtu = <ibv_mtu><int>value
        step.mask |= IBV_QP_PATH_MTU
    elif name == "path_mig_state":
        attr.path_mig_state = <ibv_mig_state><int>value
        step.mask |= IBV_QP_PATH_MIG_STATE
    elif name == "qkey":
        attr.qkey = value
        step.mask |= IBV_QP_QKEY
    elif name == "rq_psn":
        attr.rq_psn = psn(value)
        step.mask |= IBV_QP_RQ_PSN
    elif name == "sq_psn":
        attr.sq_psn = psn(value)
        step.mask |= IBV_QP_SQ_PSN
    elif name == "dest_qp_num":
        attr.dest_qp_num = value
        step.mask |= IBV_QP_DEST_QPN
    elif name == "qp_access_flags":
        attr.qp_access_flags = value
        step.mask |= IBV_QP_ACCESS_FLAGS
    elif name == "cap":
        fill_cap(&attr.cap, value)
        step.mask |= IBV_QP_CAP
    elif name == "ah_attr":
        fill_ah_attr(&attr.ah_attr, value)
        step.mask |= IBV_QP_AV
    elif name == "alt_ah_attr":
        fill_ah_attr(&attr.alt_ah_attr, value)
        step.mask |= IBV_QP_ALT_PATH
    elif name == "alt_pkey_index":
        attr.alt_pkey_index = value
        step.mask |= IBV_QP_ALT_PATH
    elif name == "alt_port_num":
        attr.alt_port_num = value
        step.mask |= IBV_QP_ALT_PATH
    elif name == "alt_timeout":
        attr.alt_timeout = value
        step.mask |= IBV_QP_ALT_PATH
    elif name == "pkey_index":
        attr.pkey_index = value
        step.mask |= IBV_QP_PKEY_INDEX
    elif name == "port_num":
        attr.port_num = value
        step.mask |= IBV_QP_PORT
    elif name == "en_sqd_async_notify":
        attr.en_sqd_async_notify = value
        step.mask |= IBV_QP_EN_SQD_ASYNC_NOTIFY
    elif name == "max_rd_atomic":
        attr.max_rd_atomic = value
        step.mask |= IBV_QP_MAX_QP_RD_ATOMIC
    elif name == "max_dest_rd_atomic":
        attr.max_dest_rd_atomic = value
        step.mask |= IBV_QP_MAX_DEST_RD_ATOMIC
    elif name == "min_rnr_timer":
        attr.min_rnr_timer = value
        step.mask |= IBV_QP_MIN_RNR_TIMER
    elif name == "timeout":
        attr.timeout = value
        step.mask |= IBV_QP_TIMEOUT
    elif name == "retry_cnt":
        attr.retry_cnt = value
        step.mask |= IBV_QP_RETRY_CNT
    elif name == "rnr_retry":
        attr.rnr_retry = value
        step.mask |= IBV_QP_RNR_RETRY
    elif name == "rate_limit":
        attr.rate_limit = value
        step.mask |= IBV_QP_RATE_LIMIT
    elif name == "sq_draining":
        pass  # read-only
    else:
        raise TypeError(f"not a QP attribute: {name}")
    return 0


cdef class ModifySteps:
    """Transitions for one QP, to be carried out in order: a C array of (ibv_qp_attr, mask).

    Made in advance, or at the moment of failure; submitting copies it, so one object serves many QPs and may
    be changed afterwards. It holds no pointer to anything. `count` is the number of transitions.
    """

    def __cinit__(self):
        self.steps = NULL
        self.count = 0
        self.size = 0

    def __dealloc__(self):
        free(self.steps)

    def __len__(self):
        return self.count

    cdef ModifyStep *_append(self) except NULL:
        """Room for one more, zeroed, not yet counted."""
        cdef ModifyStep *bigger
        if self.count == self.size:
            bigger = <ModifyStep *>realloc(self.steps, (self.size + 4) * sizeof(ModifyStep))
            if bigger == NULL:
                raise MemoryError()
            self.steps = bigger
            self.size += 4
        memset(&self.steps[self.count], 0, sizeof(ModifyStep))
        return &self.steps[self.count]

    def add(self, mask=None, **attrs):
        """Append one transition.

        :param mask: attribute mask; by default the bits of the attributes given. With a mask, given
            attributes outside it are ignored by the device (so a whole remembered dict can be passed).
        :param attrs: named as in ibv_qp_attr (`state` = `qp_state`); None = not given; `ah_attr` is a mapping
            of ibv_ah_attr's fields with the GRH's flat or under `grh`, `dgid` as 16 bytes; `cap` as in
            create_qp
        :return: self, for chaining
        :raises TypeError: no such attribute
        :raises OverflowError, ValueError: value out of range
        """
        cdef ModifyStep *step = self._append()
        for name, value in attrs.items():
            if value is not None:
                fill_attr(step, name, value)
        if mask is not None:
            step.mask = int(mask)
        self.count += 1
        return self
