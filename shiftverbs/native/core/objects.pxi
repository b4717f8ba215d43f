# SPDX-License-Identifier: BSD-3-Clause
# The pointers and structs inside pyverbs' objects, for the control path. Included by _core.pyx.

cdef extern from *:
    """
    #include <stddef.h>

    enum { SV_UNSIGNED, SV_SIGNED, SV_BYTES, SV_STRUCT };
    typedef struct { const char *name; size_t offset; size_t size; int how; } sv_field;
    #define SV_F(how, type, name) {#name, offsetof(struct type, name), sizeof(((struct type *)0)->name), how}
    #define SV_END {NULL, 0, 0, 0}

    static const sv_field sv_cap_fields[] = {
        SV_F(SV_UNSIGNED, ibv_qp_cap, max_send_wr), SV_F(SV_UNSIGNED, ibv_qp_cap, max_recv_wr),
        SV_F(SV_UNSIGNED, ibv_qp_cap, max_send_sge), SV_F(SV_UNSIGNED, ibv_qp_cap, max_recv_sge),
        SV_F(SV_UNSIGNED, ibv_qp_cap, max_inline_data), SV_END,
    };
    static const sv_field sv_init_attr_fields[] = {
        SV_F(SV_UNSIGNED, ibv_qp_init_attr, send_cq), SV_F(SV_UNSIGNED, ibv_qp_init_attr, recv_cq),
        SV_F(SV_UNSIGNED, ibv_qp_init_attr, srq), SV_F(SV_STRUCT, ibv_qp_init_attr, cap),
        SV_F(SV_SIGNED, ibv_qp_init_attr, qp_type), SV_F(SV_SIGNED, ibv_qp_init_attr, sq_sig_all), SV_END,
    };
    static const sv_field sv_init_attr_ex_fields[] = {
        SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, send_cq), SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, recv_cq),
        SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, srq), SV_F(SV_STRUCT, ibv_qp_init_attr_ex, cap),
        SV_F(SV_SIGNED, ibv_qp_init_attr_ex, qp_type), SV_F(SV_SIGNED, ibv_qp_init_attr_ex, sq_sig_all),
        SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, comp_mask), SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, create_flags),
        SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, source_qpn),
        SV_F(SV_UNSIGNED, ibv_qp_init_attr_ex, send_ops_flags), SV_END,
    };
    static const sv_field sv_route_fields[] = {
        SV_F(SV_BYTES, ibv_global_route, dgid), SV_F(SV_UNSIGNED, ibv_global_route, flow_label),
        SV_F(SV_UNSIGNED, ibv_global_route, sgid_index), SV_F(SV_UNSIGNED, ibv_global_route, hop_limit),
        SV_F(SV_UNSIGNED, ibv_global_route, traffic_class), SV_END,
    };
    static const sv_field sv_ah_attr_fields[] = {
        SV_F(SV_STRUCT, ibv_ah_attr, grh), SV_F(SV_UNSIGNED, ibv_ah_attr, dlid), SV_F(SV_UNSIGNED, ibv_ah_attr, sl),
        SV_F(SV_UNSIGNED, ibv_ah_attr, src_path_bits), SV_F(SV_UNSIGNED, ibv_ah_attr, static_rate),
        SV_F(SV_UNSIGNED, ibv_ah_attr, is_global), SV_F(SV_UNSIGNED, ibv_ah_attr, port_num), SV_END,
    };
    static const sv_field sv_qp_attr_fields[] = {
        SV_F(SV_SIGNED, ibv_qp_attr, qp_state), SV_F(SV_SIGNED, ibv_qp_attr, cur_qp_state),
        SV_F(SV_SIGNED, ibv_qp_attr, path_mtu), SV_F(SV_SIGNED, ibv_qp_attr, path_mig_state),
        SV_F(SV_UNSIGNED, ibv_qp_attr, qkey), SV_F(SV_UNSIGNED, ibv_qp_attr, rq_psn),
        SV_F(SV_UNSIGNED, ibv_qp_attr, sq_psn), SV_F(SV_UNSIGNED, ibv_qp_attr, dest_qp_num),
        SV_F(SV_UNSIGNED, ibv_qp_attr, qp_access_flags), SV_F(SV_STRUCT, ibv_qp_attr, cap),
        SV_F(SV_STRUCT, ibv_qp_attr, ah_attr), SV_F(SV_STRUCT, ibv_qp_attr, alt_ah_attr),
        SV_F(SV_UNSIGNED, ibv_qp_attr, pkey_index), SV_F(SV_UNSIGNED, ibv_qp_attr, alt_pkey_index),
        SV_F(SV_UNSIGNED, ibv_qp_attr, en_sqd_async_notify), SV_F(SV_UNSIGNED, ibv_qp_attr, sq_draining),
        SV_F(SV_UNSIGNED, ibv_qp_attr, max_rd_atomic), SV_F(SV_UNSIGNED, ibv_qp_attr, max_dest_rd_atomic),
        SV_F(SV_UNSIGNED, ibv_qp_attr, min_rnr_timer), SV_F(SV_UNSIGNED, ibv_qp_attr, port_num),
        SV_F(SV_UNSIGNED, ibv_qp_attr, timeout), SV_F(SV_UNSIGNED, ibv_qp_attr, retry_cnt),
        SV_F(SV_UNSIGNED, ibv_qp_attr, rnr_retry), SV_F(SV_UNSIGNED, ibv_qp_attr, alt_port_num),
        SV_F(SV_UNSIGNED, ibv_qp_attr, alt_timeout), SV_F(SV_UNSIGNED, ibv_qp_attr, rate_limit), SV_END,
    };
    """
    enum:
        SV_UNSIGNED
        SV_SIGNED
        SV_BYTES
    ctypedef struct sv_field:
        const char *name
        size_t offset
        size_t size
        int how
    const sv_field *sv_cap_fields
    const sv_field *sv_init_attr_fields
    const sv_field *sv_init_attr_ex_fields
    const sv_field *sv_route_fields
    const sv_field *sv_ah_attr_fields
    const sv_field *sv_qp_attr_fields


