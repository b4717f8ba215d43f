/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * SWITCH in both directions at once, with the question before it (ASK, REFUSE), as in switch.py. failover.pml has the
 * other procedures and the way home; here both sides send, both may begin, each towards any pair.
 *
 * Each side sends N messages. A QP takes only packets of its own life (`arm`) and none after its fence; packets stay in
 * the network when their sender gave up. Paths fail FAULTS times at any moment and heal; HINTS are port events without
 * a failure; LOSSES control messages vanish and DUPLICATES come once more, at any later time. With CQE_LOST one message
 * is acknowledged by a NIC that dies before its completion is written.
 *
 * Checked: each message is taken once and in order; `acked <= rx <= wired` unless a completion was lost, and then
 * nobody ends in silence; no side begins a SWITCH that is not newer than all it began before; every run ends with all
 * delivered and both sides on the same pair and epoch, or with both sides over (no other end state is valid).
 */
#ifndef PAIRS
#define PAIRS 2
#endif
#ifndef N
#define N 1
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef HINTS
#define HINTS 0
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
#ifndef CQE_LOST
#define CQE_LOST 0
#endif
#ifndef DEPTH
#define DEPTH 2  /* control messages under way in one direction; further ones are lost */
#endif
#define NONE 255

mtype:phase = { ASK, START, FENCED, READY, REFUSE, ABORT };

#define I(s, k) ((s) * PAIRS + (k))

byte epoch[2];
byte target[2];            /* of the present or last SWITCH, or of the question */
bool kept[2];              /* there is such a SWITCH or question */
byte before[2] = NONE;     /* while asking: target of the last finished SWITCH; NONE: there was none */
bool switching[2];         /* not done */
bool asking[2];
mtype:phase phase[2] = START;
bool over[2];
byte pair[2];              /* where sends and receives are */
byte newest[2];            /* the greatest (epoch, target) that was begun */
byte reset_arm[2] = NONE;
bool heard[2];
mtype:phase peer_phase[2] = START;
byte peer_arm[2];
bool peer_clean[2];
byte peer_rx[2];
byte final_rx[2];

byte arm[2 * PAIRS];
bool live[2 * PAIRS];      /* takes packets */
bool clean[2 * PAIRS];
bool used[2 * PAIRS];

byte wired[2], acked[2], rx[2];
bool unsafe[2];            /* an atomic is outstanding */

bool up[PAIRS] = true;
byte faults = FAULTS, hints = HINTS, losses = LOSSES, duplicates = DUPLICATES;
byte cqe_lost = CQE_LOST;
bool vanished;             /* a message was acknowledged and will never be seen */

chan wire[2 * PAIRS] = [N] of { byte, byte };
chan to[2] = [DEPTH] of { mtype:phase, byte, byte, byte, bool, byte };

byte k, t, e, p, a, n;
mtype:phase ph;
bool c;

#define OWN(s) arm[I(s, target[s])]
#define FIT(s) (clean[I(s, target[s])] || reset_arm[s] == OWN(s))
#define OURS(s) (FIT(s) -> OWN(s) : OWN(s) + 1)
#define THEIRS(s) (!heard[s] -> 0 : ((peer_clean[s] || peer_phase[s] != START) -> peer_arm[s] : peer_arm[s] + 1))
#define GOAL(s) (OURS(s) > THEIRS(s) -> OURS(s) : THEIRS(s))
#define SAID_CLEAN(s) (clean[I(s, target[s])] || (reset_arm[s] == OWN(s) && phase[s] == READY))
#define BEHIND(s) (!(FIT(s) && OWN(s) == GOAL(s)))
#define SEES(s, q) (heard[s] && peer_phase[s] == q && peer_arm[s] == OWN(s))
#define CAN_ADVANCE(s) (!over[s] && switching[s] && !asking[s] && (BEHIND(s) || phase[s] == START \
  || (phase[s] == FENCED && (SEES(s, FENCED) || SEES(s, READY))) || (phase[s] == READY && SEES(s, READY))))
