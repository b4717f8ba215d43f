# SPDX-License-Identifier: BSD-3-Clause
"""What a soak run does to two hosts at work. Each step is drawn anew from a seed of its own.

A step leaves the network as it likes: all is healed behind it, and then every QP must be PROTECTED and at home, with
traffic moving on every lane, or (Step.survives False) both sides of it must have got their errors.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shiftverbs.softrnic import faults

if TYPE_CHECKING:
    from soak.stage import Stage

Body = Callable[["Stage", random.Random], None]


@dataclass(frozen=True)
class Step:
    """survives: no error may be seen by anybody. three_nics: each host needs a third NIC."""

    body: Body
    survives: bool
    three_nics: bool = False


STEPS: dict[str, Step] = {}


def step(survives: bool, three_nics: bool = False) -> Callable[[Body], Body]:
    """Enter a function into STEPS under its own name."""

    def enter(body: Body) -> Body:
        STEPS[body.__name__] = Step(body, survives, three_nics)
        return body

    return enter


def whose(rng: random.Random, k: int | None = 0) -> str:
    """A device of one of the hosts; k: which, None = by chance."""
    return f"{rng.choice('ab')}/soft{rng.choice([0, 0, 1]) if k is None else k}"


def short(rng: random.Random) -> float:
    """Seconds that an outage may last and be survived: below a third of the fence's deadline."""
    return rng.choice([0.02, 0.1, 0.3, 0.8, 1.2])


# ---- cables, ports, switches -----------------------------------------------------------------------------------------


@step(survives=True)
def port(stage: Stage, rng: random.Random) -> None:
    """One default port goes down, for long enough to be away, or not."""
    faults.down(whose(rng))
    if rng.random() < 0.5:
        stage.wait_away()
    stage.run_for(short(rng))


@step(survives=True)
def both_ports(stage: Stage, rng: random.Random) -> None:
    """The default ports of both hosts at once."""
    faults.down("a/soft0")
    stage.run_for(rng.choice([0, 0, 0.01, 0.1]))
    faults.down("b/soft0")
    stage.wait_away()


@step(survives=True)
def switch_port(stage: Stage, rng: random.Random) -> None:
    """The switch, or its port towards one host: no NIC notices anything."""
    faults.switch_down("rail0", rng.choice([None, "a", "b"]))
    stage.wait_away()


@step(survives=True)
def flaps(stage: Stage, rng: random.Random) -> None:
    """A hundred flaps of one port."""
    target = whose(rng)
    for _ in range(stage.scaled(100)):
        faults.down(target)
        stage.run_for(rng.choice([0.001, 0.005, 0.02, 0.1]))
        faults.up(target)
        stage.run_for(rng.choice([0.001, 0.005, 0.02, 0.1]))


@step(survives=True)
def home_fails_again(stage: Stage, rng: random.Random) -> None:
    """The default path fails once more on the way home: during ARM, during MOVE, with one direction home."""
    target = whose(rng)
    for _ in range(stage.scaled(4)):
        faults.down(target)
        stage.wait_away()
        faults.up(target)
        stage.run_for(rng.choice([0.0, 0.005, 0.02, 0.05, 0.1, 0.3]))


@step(survives=True)
def backup_fails_at_home(stage: Stage, rng: random.Random) -> None:
    """The backup fails while nothing needs it, then the default path as soon as it is back."""
    target = whose(rng, 1)
    faults.down(target)
    stage.run_for(short(rng))
    faults.up(target)
    stage.wait_home()
    faults.down(whose(rng))
    stage.wait_away()


@step(survives=True, three_nics=True)
def third_nic(stage: Stage, rng: random.Random) -> None:
    """The backup fails during fallback, or once traffic runs on it: the second backup takes over."""
    first, second = whose(rng), whose(rng, 1)
    faults.down(first)
    if rng.random() < 0.5:
        stage.wait_away()
    else:
        stage.run_for(rng.choice([0, 0.002, 0.01, 0.05]))
    faults.down(second)
    stage.wait_on(2)


