/* SPDX-License-Identifier: BSD-3-Clause
 *
 * SWITCH, ARM and MOVE as docs/protocol.md has them, small enough to look at every interleaving.
 *
 * Side 0 sends N messages to side 1; SWITCH moves both directions, MOVE that one; side 0 is the initiator of ARM. The
 * NIC is reduced to what the protocol relies on: a QP takes only packets of its own life (`arm`), in order, and none
 * after its fence. Packets stay in the network when their sender gave up; acknowledgements may come too late. Control
 * messages carry the whole state: LOSSES of them vanish, DUPLICATES come twice, and whoever waits says its own again
 * when nothing else can happen. Paths fail FAULTS times, at any moment, and heal.
 *
 * Checked: each message is taken once and in order (assertions), no deadlock (invalid end states: a run may end only
 * with everything delivered and side 0 at home, or with both sides over), and no livelock (there is no cycle at all:
 * compile with -DNP). Names of states, phases and steps are those of state_machine.py and messages.py.
 */

#ifndef PAIRS
#define PAIRS 2
#endif
#ifndef N
#define N 2
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef DUPLICATES
#define DUPLICATES 1
#endif
#ifndef EPOCHS
#define EPOCHS 3
#endif
#ifndef ARMS
#define ARMS 5
#endif
#define NONE 255

mtype:state = { DEFAULT, FALLBACK, WAIT_SIGNALED, WAIT_DRAINED };
mtype:phase = { START, FENCED, READY, ABORT };
mtype:step = { SYNC, REQ, REP, REJ, MOVE, MOVED, REFUSED };

#define I(s, k) ((s) * PAIRS + (k))

mtype:state state[2] = DEFAULT;
byte epoch[2];
byte target[2];
bool switching[2];
mtype:phase phase[2] = START;
bool over[2];
byte send_pair[2];
byte recv_pair[2];
byte reset_arm[2] = NONE;  /* the present SWITCH reset its target under this arm */
bool heard[2];             /* of the peer, in the present (epoch, target): */
mtype:phase peer_phase[2] = START;
byte peer_arm[2];
bool peer_clean[2];
byte peer_rx[2];

byte arm[2 * PAIRS];       /* one side's QP of one pair */
bool rts[2 * PAIRS];
bool clean[2 * PAIRS];
bool used[2 * PAIRS];
bool stale[2 * PAIRS];     /* receives that a MOVE left behind */
bool asking[PAIRS];        /* ARM: side 0 reset its QP and waits for REP */

byte posted, wired, acked;
byte arrived, rx;           /* at the NIC; polled */
byte number, moved_in;
bool told;                 /* MOVE was said: tx is fixed */

bool up[PAIRS] = true;
byte faults = FAULTS;
byte losses = LOSSES;
byte duplicates = DUPLICATES;
bool spent;                /* a bound of the model was reached: this run proves nothing more */

chan wire[PAIRS] = [N] of { byte, byte };  /* message, arm */
chan to[2] = [3] of { mtype:step, byte, byte, mtype:phase, byte, bool, byte };

byte k, t, e, p, a, n;     /* scratch, zeroed after use */
mtype:step st; mtype:phase ph; bool c;

inline say(s, what, ee, pp, pph, aa, cc, nn) {
  if
  :: !up[pp] || full(to[1 - s]) -> skip
  :: up[pp] && nfull(to[1 - s]) -> to[1 - s]!what, ee, pp, pph, aa, cc, nn
  :: up[pp] && losses > 0 -> losses--
  fi
}

#define OWN(s) arm[I(s, target[s])]
#define IS_CLEAN(s) (clean[I(s, target[s])] || (phase[s] == READY && reset_arm[s] == OWN(s)))
#define FIT(s) (clean[I(s, target[s])] || reset_arm[s] == OWN(s))
#define OURS(s) (FIT(s) -> OWN(s) : OWN(s) + 1)
#define THEIRS(s) (!heard[s] -> 0 : ((peer_clean[s] || peer_phase[s] != START) -> peer_arm[s] : peer_arm[s] + 1))
#define GOAL(s) (OURS(s) > THEIRS(s) -> OURS(s) : THEIRS(s))
#define IDLE(s, k) (send_pair[s] != (k) && recv_pair[s] != (k))
#define RANK(q) (q == READY -> 3 : (q == FENCED -> 2 : 1))