#define RANK(q) (q == READY -> 3 : (q == FENCED -> 2 : 1))
#define OPEN(s) (!over[s] && !switching[s])
#define AT(ee, tt) ((ee) * PAIRS + (tt) + 1)
#define DELIVERED(s) (wired[s] == N && acked[s] == N && rx[1 - s] == N)

inline put(s, what, ee, tt, aa, cc, rr) {
  if
  :: !up[tt] || full(to[1 - s]) -> skip
  :: up[tt] && nfull(to[1 - s]) -> to[1 - s]!what, ee, tt, aa, cc, rr
  :: up[tt] && losses > 0 -> losses--
  fi
}
inline say(s) {
  if
  :: asking[s] -> put(s, ASK, epoch[s] + 1, target[s], OWN(s), SAID_CLEAN(s), 0)
  :: else -> put(s, phase[s], epoch[s], target[s], OWN(s), SAID_CLEAN(s), final_rx[s])
  fi
}
inline say_over(s) {  /* over every pair, and again to whoever still speaks */
  if
  :: nfull(to[1 - s]) && !over[1 - s] -> to[1 - s]!ABORT, epoch[s], 0, 0, false, 0
  :: full(to[1 - s]) || over[1 - s] -> skip
  fi
}
inline abort(s) {
  over[s] = true; switching[s] = false; asking[s] = false; heard[s] = false; phase[s] = ABORT;
  k = 0;
  do :: k < PAIRS -> live[I(s, k)] = false; clean[I(s, k)] = false; k++ :: else -> break od;
  k = 0;
  say_over(s)
}
/* Close, fence every used pair: nothing of it depends on the peer. */
inline begin(s, ee, tt) {
  assert(AT(ee, tt) > newest[s]);
  newest[s] = AT(ee, tt);
  epoch[s] = ee; target[s] = tt; kept[s] = true; switching[s] = true; asking[s] = false; phase[s] = START;
  before[s] = NONE;
  heard[s] = false; peer_phase[s] = START; peer_arm[s] = 0; peer_clean[s] = false; peer_rx[s] = 0; reset_arm[s] = NONE;
  k = 0;
  do
  :: k < PAIRS ->
#ifdef MUTATION_SKIP_PEER_FENCE
       if :: used[I(s, k)] -> live[I(s, k)] = (s == 1 && live[I(s, k)]); clean[I(s, k)] = false :: else -> skip fi;
#else
       if :: used[I(s, k)] -> live[I(s, k)] = false; clean[I(s, k)] = false :: else -> skip fi;
#endif
       k++
  :: else -> break
  od;
  k = 0;
  final_rx[s] = rx[s];
  if :: unsafe[s] -> abort(s) :: else -> say(s) fi
}
inline some_pair() {
  if
  :: t = 0
  :: t = 1
#if PAIRS > 2
  :: t = 2
#endif
  fi
}
inline next_attempt(s) {
  if
  :: epoch[s] < EPOCHS -> some_pair(); begin(s, epoch[s] + 1, t); t = 0
  :: else -> abort(s)  /* no pair left; bounded here by the epochs */
  fi
}
inline drop_ask(s) {
  asking[s] = false; switching[s] = false;
#ifdef MUTATION_FORGET_THE_SWITCH_BEFORE
  before[s] = NONE;
#endif
  /* The finished SWITCH answers late messages again; all else of it was left alone. */
  if
  :: before[s] == NONE -> kept[s] = false; target[s] = pair[s]
  :: else -> target[s] = before[s]; before[s] = NONE
  fi
}
inline learn(s) { heard[s] = true; peer_phase[s] = ph; peer_arm[s] = a; peer_clean[s] = c; peer_rx[s] = n }