@step(survives=True, three_nics=True)
def backup_fails_coming_home(stage: Stage, rng: random.Random) -> None:
    """The backup fails while traffic leaves it for home."""
    first, second = whose(rng), whose(rng, 1)
    faults.down(first)
    stage.wait_away()
    faults.up(first)
    stage.run_for(rng.choice([0, 0.005, 0.02, 0.05, 0.1]))
    faults.down(second)
    stage.run_for(short(rng))


@step(survives=False)
def backup_fails_too(stage: Stage, rng: random.Random) -> None:
    """As third_nic, where there may be no third NIC: nothing works for a while."""
    faults.down(whose(rng))
    stage.run_for(rng.choice([0, 0.01, 0.05, 0.3]))
    faults.down(whose(rng, 1))
    stage.run_for(rng.choice([0.05, 0.5, 2]))


@step(survives=False)
def all_nics_of_a_host(stage: Stage, rng: random.Random) -> None:
    """Every port of a host, for a moment or for good."""
    host = rng.choice("ab")
    for k in range(stage.plan.nics):
        faults.down(f"{host}/soft{k}")
    stage.run_for(rng.choice([0.05, 0.5, 3, 12]))


# ---- packets ---------------------------------------------------------------------------------------------------------


@step(survives=True)
def ack_lost_at_each_position(stage: Stage, rng: random.Random) -> None:
    """A batch on a quiet QP: the n-th answer is lost and the path dies with it, for each n."""
    stage.send(False)
    stage.wait_settled()
    count = stage.scaled(12)
    for position in range(1, count + 1):
        stage.wait_home()
        lane = rng.randrange(stage.lane_count) if stage.lane_count else None
        if lane is None:
            break
        opcode = rng.choice(["ack", "ack", "response"])
        rule = faults.drop(
            "a/soft0", direction="rx", opcode=opcode, nth=position, then=rng.choice(["down", "switch-down"])
        )
        stage.hosts["a"](f"app.batch({lane}, {count})")
        stage.wait_settled()
        if faults.rule(rule).fired:
            stage.run_for(0.02)
        stage.heal()
    stage.send(True)


def packets(stage: Stage, rng: random.Random, make: Callable[[str], object]) -> None:
    """Packet rules on one device or on both ends of a rail, for a while."""
    k = rng.choice([0, 0, 1])
    for host in rng.choice(["a", "b", "ab"]):
        make(f"{host}/soft{k}")
    stage.run_for(rng.choice([0.5, 1.5]))
    if rng.random() < 0.4:
        faults.down(whose(rng))
        stage.run_for(short(rng))


@step(survives=True)
def loss(stage: Stage, rng: random.Random) -> None:
    """Some packets are lost."""
    share = rng.choice([0.01, 0.05, 0.2])
    packets(stage, rng, lambda at: faults.drop(at, count=0, probability=share, seed=rng.getrandbits(32)))


@step(survives=True)
def delay(stage: Stage, rng: random.Random) -> None:
    """Some packets are late, and are overtaken; some by more than a SWITCH takes."""
    share, late = rng.choice([0.05, 0.3]), rng.choice([0.001, 0.02, 0.2])
    packets(
        stage, rng, lambda at: faults.delay(at, late, count=0, probability=share, seed=rng.getrandbits(32))
    )


@step(survives=True)
def duplication(stage: Stage, rng: random.Random) -> None:
    """Some packets come twice, the copy at once or long after."""
    share, late = rng.choice([0.1, 0.5]), rng.choice([0.0, 0.01, 0.3])
    packets(
        stage,
        rng,
        lambda at: faults.duplicate(at, delay_s=late, count=0, probability=share, seed=rng.getrandbits(32)),
    )


@step(survives=True)
def reordering(stage: Stage, rng: random.Random) -> None:
    """Packets swap places."""
    share = rng.choice([0.05, 0.3])
    packets(stage, rng, lambda at: faults.reorder(at, count=0, probability=share, seed=rng.getrandbits(32)))


# ---- NICs ------------------------------------------------------------------------------------------------------------


@step(survives=True)
def nic_stands_still(stage: Stage, rng: random.Random) -> None:
    """A NIC that does nothing and says nothing, not even a flush, for a while."""
    target = whose(rng, None)
    faults.stall(target)
    stage.run_for(short(rng))
    faults.unstall(target)