inline say_sync(s) {
  say(s, SYNC, epoch[s], target[s], phase[s], OWN(s), IS_CLEAN(s), rx * (s))
}

inline say_abort(s) {
  /* over every pair, and said again to whoever still speaks: it does get there */
  if
  :: over[1 - s] || full(to[1 - s]) -> skip
  :: !over[1 - s] && nfull(to[1 - s]) -> to[1 - s]!SYNC, epoch[s], 0, ABORT, 0, false, 0
  fi
}

inline abort(s) {
  over[s] = true; switching[s] = false; phase[s] = ABORT; state[s] = DEFAULT; heard[s] = false;
  k = 0;
  do
  :: k < PAIRS -> rts[I(s, k)] = false; clean[I(s, k)] = false; k++
  :: else -> break
  od;
  k = 0;
  say_abort(s)
}

/* Close, cancel ARM and MOVE, fence every used pair: one step, because nothing of it depends on the peer. */
inline begin(s, ee, tt) {
  epoch[s] = ee; target[s] = tt; switching[s] = true; phase[s] = START; state[s] = FALLBACK;
  heard[s] = false; peer_phase[s] = START; peer_arm[s] = 0; peer_clean[s] = false; peer_rx[s] = 0;
  reset_arm[s] = NONE;
  if :: s == 0 -> told = false :: else -> rx = arrived /* the fence drains */ fi;
  k = 0;
  do
  :: k < PAIRS ->
       if :: s == 0 && asking[k] -> asking[k] = false; clean[I(0, k)] = false :: else -> skip fi;
#ifdef MUTATION_PEER_DOES_NOT_FENCE
       if :: used[I(s, k)] && s == 0 -> rts[I(s, k)] = false :: else -> skip fi;
       if :: used[I(s, k)] -> clean[I(s, k)] = false :: else -> skip fi;
#else
       if :: used[I(s, k)] -> rts[I(s, k)] = false; clean[I(s, k)] = false :: else -> skip fi;
#endif
       k++
  :: else -> break
  od;
  k = 0;
  say_sync(s)
}

inline next_attempt(s) {
  if
  :: epoch[s] < EPOCHS ->
       select_other(send_pair[s]);
       begin(s, epoch[s] + 1, t);
       t = 0
  :: else -> abort(s)   /* no pair left: bounded here by the number of epochs */
  fi
}

/* t = some pair other than `left`: both sides may choose differently. */
inline select_other(left) {
  t = (left == 0 -> 1 : 0);
#if PAIRS > 2
  if :: skip :: t = (left == 2 -> 1 : 2) fi
#endif
}

inline reset(s, kk, aa) {
  arm[I(s, kk)] = aa; rts[I(s, kk)] = false; clean[I(s, kk)] = false; used[I(s, kk)] = false; stale[I(s, kk)] = false
}

inline on_sync(s) {
  if
  :: over[s] -> if :: ph != ABORT -> say_abort(s) :: else -> skip fi
  :: !over[s] && ph == ABORT -> abort(s)
  :: !over[s] && ph != ABORT && (e > epoch[s] || (e == epoch[s] && p > target[s] && e > 0)) ->
       begin(s, e, p);
       heard[s] = true; peer_phase[s] = ph; peer_arm[s] = a; peer_clean[s] = c; peer_rx[s] = n
  :: !over[s] && ph != ABORT && e == epoch[s] && p == target[s] && e > 0 ->
       if
       :: !heard[s] || a > peer_arm[s] || (a == peer_arm[s] && RANK(ph) >= RANK(peer_phase[s])) ->
            heard[s] = true; peer_phase[s] = ph; peer_arm[s] = a; peer_clean[s] = c; peer_rx[s] = n
       :: else -> skip
       fi;
       if :: !switching[s] && ph != READY -> say_sync(s) :: else -> skip fi
  :: else -> if :: epoch[s] > 0 && e < epoch[s] && !over[s] -> say_sync(s) :: else -> skip fi
  fi
}