#define MINE(s) (!asking[s] && kept[s] -> AT(epoch[s], target[s]) : AT(epoch[s], 0) - 1)
inline on_sync(s) {
  if
  :: over[s] -> if :: ph != ABORT -> say_over(s) :: else -> skip fi
  :: !over[s] && ph == ABORT -> if :: e >= epoch[s] -> abort(s) :: else -> skip fi
  :: !over[s] && ph == REFUSE ->
       if :: asking[s] && e == epoch[s] + 1 && p == target[s] -> drop_ask(s) :: else -> skip fi
  :: !over[s] && ph != ABORT && ph != REFUSE ->
       if
       :: asking[s] && AT(e, p) < AT(epoch[s] + 1, target[s]) -> skip
       :: asking[s] && AT(e, p) == AT(epoch[s] + 1, target[s]) ->
            begin(s, e, p);
            if :: ph != ASK && !over[s] -> learn(s) :: else -> skip fi
       :: !(asking[s] && AT(e, p) <= AT(epoch[s] + 1, target[s])) && AT(e, p) > MINE(s) ->
            if
            :: ph == ASK && unsafe[s] -> put(s, REFUSE, e, p, 0, false, 0)
            :: else ->
                 begin(s, e, p);
                 if :: ph != ASK && !over[s] -> learn(s) :: else -> skip fi
            fi
       :: !asking[s] && kept[s] && AT(e, p) < MINE(s) -> say(s)
       :: !asking[s] && kept[s] && AT(e, p) == MINE(s) ->
            if
            :: ph == ASK -> say(s)
            :: else ->
#ifdef MUTATION_STALE_PHASE
                 learn(s);
#else
                 if
                 :: !heard[s] || a > peer_arm[s] || (a == peer_arm[s] && RANK(ph) >= RANK(peer_phase[s])) -> learn(s)
                 :: else -> skip
                 fi;
#endif
                 if :: !switching[s] && switching[1 - s] -> say(s) :: else -> skip fi  /* not settled */
            fi
       :: else -> skip
       fi
  fi
}
inline receive(s) {
  if
  :: duplicates > 0 -> to[s]?<ph, e, p, a, c, n>; duplicates--
  :: to[s]?ph, e, p, a, c, n
  fi;
#ifdef MUTATION_IGNORE_EPOCHS
  if :: (ph == READY || ph == FENCED) && switching[s] && !asking[s] -> e = epoch[s]; p = target[s] :: else -> skip fi;
#endif
  on_sync(s);
  ph = START; e = 0; p = 0; a = 0; c = false; n = 0
}
inline advance(s) {
  if
  :: BEHIND(s) ->
       n = GOAL(s); phase[s] = START; reset_arm[s] = n;
       arm[I(s, target[s])] = n; live[I(s, target[s])] = false; clean[I(s, target[s])] = false;
       used[I(s, target[s])] = false; n = 0
  :: !BEHIND(s) && phase[s] == START && !clean[I(s, target[s])] -> phase[s] = FENCED; say(s)
  :: !BEHIND(s) && ((phase[s] == START && clean[I(s, target[s])])
       || (phase[s] == FENCED && (SEES(s, FENCED) || SEES(s, READY)))) ->
       reset_arm[s] = OWN(s); phase[s] = READY;
       live[I(s, target[s])] = true; clean[I(s, target[s])] = false; used[I(s, target[s])] = true;
       say(s)
  :: !BEHIND(s) && phase[s] == READY && SEES(s, READY) ->
       if
       :: acked[s] <= peer_rx[s] && peer_rx[s] <= wired[s] ->
            switching[s] = false; pair[s] = target[s];
#ifdef MUTATION_TRIM_ONE_TOO_MANY
            wired[s] = (peer_rx[s] < wired[s] -> peer_rx[s] + 1 : peer_rx[s]); acked[s] = wired[s];
#endif
#ifdef MUTATION_NO_TRIM
            wired[s] = acked[s];
#endif
#if !defined(MUTATION_TRIM_ONE_TOO_MANY) && !defined(MUTATION_NO_TRIM)
            wired[s] = peer_rx[s]; acked[s] = peer_rx[s];
#endif
            say(s)
       :: else ->
            assert(vanished && peer_rx[s] <= wired[s]);
#ifdef MUTATION_SILENT_LOSS
            switching[s] = false; pair[s] = target[s]; wired[s] = peer_rx[s]; acked[s] = peer_rx[s]; say(s)
#else
            abort(s)
#endif
       fi
  fi
}
inline arrive(s, q) {  /* at side s */
  if
  :: !over[s] && live[I(s, q)] && arm[I(s, q)] == a -> assert(t == rx[s] + 1); rx[s]++
  :: !over[s] && live[I(s, q)] && arm[I(s, q)] == a && cqe_lost > 0 && !OPEN(1 - s) == 0 && t == rx[s] + 1 ->
       cqe_lost--; acked[1 - s] = t; live[I(s, q)] = false; vanished = true; up[q] = false
  :: else -> skip
  fi;
  t = 0; a = 0
}
#define PATH(q) (up[q] && arm[I(0, q)] == arm[I(1, q)] && live[I(0, q)] && live[I(1, q)])
#define SENDS(s) :: atomic { OPEN(s) && wired[s] < N && live[I(s, pair[s])] && nfull(wire[I(s, pair[s])]) -> \
       wired[s]++; wire[I(s, pair[s])]!wired[s], arm[I(s, pair[s])] } \
  :: atomic { OPEN(s) && acked[s] < rx[1 - s] && rx[1 - s] <= wired[s] && PATH(pair[s]) -> \
       acked[s] = rx[1 - s]; unsafe[s] = false }
