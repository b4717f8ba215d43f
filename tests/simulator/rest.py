# SPDX-License-Identifier: BSD-3-Clause
"""Whether a program's work has come to rest, and what is said of it where it has not."""

from __future__ import annotations

from simulator.application import Application
from simulator.rnic import ERR


def quiet(app: Application) -> bool:
    """Everything is posted, executed and seen."""
    core = app.endpoint.core
    return (
        (not app.plan or (app.answers and app.backlog <= 0))
        and not app.endpoint.blocked
        and not core.unwired[0]
        and not core.completion_due
        and not app.endpoint.buffered
        and not app.poll_due
        and not any((qp.unacked or qp.unsent) and not qp.nic.dead for qp in app.endpoint.qps)
    )


def settled(app: Application, home: bool) -> bool:
    """Whether it is protected, or will never be, and its traffic is where it belongs."""
    p = app.endpoint.protocol
    if p is None:
        return app.net.pairs == 1
    if p.busy or p.over:
        return bool(p.over)
    if home:
        return (p.send_state.value, p.recv_state.value) == ("DEFAULT", "DEFAULT")
    # Where both sides left home at once, each for a pair of its own choice, and home died, nothing has them meet; but a
    # side whose receives have left the pair that it sends on is to follow them.
    apart = 0 not in (p.send_pair, p.recv_pair) and not p.pairs[p.send_pair].stale
    return bool(p.send_pair == p.recv_pair or apart)


def waits(app: Application) -> bool:
    """Whether errors are still to be given."""
    connection = app.endpoint.connection
    return (
        connection is not None
        and not app.closed
        and (connection.ending.under_way and any(app.endpoint.core.outstanding))
    )


def waits_for_memory(app: Application) -> bool:
    """Whether what it posted is to go to a backup that has broken, when that has its memory."""
    core = app.endpoint.core
    return not app.closed and any(
        qp is not None and not qp.nic.dead and qp.state == ERR and unwired
        for qp, unwired in zip(
            map(app.endpoint.qp, (core.send_pair, core.recv_pair)), core.unwired, strict=True
        )
    )


def state(app: Application) -> str:
    """For a failure's text."""
    p, core = app.endpoint.protocol, app.endpoint.core
    machine = (
        f"{p.send_state.value}/{p.recv_state.value} {p.send_pair}/{p.recv_pair} over={p.over}"
        if p
        else "unpaired"
    )
    why = app.endpoint.connection.why if app.endpoint.connection else None
    return (
        f"{app.name}: {machine} {app.endpoint.status} why={why!r} posted={len(app.posted)} plan={len(app.plan)} "
        f"outstanding={core.outstanding} unwired={core.unwired} open={core.send_is_open, core.recv_is_open} "
        f"failed={app.failed} left={app.left} blocked={app.endpoint.blocked}"
    )
