# SPDX-License-Identifier: BSD-3-Clause
"""Each bug that is put in on purpose finds its place in the sources as they are, and leaves nothing behind."""

from __future__ import annotations

import inspect

import pytest
from simulator import build_mutants, driver_mutations, protocol_unmended, unmended, unmended_changes
from simulator.build_mutants import NotFound
from simulator.mutants import MUTANTS, Edit, Mutant

from shiftverbs.failover.qp.connection import Connection
from shiftverbs.failover.qp.ending import Ending

PARTS = [
    driver_mutations.MUTATIONS,
    unmended.MUTATIONS,
    unmended_changes.MUTATIONS,
    protocol_unmended.MUTATIONS,
]
PATCHES = {name: patch for part in PARTS for name, patch in part.items()}


def test_mutants_find_their_places() -> None:
    """Every edit of the data path is of something that is there once."""
    texts = build_mutants.sources()
    for number, mutant in enumerate(MUTANTS, start=1):
        assert sum(text.count(f"is_mutant({number})") for text in texts.values()) == len(mutant.edits)


def test_names_are_of_one_thing() -> None:
    """No two bugs have one name, wherever they are put in."""
    names = [mutant.name for mutant in MUTANTS] + [name for part in PARTS for name in part]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "edit",
    [
        Edit("native/core/journal.pxd", "cdef inline void pump_send", "not to be found", "False"),
        Edit("native/core/journal.pxd", "cdef inline void no_such_function", "q.head", "False"),
        Edit("native/core/journal.pxd", "cdef inline void after_retire", "q.head", "0"),
        Edit("native/core/journal.pxd", "cdef inline int hand_over", "q.send_cap:", "False"),
        Edit("native/core/no_such_file.pxd", "", "q.head", "False"),
    ],
    ids=["not there", "no function", "several times", "overlap", "no file"],
)
def test_an_edit_that_does_not_fit_is_told(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody believes that a bug was not found which was never there."""
    monkeypatch.setattr(build_mutants, "MUTANTS", [*MUTANTS, Mutant("another", "", (edit,))])
    with pytest.raises(NotFound):
        build_mutants.sources()


@pytest.mark.parametrize("name", PATCHES)
def test_patches_fit_and_are_taken_back(name: str) -> None:
    """Every patch is of something that is there."""
    before = (
        dict(inspect.getmembers(Connection)),
        dict(Connection._HANDLERS),
        dict(inspect.getmembers(Ending)),
    )
    with PATCHES[name][1]():
        pass
    assert before == (
        dict(inspect.getmembers(Connection)),
        dict(Connection._HANDLERS),
        dict(inspect.getmembers(Ending)),
    )