@step(survives=False)
def nic_stands_still_for_long(stage: Stage, rng: random.Random) -> None:
    """The same beyond the fence's deadline: nothing is proven, so nothing may be replayed."""
    target = whose(rng)
    faults.stall(target)
    stage.run_for(8)
    faults.unstall(target)


@step(survives=True)
def backup_commands_hang(stage: Stage, rng: random.Random) -> None:
    """Commands of a backup do not return for a while; the default path is fine."""
    target = whose(rng, 1)
    faults.hang(target)
    stage.run_for(rng.choice([0.2, 1, 3]))
    faults.unhang(target)


@step(survives=True)
def commands_hang_while_it_fails(stage: Stage, rng: random.Random) -> None:
    """The failing NIC takes its time with the commands of the fence."""
    target = whose(rng)
    faults.hang(target)
    faults.down(target)
    stage.run_for(short(rng))
    faults.unhang(target)
    stage.wait_away()


@step(survives=True, three_nics=True)
def nic_dies(stage: Stage, rng: random.Random) -> None:
    """A default NIC dies: traffic goes on elsewhere. A process whose NIC died needs a restart to be protected again."""
    target = whose(rng)
    faults.kill(target)
    stage.wait_away()
    stage.wait_moving()
    stage.over = "a NIC died"
    stage.restart.add(target[0])


# ---- processes -------------------------------------------------------------------------------------------------------