# --- pointers ------------------------------------------------------------------------------------------------

# Where they are in the objects, for whole_close.
POINTER, MR_POINTER, MW_POINTER = SV_POINTER, SV_MR_POINTER, SV_MW_POINTER


cdef inline void **first_pointer(PyverbsCM obj) noexcept:
    return &(<sv_cm_object *><PyObject *>obj).pointer


def pointer(PyverbsCM obj not None) -> int:
    """Address of the libibverbs object behind a pyverbs one (any but an MR or MW); 0 once closed.

    For a CQEX that of its ibv_cq_ex.
    """
    return <uintptr_t>first_pointer(obj)[0]


def mr_pointer(MR obj not None) -> int:
    """Address of the ibv_mr of an MR; 0 once closed."""
    return <uintptr_t>obj.mr


def mw_pointer(MW obj not None) -> int:
    """Address of the ibv_mw of an MW; 0 once closed."""
    return <uintptr_t>obj.mw


def cqex_pointer(CQEX obj not None) -> int:
    """Address of the ibv_cq of a CQEX; closing does not reset it (its ibv_cq_ex, see pointer(), it does)."""
    return <uintptr_t>obj.ibv_cq


def forget_pointer(PyverbsCM obj not None) -> None:
    """Make the object look closed without closing it: for what could not be destroyed and must be leaked."""
    if isinstance(obj, MR):
        (<MR>obj).mr = NULL
    elif isinstance(obj, MW):
        (<MW>obj).mw = NULL
    else:
        first_pointer(obj)[0] = NULL


cdef void *opened(PyverbsCM obj) except NULL:
    cdef void *found = first_pointer(obj)[0]
    if found == NULL:
        raise ValueError(f'a closed {type(obj).__name__}')
    return found


def async_fd(Context obj not None) -> int:
    """The descriptor on which an open Context's asynchronous events arrive."""
    return (<ibv_context *>opened(obj)).async_fd


def channel_fd(CompChannel obj not None) -> int:
    """The descriptor of an open CompChannel."""
    return (<ibv_comp_channel *>opened(obj)).fd


def cq_entries(PyverbsCM obj not None) -> int:
    """How many completions an open CQ or CQEX holds on the default NIC."""
    if isinstance(obj, CQEX):
        opened(obj)
        return (<CQEX>obj).ibv_cq.cqe
    if isinstance(obj, CQ):
        return (<ibv_cq *>opened(obj)).cqe
    raise TypeError(f'CQ or CQEX expected, not {type(obj).__name__}')


def set_srq_cq(SrqInitAttrEx obj not None, cq) -> None:
    """Write the CQ (address of an ibv_cq) of an SrqInitAttrEx: pyverbs reads a CQ subclass's from the wrong place."""
    obj.attr.cq = <ibv_cq *><uintptr_t>cq


# --- structs -------------------------------------------------------------------------------------------------

@cython.final
cdef class _Field:
    cdef size_t offset
    cdef size_t size
    cdef int how
    cdef type struct


cdef dict fields_from(const sv_field *f, dict structs):
    cdef _Field field
    cdef dict result = {}
    while f.name != NULL:
        field = _Field.__new__(_Field)
        field.offset, field.size, field.how = f.offset, f.size, f.how
        name = f.name.decode('ascii')
        field.struct = structs.get(name)
        result[name] = field
        f += 1
    return result


