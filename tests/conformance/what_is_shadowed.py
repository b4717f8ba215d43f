# SPDX-License-Identifier: BSD-3-Clause
"""Makes one object of every class that can be made here, failover on. Prints, as JSON, which have a shadow behind
them, and what the QPs say of their protection."""

from __future__ import annotations

import json
from typing import Any

from shiftverbs import enums as _e
from shiftverbs.addr import AH, AHAttr, GlobalRoute
from shiftverbs.cq import CQ, CQEX, CompChannel, CqInitAttrEx
from shiftverbs.device import Context
from shiftverbs.mr import MR, MW
from shiftverbs.pd import PD, ParentDomain, ParentDomainInitAttr
from shiftverbs.qp import QP, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from shiftverbs.srq import SRQ, SrqAttr, SrqInitAttr

e: Any = _e


def main() -> None:
    context = Context(name="soft0")
    pd, channel = PD(context), CompChannel(context)
    cq, cqex = CQ(context, 10, None, channel), CQEX(context, CqInitAttrEx(cqe=10))
    srq, parent = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=10))), ParentDomain(context, ParentDomainInitAttr(pd=pd))
    mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
    window = MW(pd, e.IBV_MW_TYPE_1)
    route = GlobalRoute(dgid=context.query_gid(1, 0), sgid_index=0)
    handle = AH(pd, attr=AHAttr(gr=route, is_global=1, port_num=1))

    def attr(kind: int = e.IBV_QPT_RC, queue: Any = cq, **more: Any) -> Any:
        return QPInitAttr(qp_type=kind, scq=queue, rcq=queue, cap=QPCap(4, 4, 1, 1), **more)

    def attr_ex(domain: Any = pd, **more: Any) -> Any:
        return QPInitAttrEx(
            qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1), pd=domain, sq_sig_all=0, **more
        )

    qp = QP(pd, attr())
    operations = e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
    extended = QPEx(context, attr_ex(comp_mask=operations, send_ops_flags=e.IBV_QP_EX_WITH_SEND))
    binding = e.IBV_QP_EX_WITH_SEND | e.IBV_QP_EX_WITH_BIND_MW
    qps = {
        "RC": qp,
        "QPEx without send operations": QPEx(context, attr_ex(comp_mask=e.IBV_QP_INIT_ATTR_PD)),
        "QPEx": extended,
        "UC": QP(pd, attr(e.IBV_QPT_UC)),
        "UD": QP(pd, attr(e.IBV_QPT_UD)),
        "SRQ": QP(pd, attr(srq=srq)),
        "QPEx that binds windows": QPEx(context, attr_ex(comp_mask=operations, send_ops_flags=binding)),
        "CQEX": QP(pd, attr(queue=cqex)),
        "ParentDomain": QP(context, attr_ex(parent, comp_mask=e.IBV_QP_INIT_ATTR_PD)),
    }
    made = (context, pd, channel, cq, cqex, srq, parent, mr, window, handle, qp, extended)
    shadowed = {
        type(one).__name__: (getattr(one, "_domain", None) or getattr(one, "_shadow", None)) is not None
        for one in made
    }
    said = {name: [one.shift.status, one.shift.why] for name, one in qps.items()}
    print(json.dumps({"shadowed": shadowed, "qps": said}))
    context.close()


if __name__ == "__main__":
    main()