#define ARRIVES(s, q) :: atomic { up[q] && nempty(wire[I(1 - s, q)]) -> wire[I(1 - s, q)]?t, a; arrive(s, q) }
#define FAILS(q) :: atomic { faults > 0 && up[q] -> faults--; up[q] = false } :: atomic { !up[q] -> up[q] = true }
#define SWITCHES(s) :: atomic { OPEN(s) && !PATH(pair[s]) && (wired[s] > acked[s] || !up[pair[s]]) -> next_attempt(s) } \
  :: atomic { hints > 0 && OPEN(s) && !unsafe[s] && epoch[s] < EPOCHS -> \
       hints--; some_pair(); before[s] = (kept[s] -> target[s] : NONE); target[s] = t; t = 0; kept[s] = true; \
       switching[s] = true; asking[s] = true; say(s) } \
  :: atomic { !over[s] && asking[s] && !PATH(pair[s]) -> some_pair(); begin(s, epoch[s] + 1, target[s]); t = 0 } \
  :: atomic { CAN_ADVANCE(s) -> advance(s) } \
  :: atomic { !over[s] && switching[s] && !asking[s] && !up[target[s]] -> next_attempt(s) } \
  :: atomic { nempty(to[s]) -> receive(s) }

init {
  atomic {
    live[I(0, 0)] = true; live[I(1, 0)] = true; used[I(0, 0)] = true; used[I(1, 0)] = true;
    k = 1;
    do
    :: k < PAIRS -> arm[I(0, k)] = 1; arm[I(1, k)] = 1; live[I(0, k)] = true; live[I(1, k)] = true;
         clean[I(0, k)] = true; clean[I(1, k)] = true; k++
    :: else -> break
    od;
    k = 0;
#if HINTS > 0
    if :: unsafe[1] = true :: skip fi
#endif
  }
  do
  SENDS(0)
  SENDS(1)
  ARRIVES(0, 0)
  ARRIVES(1, 0)
  ARRIVES(0, 1)
  ARRIVES(1, 1)
  FAILS(0)
  FAILS(1)
#if PAIRS > 2
  ARRIVES(0, 2)
  ARRIVES(1, 2)
  FAILS(2)
#endif
  SWITCHES(0)
  SWITCHES(1)
  /* nothing else can happen: what was said is said again, and a question that nobody answers ends */
  :: atomic { timeout ->
       if
       :: !over[0] && asking[0] -> drop_ask(0)
       :: !over[1] && asking[1] -> drop_ask(1)
       :: !over[0] && !asking[0] && switching[0] -> say(0)
       :: !over[1] && !asking[1] && switching[1] -> say(1)
       :: over[0] && !over[1] -> say_over(0)
       :: over[1] && !over[0] -> say_over(1)
       :: (over[0] && over[1]) || (OPEN(0) && OPEN(1) && pair[0] == pair[1] && epoch[0] == epoch[1]
            && DELIVERED(0) && DELIVERED(1)) -> break
       fi }
  od;
  assert((over[0] && over[1]) || !vanished)
}