cdef class Struct:
    """A struct of libibverbs, its fields as attributes: one that lies in a pyverbs object, which it keeps, or its own.

    :param contents: what one of its own begins with; by default zeros. Raises ValueError for another number of bytes.
    """

    cdef object owner
    cdef char *at
    cdef size_t size
    cdef dict fields

    def __cinit__(self, contents=None):
        cdef bytearray memory
        known = layouts.get(type(self))
        if known is None:
            raise TypeError(f'{type(self).__name__} is no struct of libibverbs')
        self.size, self.fields = known
        if contents is LIES_ELSEWHERE:
            return
        memory = bytearray(self.size if contents is None else contents)
        if <size_t>len(memory) != self.size:
            raise ValueError(f'{type(self).__name__} has {self.size} bytes, not {len(memory)}')
        self.owner = memory
        self.at = PyByteArray_AS_STRING(memory)

    def __getattribute__(self, name):
        cdef _Field f = self.fields.get(name)
        if f is None:
            return PyObject_GenericGetAttr(self, name)
        cdef char *at = self.at + f.offset
        if f.struct is not None:
            return lying_in(f.struct, self.owner, at)
        if f.how == SV_BYTES:
            return at[:f.size]
        if f.size == 1:
            return (<uint8_t *>at)[0]
        if f.size == 2:
            return (<uint16_t *>at)[0]
        if f.size == 8:
            return (<uint64_t *>at)[0]
        return (<int32_t *>at)[0] if f.how == SV_SIGNED else (<uint32_t *>at)[0]

    def __setattr__(self, name, value):
        cdef _Field f = self.fields.get(name)
        if f is None or f.struct is not None:
            raise AttributeError(f'{type(self).__name__} has no such field to set: {name}')
        cdef char *at = self.at + f.offset
        if f.how == SV_BYTES:
            raw = bytes(value)
            if <size_t>len(raw) != f.size:
                raise ValueError(f'{name} has {f.size} bytes, not {len(raw)}')
            memcpy(at, <const char *>raw, f.size)
        elif f.size == 1:
            (<uint8_t *>at)[0] = value
        elif f.size == 2:
            (<uint16_t *>at)[0] = value
        elif f.size == 8:
            (<uint64_t *>at)[0] = value
        elif f.how == SV_SIGNED:
            (<int32_t *>at)[0] = value
        else:
            (<uint32_t *>at)[0] = value

    def __bytes__(self):
        return self.at[:self.size]


cdef Struct lying_in(type cls, object owner, void *at):
    cdef Struct result = cls.__new__(cls, LIES_ELSEWHERE)
    result.owner = owner
    result.at = <char *>at
    return result


@cython.final
cdef class Cap(Struct):
    """struct ibv_qp_cap."""


cdef class InitAttr(Struct):
    """struct ibv_qp_init_attr."""


@cython.final
cdef class InitAttrEx(InitAttr):
    """struct ibv_qp_init_attr_ex, up to what RSS and TSO need."""


@cython.final
cdef class GlobalRoute(Struct):
    """struct ibv_global_route; `dgid` is 16 bytes."""


@cython.final
cdef class AhAttr(Struct):
    """struct ibv_ah_attr."""


@cython.final
cdef class Attr(Struct):
    """struct ibv_qp_attr."""


cdef object LIES_ELSEWHERE = object()
cdef dict inner = {'cap': Cap, 'grh': GlobalRoute, 'ah_attr': AhAttr, 'alt_ah_attr': AhAttr}
# Of each struct, its size and its fields by name.
cdef dict layouts = {
    Cap: (sizeof(ibv_qp_cap), fields_from(sv_cap_fields, inner)),
    InitAttr: (sizeof(ibv_qp_init_attr), fields_from(sv_init_attr_fields, inner)),
    InitAttrEx: (sizeof(ibv_qp_init_attr_ex), fields_from(sv_init_attr_ex_fields, inner)),
    GlobalRoute: (sizeof(ibv_global_route), fields_from(sv_route_fields, inner)),
    AhAttr: (sizeof(ibv_ah_attr), fields_from(sv_ah_attr_fields, inner)),
    Attr: (sizeof(ibv_qp_attr), fields_from(sv_qp_attr_fields, inner)),
}


def init_attr(obj) -> InitAttr:
    """The struct inside a QPInitAttr or QPInitAttrEx, live: writing to it writes to the object. Else TypeError."""
    if isinstance(obj, QPInitAttrEx):
        return lying_in(InitAttrEx, obj, &(<QPInitAttrEx>obj).attr)
    if isinstance(obj, QPInitAttr):
        return lying_in(InitAttr, obj, &(<QPInitAttr>obj).attr)
    raise TypeError(f'expected QPInitAttr or QPInitAttrEx, got {type(obj).__name__}')


def qp_attr(QPAttr obj not None) -> Attr:
    """The struct inside a QPAttr, live."""
    return lying_in(Attr, obj, &obj.attr)


def copy_struct(Struct target not None, Struct source not None) -> None:
    """Copy one struct over another of the same type; TypeError where it is not."""
    if type(source) is not type(target):
        raise TypeError(f'{type(target).__name__} expected, not {type(source).__name__}')
    memcpy(target.at, source.at, target.size)


def cap_tuple(Cap cap not None) -> tuple:
    """(max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data)."""
    cdef ibv_qp_cap *c = <ibv_qp_cap *>cap.at
    return c.max_send_wr, c.max_recv_wr, c.max_send_sge, c.max_recv_sge, c.max_inline_data


def set_cap(Cap cap not None, values) -> None:
    """Write all five capacities, in the order of cap_tuple."""
    cdef ibv_qp_cap c
    c.max_send_wr, c.max_recv_wr, c.max_send_sge, c.max_recv_sge, c.max_inline_data = values
    (<ibv_qp_cap *>cap.at)[0] = c