inline on_arm(s) {
  if
  :: s == 1 && st == REQ && !over[1] && !switching[1] && e == epoch[1] ->
       if
       :: a > arm[I(1, p)] && IDLE(1, p) ->
            reset(1, p, a);
            rts[I(1, p)] = true;
            say(1, REP, e, p, START, a, false, 0)
       :: a == arm[I(1, p)] && !clean[I(1, p)] && !used[I(1, p)] && rts[I(1, p)] ->  /* a duplicate never resets */
            say(1, REP, e, p, START, a, false, 0)
       :: a == arm[I(1, p)] && (clean[I(1, p)] || used[I(1, p)] || !rts[I(1, p)]) -> skip
       :: a < arm[I(1, p)] || (a > arm[I(1, p)] && !IDLE(1, p)) ->
            n = a;
            if :: arm[I(1, p)] > a -> a = arm[I(1, p)] :: else -> skip fi;
            say(1, REJ, e, p, START, a, false, n)
       fi
  :: s == 0 && st == REP && !over[0] && asking[p] && a == arm[I(0, p)] && e == epoch[0] -> rts[I(0, p)] = true
  :: s == 0 && st == REJ && !over[0] && asking[p] && n == arm[I(0, p)] && e == epoch[0] ->
       asking[p] = false; arm[I(0, p)] = a; rts[I(0, p)] = false
  :: else -> skip
  fi
}

inline on_move(s) {
  if
  :: s == 1 && st == MOVE && !over[1] && !switching[1] && e == epoch[1] ->
       if
       :: moved_in == (n / 16) -> say(1, MOVED, e, p, START, a, false, n)
       :: moved_in < (n / 16) && (arm[I(1, p)] != a || stale[I(1, p)] || !rts[I(1, p)] ||
            !(clean[I(1, p)] || used[I(1, p)])) ->
            if
            :: arm[I(1, p)] == a && rts[I(1, p)] && !clean[I(1, p)] && !used[I(1, p)] -> skip  /* ARM nearly through */
            :: else -> say(1, REFUSED, e, p, START, a, false, n)
            fi
#ifdef MUTATION_MOVED_BEFORE_THE_LAST
       :: moved_in < (n / 16) && arm[I(1, p)] == a && rts[I(1, p)] && !stale[I(1, p)] && (clean[I(1, p)] || used[I(1, p)]) ->
#else
       :: moved_in < (n / 16) && arm[I(1, p)] == a && rts[I(1, p)] && !stale[I(1, p)] && (clean[I(1, p)] || used[I(1, p)]) &&
            rx == (n % 16) ->
#endif
            assert(rx == arrived);   /* what was not polled yet would be taken for stale */
            stale[I(1, recv_pair[1])] = true;
            recv_pair[1] = p; used[I(1, p)] = true; clean[I(1, p)] = false; stale[I(1, p)] = false;
            moved_in = n / 16;
            say(1, MOVED, e, p, START, a, false, n)
       :: else -> skip   /* the last message is not there yet: the MOVE comes again */
       fi
  :: s == 0 && st == MOVED && !over[0] && told && n / 16 == number && e == epoch[0] && !switching[0] ->
       told = false; send_pair[0] = p; used[I(0, p)] = true; clean[I(0, p)] = false;
       state[0] = (p == 0 -> DEFAULT : FALLBACK)
  :: s == 0 && st == REFUSED && !over[0] && told && n / 16 == number && e == epoch[0] && !switching[0] ->
       told = false; clean[I(0, p)] = false;
       state[0] = (send_pair[0] == 0 -> DEFAULT : FALLBACK)
  :: else -> skip
  fi
}

#define BEHIND(s) (!(FIT(s) && OWN(s) == GOAL(s)))
#define SEES_FENCED(s) (heard[s] && peer_phase[s] != START && peer_arm[s] == OWN(s))
#define SEES_READY(s) (heard[s] && peer_phase[s] == READY && peer_arm[s] == OWN(s))
#define CAN_ADVANCE(s) (!over[s] && switching[s] && (BEHIND(s) || phase[s] == START || \
            (phase[s] == FENCED && SEES_FENCED(s)) || (phase[s] == READY && SEES_READY(s))))

