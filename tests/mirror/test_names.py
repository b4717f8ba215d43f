# SPDX-License-Identifier: BSD-3-Clause
"""Every name of every pyverbs module is in the mirror, and is the same object unless it is shadowed."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import textwrap
import types

import pytest
import pyverbs

import shiftverbs

SHADOWED = {
    "device": {"Context"},
    "pd": {"PD", "ParentDomain"},
    "mr": {"MR", "DMMR", "DmaBufMR", "MW"},
    "addr": {"AH"},
    "xrcd": {"XRCD"},
    "cq": {"CompChannel", "CQ", "CQEX"},
    "qp": {"QP", "QPEx", "QPInitAttr", "QPInitAttrEx"},
    "wr": {"SGE", "SendWR", "RecvWR"},
    "srq": {"SRQ", "SrqInitAttrEx"},
}


def pyverbs_modules() -> list[str]:
    """Names, without the package's, of every module that can be imported here."""
    found = []

    def walk(paths: list[str], prefix: str) -> None:
        for info in pkgutil.iter_modules(paths):
            name = prefix + info.name
            if info.name.startswith("__"):
                continue  # a release's number
            try:
                importlib.import_module(f"pyverbs.{name}")
            except ImportError:
                continue
            found.append(name)
            if info.ispkg:
                walk(list(importlib.import_module(f"pyverbs.{name}").__path__), name + ".")

    walk(list(pyverbs.__path__), "")
    # Debian's release has the providers in namespace packages, which pkgutil does not see.
    for provider in ("providers.mlx5", "providers.efa"):
        if importlib.util.find_spec(f"pyverbs.{provider}") is not None:
            walk(list(importlib.import_module(f"pyverbs.{provider}").__path__), provider + ".")
    return sorted(set(found))


MODULES = pyverbs_modules()


def test_there_is_something_to_compare() -> None:
    assert {"device", "qp", "cq", "pd", "mr", "wr", "srq", "cmid", "providers.mlx5.mlx5dv"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_names(name: str) -> None:
    theirs = importlib.import_module(f"pyverbs.{name}")
    ours = importlib.import_module(f"shiftverbs.{name}")
    compared = 0
    for key, value in vars(theirs).items():
        if key.startswith("__"):
            continue
        mine = getattr(ours, key)
        if isinstance(value, type) and value.__module__.startswith("pyverbs."):
            home = value.__module__.removeprefix("pyverbs.")
            if value.__name__ in SHADOWED.get(home, ()):
                assert mine is not value and issubclass(mine, value)
                assert mine is getattr(importlib.import_module(f"shiftverbs.{home}"), value.__name__)
                compared += 1
                continue
        assert mine is value
        compared += 1
    assert compared == len([key for key in vars(theirs) if not key.startswith("__")])


@pytest.mark.parametrize("spelling", ["attribute", "import"])
def test_every_module_is_there_in_both_spellings(spelling: str) -> None:
    """Most have no file. `import shiftverbs` alone is enough for `shiftverbs.spec`."""
    program = f"""
        import shiftverbs, sys
        for name in {MODULES!r}:
            if {spelling!r} == "import":
                exec(f"import shiftverbs.{{name}} as found")
            else:
                found = shiftverbs
                for part in name.split("."):
                    found = getattr(found, part)
            assert found is sys.modules["shiftverbs." + name], name
            print(name)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0 and child.stdout.split() == MODULES, child.stderr


@pytest.mark.parametrize("module, names", SHADOWED.items())
def test_subclasses_keep_pyverbs_own_relations(module: str, names: set[str]) -> None:
    theirs = importlib.import_module(f"pyverbs.{module}")
    ours = importlib.import_module(f"shiftverbs.{module}")
    for name in names:
        for other in names:
            expected = issubclass(getattr(theirs, name), getattr(theirs, other))
            assert issubclass(getattr(ours, name), getattr(ours, other)) is expected, (name, other)


def test_errors_are_pyverbs_own() -> None:
    import pyverbs.pyverbs_error as theirs

    from shiftverbs import pyverbs_error as ours

    assert ours.PyverbsRDMAError is theirs.PyverbsRDMAError
    assert issubclass(ours.ShiftError, theirs.PyverbsError)


def test_constants_under_both_modules_names() -> None:
    """Programs for older (enums) and newer releases (libibverbs_enums) run on either."""
    old = importlib.import_module("shiftverbs.enums")
    new = importlib.import_module("shiftverbs.libibverbs_enums")
    for module in (old, new):
        assert module.IBV_QPT_RC == 2
        assert module.IBV_DEVICE_RAW_SCATTER_FCS == module._IBV_DEVICE_RAW_SCATTER_FCS
    assert importlib.import_module("shiftverbs.librdmacm_enums").RDMA_PS_TCP == 0x106
    assert importlib.import_module("shiftverbs.cm_enums").RDMA_PS_TCP == 0x106


def test_constants_where_a_release_has_them_in_classes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As release 65 does: no `enums`, and the constants of named enumerations are in their classes alone."""
    later = types.ModuleType("pyverbs.libibverbs_enums")
    later.__dict__.update(
        ibv_qp_type=enum.IntFlag("ibv_qp_type", {"IBV_QPT_RC": 2, "IBV_QPT_UC": 3}),
        ibv_atomic_cap=enum.IntFlag("ibv_atomic_cap", {"IBV_ATOMIC_NONE": 0}),
        ibv_fork_status=enum.IntEnum("ibv_fork_status", {"IBV_FORK_DISABLED": 0}),
        IBV_LINK_LAYER_ETHERNET=2,
    )
    monkeypatch.setitem(sys.modules, "pyverbs.libibverbs_enums", later)
    monkeypatch.setitem(sys.modules, "pyverbs.enums", None)
    real = importlib.import_module

    def without_enums(name: str) -> types.ModuleType:
        if name == "pyverbs.enums":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without_enums)
    for name in ("enums", "libibverbs_enums"):
        found: dict[str, object] = {}
        shiftverbs.mirroring.reexport.reexport_enums(name, found)
        assert found["IBV_QPT_RC"] is found["ibv_qp_type"].IBV_QPT_RC and found["IBV_QPT_RC"] == 2
        assert found["IBV_ATOMIC_NONE"] == 0 and found["IBV_FORK_DISABLED"] == 0 and found["_IBV_QPT_UC"] == 3
        assert found["IBV_LINK_LAYER_ETHERNET"] == 2