@step(survives=True)
def stopped(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP of one side, its NICs included, sometimes with a failure meanwhile."""
    name = rng.choice("ab")
    host = stage.hosts[name]
    host.child.signal(signal.SIGSTOP)
    try:
        stage.run_for(short(rng), look=False)
        if rng.random() < 0.3:
            faults.down(whose(rng))
            stage.run_for(short(rng), look=False)
    finally:
        host.child.signal(signal.SIGCONT)
    stage.run_for(0.1)


@step(survives=False)
def stopped_for_long(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP beyond every deadline."""
    host = stage.hosts[rng.choice("ab")]
    host.child.signal(signal.SIGSTOP)
    try:
        stage.run_for(rng.choice([4, 12]), look=False)
    finally:
        host.child.signal(signal.SIGCONT)


@step(survives=False)
def peer_killed(stage: Stage, rng: random.Random) -> None:
    """kill -9 of a host's process."""
    stage.kill_host(rng.choice("ab"))


@step(survives=True)
def broker_killed(stage: Stage, rng: random.Random) -> None:
    """kill -9 of the broker of one host or of both, and a failure right away."""
    for host in rng.choice(["a", "b", "ab"]):
        stage.kill_broker(host)
    if rng.random() < 0.7:
        faults.down(whose(rng))
        stage.wait_away()


@step(survives=True)
def etcd_killed(stage: Stage, rng: random.Random) -> None:
    """kill -9 of etcd, a failure without it, and its return."""
    stage.etcd.kill()
    try:
        faults.down(whose(rng))
        stage.wait_away()
        faults.clear()
        if rng.random() < 0.5:
            stage.wait_home()
    finally:
        stage.etcd.start()


@step(survives=True)
def etcd_stands_still(stage: Stage, rng: random.Random) -> None:
    """etcd is stopped, sometimes for longer than its leases last."""
    stage.etcd.signal(signal.SIGSTOP)
    try:
        stage.run_for(rng.choice([0.2, 2, 13]))
        faults.down(whose(rng))
        stage.wait_away()
    finally:
        stage.etcd.signal(signal.SIGCONT)


@step(survives=True)
def etcd_partitioned(stage: Stage, rng: random.Random) -> None:
    """One host, or both, cannot reach etcd and then can: silence or broken connections."""
    hosts = rng.choice(["a", "b", "ab"])
    for host in hosts:
        stage.relays[host].cut()
    try:
        if rng.random() < 0.5:
            for host in hosts:
                stage.relays[host].reset()
        stage.run_for(rng.choice([0.1, 1, 13]))
        faults.down(whose(rng))
        stage.wait_away()
    finally:
        for host in hosts:
            stage.relays[host].heal()


# ---- connections that begin anew -------------------------------------------------------------------------------------


def some(stage: Stage, rng: random.Random, among: list[int] | None = None) -> list[int]:
    """A few lanes, at least one; among: of these."""
    numbers = list(range(stage.lane_count)) if among is None else among
    return sorted(rng.sample(numbers, rng.randrange(1, min(len(numbers), 8) + 1))) if numbers else []


def weather(stage: Stage, rng: random.Random) -> None:
    """Where lives end and begin: at home, away, or while somebody's port is down."""
    match rng.choice(["fine", "fine", "away", "falling", "backup"]):
        case "away":
            faults.down(whose(rng))
            stage.wait_away()
        case "falling":
            faults.down(whose(rng))
            stage.run_for(rng.choice([0, 0.001, 0.005, 0.02, 0.1]))
        case "backup":
            faults.down(whose(rng, 1))
            stage.run_for(rng.choice([0, 0.02, 0.3]))


def new_lives(stage: Stage, rng: random.Random, lanes: list[int], how: dict[str, str]) -> None:
    """End the lives of some lanes on both hosts, in one order or the other or at once, and connect them again.

    how: what the lanes of each host go through, see Application.end.
    """
    first, second = rng.choice(["ab", "ba"])
    most = rng.choice([0, 1, 3, 8])
    stage.ask(f"app.leave({lanes})")
    records: dict[str, list[list[int]]] = {}
    ahead = all(one == "reset" for one in how.values()) and rng.random() < 0.4
    if ahead:  # one side is in its next life before the other has ended the former one
        names = stage.hosts[second](f"app.names_of({lanes}, 1)")
        records[first] = stage.end_lives(first, lanes, how[first], most)
        mine = stage.hosts[first](f"app.names_of({lanes})")
        stage.hosts[first](f"app.connect_again({lanes}, {names!r})", stage.deadline_s)
        stage.run_for(rng.choice([0, 0.01, 0.3]))
        records[second] = stage.end_lives(second, lanes, how[second], most)
        stage.hosts[second](f"app.connect_again({lanes}, {mine!r})", stage.deadline_s)
    else:
        if rng.random() < 0.3:
            for host in first + second:
                stage.hosts[host].begin(f"app.end({lanes}, {how[host]!r}, {most})")
            records = {host: stage.hosts[host].end(stage.deadline_s) for host in first + second}
        else:
            records[first] = stage.end_lives(first, lanes, how[first], most)
            if rng.random() < 0.4:
                faults.down(whose(rng))
            stage.run_for(rng.choice([0, 0.01, 0.1, 0.5]))
            records[second] = stage.end_lives(second, lanes, how[second], most)
        if rng.random() < 0.5:
            stage.heal()
        named = {host: stage.hosts[host](f"app.names_of({lanes})") for host in "ab"}
        for host, peer in rng.choice([("ab", "ba"), ("ba", "ab")]):
            stage.hosts[host](f"app.connect_again({lanes}, {named[peer]!r})", stage.deadline_s)
            stage.run_for(rng.choice([0, 0, 0.02, 0.3]))
    stage.judge_records(lanes, records, drained=all(one == "fail" for one in how.values()))
    stage.heal()
    stage.wait_protected(lanes)
    stage.ask(f"app.rest({lanes}, False)")
    stage.wait_moving()
    stage.wait_keys()


@step(survives=True)
def reset_and_connected(stage: Stage, rng: random.Random) -> None:
    """Some lanes go through RESET with work outstanding, and are connected and protected again."""
    lanes = some(stage, rng)
    if lanes:
        weather(stage, rng)
        new_lives(stage, rng, lanes, {"a": "reset", "b": "reset"})


@step(survives=True)
def failed_and_drained(stage: Stage, rng: random.Random) -> None:
    """Some lanes go to ERR with work outstanding, until every WR has its WC; then through RESET to a new life."""
    lanes = some(stage, rng)
    if lanes:
        weather(stage, rng)
        new_lives(stage, rng, lanes, {"a": "fail", "b": rng.choice(["fail", "fail", "reset"])})


@step(survives=True)
def closed_under_traffic(stage: Stage, rng: random.Random) -> None:
    """Some lanes are closed with work outstanding, and their memory is used for something else at once."""
    lanes = some(stage, rng)
    if lanes:
        weather(stage, rng)
        ways = ["close", "close", "close_mr"]
        how = {"a": rng.choice(ways), "b": rng.choice([*ways, "fail", "reset"])}
        new_lives(stage, rng, lanes, how if rng.random() < 0.5 else {"a": how["b"], "b": how["a"]})
        for found in stage.ask("app.check_relics()"):
            if found:
                raise stage.error(str(found))


@step(survives=True)
def patience_changed(stage: Stage, rng: random.Random) -> None:
    """RTS to RTS under traffic, with a failure or without: how long a peer waits for a receive."""
    lanes = some(stage, rng)
    for _ in range(stage.scaled(6) if lanes else 0):
        stage.hosts[rng.choice("ab")](
            f"app.modify({lanes}, 'IBV_QP_MIN_RNR_TIMER', min_rnr_timer={rng.randrange(1, 18)})"
        )
        if rng.random() < 0.4:
            faults.down(whose(rng))
            stage.run_for(rng.choice([0, 0.01, 0.3]))
            stage.hosts[rng.choice("ab")](f"app.modify({lanes}, 'IBV_QP_MIN_RNR_TIMER', min_rnr_timer=12)")
            stage.heal()


@step(survives=True)
def right_withdrawn(stage: Stage, rng: random.Random) -> None:
    """RTS to RTS takes the right to WRITE, or to READ, from the peer: on whatever path it then tries, it is refused.

    Or it is given back first: then it works, on whatever path.
    """
    lanes = some(stage, rng, among=stage.hosts["a"]("app.signaling()"))[:3]
    if not lanes:
        return
    stage.rest(lanes)
    owner = rng.choice("ab")
    write = rng.random() < 0.5
    rights = stage.rights(without="WRITE" if write else "READ")
    moves = rng.choice([(), ("away",), ("away", "home"), ("away",)])
    before = rng.randrange(len(moves) + 1)  # of the moves, so many come before the right goes
    given_back = rng.random() < 0.4
    back_after = rng.randrange(before, len(moves) + 1)
    target = whose(rng)
    for at in range(len(moves) + 1):
        if at == before:
            stage.hosts[owner](f"app.modify({lanes}, 'IBV_QP_ACCESS_FLAGS', qp_access_flags={rights})")
        if at == back_after and given_back:
            stage.hosts[owner](
                f"app.modify({lanes}, 'IBV_QP_ACCESS_FLAGS', qp_access_flags={stage.rights()})"
            )
        if moves[at : at + 1] == ("away",):
            faults.down(target)
            stage.wait_away()
        elif moves[at : at + 1] == ("home",):
            faults.up(target)
            stage.wait_home()
    if not given_back:
        stage.ask(f"app.leave({lanes})")
    stage.try_right(owner, lanes, write, given_back)
    if given_back:
        stage.ask(f"app.rest({lanes}, False)")
    else:
        stage.heal()
        new_lives(stage, rng, lanes, {"a": "reset", "b": "reset"})


# ---- on purpose ------------------------------------------------------------------------------------------------------


@step(survives=True)
def migrated(stage: Stage, rng: random.Random) -> None:
    """Some lanes are sent to a backup and called home, sometimes while a path fails."""
    if not stage.lane_count:
        return
    lanes = rng.sample(range(stage.lane_count), rng.randrange(1, min(stage.lane_count, 8) + 1))
    k = rng.randrange(1, stage.plan.nics)
    leaving, returning = rng.choice("ab"), rng.choice("ab")
    stage.hosts[leaving](f"app.migrate({lanes}, {k})")
    stage.run_for(rng.choice([0, 0.01, 0.1, 0.5]))
    if rng.random() < 0.4:
        faults.down(whose(rng, rng.choice([0, k])))
        stage.run_for(short(rng))
        stage.heal()
    # Where wishes cross, the greater pair holds: only who has heard of the other's can undo it.
    stage.wait_preferred(returning, lanes, k)
    stage.hosts[returning](f"app.migrate({lanes}, 0)")


@step(survives=True)
def quiet(stage: Stage, rng: random.Random) -> None:
    """Nothing at all; or a failure while nobody posts anything."""
    if rng.random() < 0.5:
        stage.run_for(1)
        return
    stage.send(False)
    stage.wait_settled()
    target = whose(rng)
    faults.down(target)
    stage.wait_away()
    faults.up(target)
    stage.wait_home()
    stage.send(True)