inline advance(s) {
  if
  :: BEHIND(s) ->
       if
       :: GOAL(s) < ARMS ->
            n = GOAL(s); phase[s] = START; reset(s, target[s], n); reset_arm[s] = n
       :: else -> spent = true
       fi
  :: !BEHIND(s) && phase[s] == START && !clean[I(s, target[s])] -> phase[s] = FENCED; say_sync(s)
  :: !BEHIND(s) && ((phase[s] == START && clean[I(s, target[s])]) || (phase[s] == FENCED && SEES_FENCED(s))) ->
       reset_arm[s] = OWN(s); phase[s] = READY;
       rts[I(s, target[s])] = true; clean[I(s, target[s])] = false; used[I(s, target[s])] = true;
       recv_pair[s] = target[s]; stale[I(s, target[s])] = false;
       say_sync(s)
  :: !BEHIND(s) && phase[s] == READY && SEES_READY(s) ->
       if
       :: s == 0 -> assert(acked <= peer_rx[0] && peer_rx[0] <= wired); wired = peer_rx[0]; acked = peer_rx[0]
       :: else -> skip
       fi;
       switching[s] = false; send_pair[s] = target[s]; used[I(s, target[s])] = true;
       state[s] = (target[s] == 0 -> DEFAULT : FALLBACK);
       say_sync(s)
  fi;
  n = 0
}

inline receive(s) {
  if
  :: duplicates > 0 -> to[s]?<st, e, p, ph, a, c, n>; duplicates--
  :: to[s]?st, e, p, ph, a, c, n
  fi;
  if
  :: st == SYNC -> on_sync(s)
  :: (st == REQ || st == REP || st == REJ) -> on_arm(s)
  :: else -> on_move(s)
  fi;
  st = SYNC; e = 0; p = 0; ph = START; a = 0; c = false; n = 0
}

/* A packet arrives at side 1 on pair q: in order within its life, and only where receives are. */
inline deliver(q) {
  if
  :: !over[1] && rts[I(1, q)] && arm[I(1, q)] == a ->
       assert(!stale[I(1, q)]);
       assert(t == arrived + 1);
       arrived++
  :: else -> skip
  fi;
  t = 0; a = 0
}

inline begin_arm(q) {
  if
  :: arm[I(0, q)] + 1 < ARMS ->
       n = arm[I(0, q)] + 1; reset(0, q, n); asking[q] = true; n = 0;
       say(0, REQ, epoch[0], q, START, arm[I(0, q)], false, 0)
  :: else -> spent = true
  fi
}

/* number and tx share a byte: number * 16 + tx */
inline say_move(sent) { say(0, MOVE, epoch[0], 0, START, arm[I(0, 0)], false, number * 16 + sent) }

#define OPEN (!over[0] && !switching[0] && state[0] != WAIT_DRAINED)
#define WORKS(q) (up[q] && arm[I(0, q)] == arm[I(1, q)] && rts[I(0, q)] && rts[I(1, q)])
#define DELIVERED (posted == N && wired == N && acked == N && rx == N)
#define QUIET (empty(to[0]) && empty(to[1]))
#define AT_HOME (!switching[0] && !switching[1] && state[0] == DEFAULT && send_pair[0] == 0 && recv_pair[1] == 0)