def test_every_constant_has_both_spellings() -> None:
    """Flat as in release 44, in its enumeration's class as in 65; the same in each module, whichever are installed."""
    for pair in (("enums", "libibverbs_enums"), ("cm_enums", "librdmacm_enums")):
        modules = [importlib.import_module(f"shiftverbs.{name}") for name in pair]
        assert {
            key for key in vars(modules[0]) if key.startswith(("IBV_", "ibv_", "_IBV_", "RDMA_", "rdma_"))
        } == {key for key in vars(modules[1]) if key.startswith(("IBV_", "ibv_", "_IBV_", "RDMA_", "rdma_"))}
        classes = [value for value in vars(modules[0]).values() if isinstance(value, enum.EnumMeta)]
        assert len(classes) >= 4
        for cls in classes:
            for key, member in cls.__members__.items():
                assert all(getattr(module, key) == member for module in modules)


def test_the_package_alone_is_enough() -> None:
    """`import shiftverbs` and then `shiftverbs.pd.PD`; what is not there is an AttributeError, as of any module."""
    code = (
        "import shiftverbs, sys\n"
        "assert 'pyverbs.pd' not in sys.modules\n"
        "def f(cq: shiftverbs.cq.CQ) -> shiftverbs.pd.PD: ...\n"
        "assert shiftverbs.enums.IBV_QPT_RC == 2\n"
        "print(shiftverbs.pd.PD.__module__)\n"
        "try:\n    shiftverbs.no_such\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "shiftverbs.pd",
        "module 'shiftverbs' has no attribute 'no_such'",
    ]


@pytest.mark.parametrize("name", ["no_such_module", "providers.nobody", "providers.mlx5.no_such"])
def test_what_pyverbs_lacks_is_an_import_error(name: str) -> None:
    for package in ("pyverbs", "shiftverbs"):
        with pytest.raises(ModuleNotFoundError) as error:
            importlib.import_module(f"{package}.{name}")
        assert error.value.name is not None and error.value.name.startswith(package)


def test_a_module_of_a_later_release_is_mirrored(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    later = types.ModuleType("pyverbs.later")
    later.__dict__.update(Thing=object(), _hidden=1)
    spec = importlib.util.spec_from_loader("pyverbs.later", loader=None)
    later.__spec__ = spec
    monkeypatch.setitem(sys.modules, "pyverbs.later", later)
    try:
        ours = importlib.import_module("shiftverbs.later")
        assert ours.Thing is later.__dict__["Thing"] and ours._hidden == 1
    finally:
        sys.modules.pop("shiftverbs.later", None)
        shiftverbs.__dict__.pop("later", None)


def test_import_without_pyverbs_names_the_package() -> None:
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'pyverbs' else real(name, *a)\n"
        "try:\n    import shiftverbs\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "python3-pyverbs" in done.stdout and "--system-site-packages" in done.stdout


def test_import_does_nothing_else() -> None:
    """No verbs library, no thread, no descriptor, no child."""
    code = (
        "import sys, os, threading\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import shiftverbs\n"
        "assert not [m for m in sys.modules if m.startswith('pyverbs.')], sys.modules\n"
        "assert set(os.listdir('/proc/self/fd')) == before\n"
        "assert threading.active_count() == 1\n"
        "assert 'ibverbs' not in open('/proc/self/maps').read()\n"
    )
    import os

    env = {key: value for key, value in os.environ.items() if not key.startswith("SOFTRNIC")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