init {
  atomic {
    rts[I(0, 0)] = true; rts[I(1, 0)] = true; used[I(0, 0)] = true; used[I(1, 0)] = true;
    k = 1;
    do  /* the backups are fit */
    :: k < PAIRS -> arm[I(0, k)] = 1; arm[I(1, k)] = 1; rts[I(0, k)] = true; rts[I(1, k)] = true;
         clean[I(0, k)] = true; clean[I(1, k)] = true; k++
    :: else -> break
    od;
    k = 0
  }
  do
  /* the application; in WAIT_SIGNALED the next WR is the fence */
  :: atomic { posted < N && !over[0] -> posted++ }
  :: atomic { OPEN && wired < posted && rts[I(0, send_pair[0])] && nfull(wire[send_pair[0]]) ->
       wired++; wire[send_pair[0]]!wired, arm[I(0, send_pair[0])] }

  /* the network and the NICs */
  :: atomic { nempty(wire[0]) && up[0] -> wire[0]?t, a; deliver(0) }
  :: atomic { nempty(wire[1]) && up[1] -> wire[1]?t, a; deliver(1) }
#if PAIRS > 2
  :: atomic { nempty(wire[2]) && up[2] -> wire[2]?t, a; deliver(2) }
#endif
  :: atomic { !over[0] && !switching[0] && acked < arrived && arrived <= wired && WORKS(send_pair[0]) -> acked = arrived }
  :: atomic { faults > 0 && up[0] -> faults--; up[0] = false }
  :: atomic { faults > 0 && up[1] -> faults--; up[1] = false }
  :: atomic { !up[0] -> up[0] = true }
  :: atomic { !up[1] -> up[1] = true }

  :: atomic { !over[1] && rx < arrived -> rx++ }   /* the application polls, sooner or later */

  /* SWITCH */
  :: atomic { !over[0] && !switching[0] && wired > acked && !WORKS(send_pair[0]) -> next_attempt(0) }
  :: atomic { !over[1] && !switching[1] && !up[recv_pair[1]] -> next_attempt(1) }
  :: atomic { CAN_ADVANCE(0) && !spent -> advance(0) }
  :: atomic { CAN_ADVANCE(1) && !spent -> advance(1) }
  :: atomic { !over[0] && switching[0] && !up[target[0]] -> next_attempt(0) }
  :: atomic { !over[1] && switching[1] && !up[target[1]] -> next_attempt(1) }

  /* ARM */
  :: atomic { !over[0] && !switching[0] && up[0] && IDLE(0, 0) && !clean[I(0, 0)] && !asking[0] && !spent ->
       begin_arm(0) }
  :: atomic { !over[0] && !switching[0] && asking[0] && WORKS(0) && !used[I(1, 0)] -> asking[0] = false; clean[I(0, 0)] = true }
  :: atomic { !over[1] && !switching[1] && !clean[I(1, 0)] && !used[I(1, 0)] && WORKS(0) -> clean[I(1, 0)] = true }
  /* the responder's half failed: it says so */
  :: atomic { timeout && !over[0] && !switching[0] && !told && state[0] == FALLBACK && clean[I(0, 0)] && IDLE(1, 0) &&
            !clean[I(1, 0)] && arm[I(1, 0)] >= arm[I(0, 0)] -> arm[I(0, 0)] = arm[I(1, 0)]; clean[I(0, 0)] = false }

  /* MOVE home */
  :: atomic { !over[0] && !switching[0] && state[0] == FALLBACK && send_pair[0] != 0 && clean[I(0, 0)] && up[0] ->
       state[0] = WAIT_SIGNALED }
  :: atomic { !over[0] && state[0] == WAIT_SIGNALED && wired == posted -> state[0] = WAIT_DRAINED }
#ifdef MUTATION_RELEASE_BEFORE_THE_DRAIN
  :: atomic { !over[0] && state[0] == WAIT_DRAINED && !told && !switching[0] ->
       if :: number < 7 -> number++; told = true; say_move(acked) :: else -> spent = true fi }
#else
  :: atomic { !over[0] && state[0] == WAIT_DRAINED && !told && acked == wired && !switching[0] && !spent ->
       if :: number < 7 -> number++; told = true; say_move(wired) :: else -> spent = true fi }
#endif

  /* what was said arrives */
  :: atomic { nempty(to[0]) -> receive(0) }
  :: atomic { nempty(to[1]) -> receive(1) }

  /* nothing else can happen: say it again */
  :: atomic { timeout && QUIET && !spent ->
       if
       :: !over[0] && switching[0] -> say_sync(0)
       :: !over[1] && switching[1] -> say_sync(1)
       :: !over[0] && over[1] -> say_abort(1)
       :: !over[1] && over[0] -> say_abort(0)
       :: !over[0] && !over[1] && asking[0] && !switching[0] && !switching[1] && !rts[I(0, 0)] ->
            say(0, REQ, epoch[0], 0, START, arm[I(0, 0)], false, 0)
       :: !over[0] && told && !switching[0] && !switching[1] -> say_move(wired)
       :: (over[0] && over[1]) || (DELIVERED && AT_HOME) -> break
       fi }
  :: atomic { spent -> break }
  od;
  assert(spent || (over[0] && over[1]) || (DELIVERED && AT_HOME))
}
