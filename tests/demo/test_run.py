# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs run`: whose imports are mapped, and that the program notices nothing else.

The program's behaviour is compared with plain `python prog.py`. Most tests map between two packages made up
here (`fakeverbs` to `shiftfake`), so that they need neither pyverbs nor a NIC.
"""

import py_compile
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import sys
import shiftverbs.commands.mapping as m
import shiftverbs.commands.run as r
m.SOURCE, m.TARGET = "fakeverbs", "shiftfake"
sys.exit(r.run(sys.argv[1:]))
"""


@pytest.fixture
def world(tmp_path):
    """Two installed packages of the same shape; the first imports parts of itself by name."""
    installed = tmp_path / "lib" / "site-packages"
    for name in ("fakeverbs", "shiftfake"):
        package = installed / name
        (package / "providers").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        names = "__all__ = ['who', 'IBV_QPT_RC']\n"
        (package / "enums.py").write_text(f"who = {name!r}\nIBV_QPT_RC = 2\n{names}")
        (package / "qp.py").write_text(
            f"import {name}.enums as e\nfrom {name} import enums\nclass QP:\n    base = e.who\n"
        )
        (package / "providers" / "__init__.py").write_text("")
        (package / "providers" / "mlx5.py").write_text("")
    # The target stands on the source, as shiftverbs stands on pyverbs: those imports must stay.
    with (installed / "shiftfake" / "qp.py").open("a") as stream:
        stream.write("import fakeverbs.qp\nbase_class = fakeverbs.qp.QP\n")
    (installed / "thirdparty.py").write_text("import fakeverbs.qp\nwho = fakeverbs.qp.QP.base\n")
    (tmp_path / "prog").mkdir()
    return tmp_path


def launch(world, *args, program=None, stdin=None, plain=False, cwd=None):
    """Run a program from world/prog; plain: by python itself."""
    if program is not None:
        (world / "prog" / "prog.py").write_text(program)
        args = (str(world / "prog" / "prog.py"), *args)
    before = [sys.executable] if plain else [sys.executable, "-c", LAUNCHER]
    path = f"{world}/lib/site-packages:{ROOT}"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*before, *args], env=env, cwd=cwd or world, input=stdin, capture_output=True, text=True, timeout=30
    )


STYLES = {
    "import": "import fakeverbs\nimport fakeverbs.enums\nassert 'shiftfake' not in globals()\n"
    "print(fakeverbs.enums.who)",
    "dotted": "import fakeverbs.enums\nprint(fakeverbs.enums.who, fakeverbs.__name__)",
    "dotted deep": "import fakeverbs.providers.mlx5\nprint(fakeverbs.providers.mlx5.__name__)",
    "as": "import fakeverbs.enums as e\nprint(e.who)",
    "package as": "import fakeverbs as fv\nimport fakeverbs.enums\nprint(fv.enums.who)",
    "from": "from fakeverbs.enums import who\nprint(who)",
    "from as": "from fakeverbs.enums import who as w, IBV_QPT_RC\nprint(w)",
    "from package": "from fakeverbs import enums as e\nprint(e.who)",
    "star": "from fakeverbs.enums import *\nprint(who)",
    "several": "import os, fakeverbs.enums as e, sys\nos.path, sys.argv\nprint(e.who)",
    "in function": "def f():\n    import fakeverbs.enums\n    return fakeverbs.enums.who\nprint(f())",
    "in try": "try:\n    import fakeverbs.none\nexcept ImportError:\n    import fakeverbs.enums as e\n"
    "print(e.who)",
    "in class": "class C:\n    import fakeverbs.enums\n    x = fakeverbs.enums.who\nprint(C.x)",
    "global": "def f():\n    global fakeverbs\n    import fakeverbs.enums\nf()\nprint(fakeverbs.enums.who)",
    "future": "'''Doc.'''\nfrom __future__ import annotations\nimport fakeverbs.enums as e\nprint(e.who)",
    "importlib": "import importlib\nprint(importlib.import_module('fakeverbs.enums').who)",
    "importlib name": "from importlib import import_module\nn = 'fakeverbs'\n"
    "print(import_module(n + '.enums').who)",
    "importlib keyword": "import importlib\nprint(importlib.import_module(name='fakeverbs.enums').who)",
    "dunder import": "print(__import__('fakeverbs.enums', fromlist=['who']).who)",
}


@pytest.mark.parametrize("style", STYLES)
def test_import_styles(world, style):
    done = launch(world, program=STYLES[style])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shiftfake"), done.stdout
    plain = launch(world, program=STYLES[style].replace("assert 'shiftfake'", "0, 'shiftfake'"), plain=True)
    assert plain.stdout == done.stdout.replace("shiftfake", "fakeverbs")


def test_whoever_imports_it_is_mapped_but_pyverbs_itself_and_ours(world):
    package = world / "prog" / "helpers"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner")
    (package / "inner.py").write_text("import fakeverbs.enums\nwho = fakeverbs.enums.who\n")
    done = launch(
        world,
        program="import helpers, thirdparty, fakeverbs.qp as qp\n"
        "print(helpers.inner.who, thirdparty.who, qp.QP.base, qp.base_class.base)",
    )
    assert done.stdout == "shiftfake shiftfake shiftfake fakeverbs\n", done.stderr


def test_a_library_on_a_path_of_its_own_is_mapped(world):
    (world / "elsewhere").mkdir()
    (world / "elsewhere" / "ringlib.py").write_text("from fakeverbs.enums import who\n")
    done = launch(
        world, program="import sys\nsys.path.append('elsewhere')\nimport ringlib\nprint(ringlib.who)\n"
    )
    assert done.stdout == "shiftfake\n", done.stderr


def test_what_an_editable_install_finds_is_mapped(world):
    """Such an install has a finder of its own on sys.meta_path; its files are nowhere on sys.path."""
    (world / "checkout").mkdir()
    (world / "checkout" / "ringlib.py").write_text("from fakeverbs.enums import who\n")
    (world / "lib" / "site-packages" / "editable.py").write_text(
        "import sys, importlib.util\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'ringlib':\n"
        "            return importlib.util.spec_from_file_location(name, 'checkout/ringlib.py')\n"
        "sys.meta_path.append(Finder)\n"
    )
    done = launch(world, program="import editable, ringlib\nprint(ringlib.who)\n")
    assert done.stdout == "shiftfake\n", done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "shiftfake shiftfake shiftfake"),
        (["--except", "thirdparty"], "shiftfake fakeverbs shiftfake"),
        (["--except=thirdparty,ringlib.sub"], "shiftfake fakeverbs fakeverbs"),
        (["--except", "ringlib", "--except", "thirdparty"], "shiftfake fakeverbs fakeverbs"),
        (["--only", "ringlib"], "shiftfake fakeverbs shiftfake"),
        (["--only", "ringlib,thirdparty", "--except", "ringlib.sub"], "shiftfake shiftfake fakeverbs"),
        (["--only", "third"], "shiftfake fakeverbs fakeverbs"),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else None,
)
@pytest.mark.parametrize("as_module", [False, True])
def test_only_and_except_name_packages(world, options, expected, as_module):
    package = world / "lib" / "site-packages" / "ringlib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sub.py").write_text("from fakeverbs.enums import who\n")
    (world / "prog" / "prog.py").write_text(
        "import sys, fakeverbs.enums as e, thirdparty, ringlib.sub\n"
        "print(e.who, thirdparty.who, ringlib.sub.who)\nassert sys.argv[1:] == ['--only', 'x']\n"
    )
    named = ["-m", "prog"] if as_module else [str(world / "prog" / "prog.py")]
    done = launch(world, *options, *named, "--only", "x", cwd=world / "prog")
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr


def test_what_cannot_be_mapped_is_named_once(world):
    """A module without its source, and one in a zip file; neither where it is excepted."""
    installed = world / "lib" / "site-packages"
    (installed / "ringlib.py").write_text("from fakeverbs.enums import who\n")
    py_compile.compile(str(installed / "ringlib.py"), cfile=str(installed / "ringlib.pyc"))
    (installed / "ringlib.py").unlink()
    with zipfile.ZipFile(world / "zipped.zip", "w") as archive:
        archive.writestr("zipped.py", "from fakeverbs.enums import who\n")
    program = "import sys\nsys.path.append('zipped.zip')\nimport ringlib, zipped, json, ssl\n" \
        "print(ringlib.who, zipped.who)\n"  # fmt: skip
    done = launch(world, program=program)
    assert done.stdout == "fakeverbs fakeverbs\n", done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("ringlib (") and "SourcelessFileLoader" in first and "not protected" in first
    assert second.startswith("zipped (") and "zipimporter" in second and "not protected" in second
    quiet = launch(world, "--except", "ringlib,zipped", str(world / "prog" / "prog.py"))
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_a_compiled_extension_that_links_pyverbs_is_named(world):
    """Our own `_wr` under another name: a real extension made by Cython that imports pyverbs' modules."""
    import shiftverbs._wr

    suffix = "".join(Path(shiftverbs._wr.__file__).suffixes)
    target = world / "prog" / f"_wr{suffix}"
    target.write_bytes(Path(shiftverbs._wr.__file__).read_bytes())
    (world / "prog" / "prog.py").write_text(
        "import _wr\nimport pyverbs.qp\nprint(pyverbs.qp.QP.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "run", str(world / "prog" / "prog.py")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "shiftverbs.qp\n"), done.stderr
    assert f"_wr ({target}, loaded by ExtensionFileLoader) uses pyverbs" in done.stderr


def test_argv_main_and_path_are_as_with_python(world):
    program = """
import sys, os, __main__
import fakeverbs.enums as e
print(sys.argv, __name__, __file__, __main__.__dict__ is globals(), __package__, __spec__, sys.path[0])
import atexit, threading, pickle
class C:
    pass
c = pickle.loads(pickle.dumps(C()))
assert type(c) is C
atexit.register(lambda: print("exit", C.__name__, e.IBV_QPT_RC))
threading.Thread(target=lambda: print("thread", C.__name__)).start()
"""
    args = ("--help", "-m", "x y")
    done, plain = (launch(world, *args, program=program, plain=plain) for plain in (False, True))
    assert plain.returncode == 0, plain.stderr
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(7)",
        "sys.exit('message')",
        "sys.exit()",
        "raise SystemExit(3)",
        "import os; os._exit(9)",
        "1 / 0",
        "pass",
    ],
)
def test_exit_status_and_messages_are_as_with_python(world, ending):
    program = f"import sys\nimport fakeverbs.enums\ndef f():\n    {ending}\nf()\n"
    done, plain = (launch(world, program=program, plain=plain) for plain in (False, True))
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_traceback_of_an_imported_module(world):
    (world / "prog" / "helper.py").write_text(
        "import fakeverbs.enums\n\n\ndef f():\n    raise KeyError('here')\n"
    )
    program = "import fakeverbs.enums\nimport helper\nhelper.f()\n"
    done, plain = (launch(world, program=program, plain=plain) for plain in (False, True))
    assert 'helper.py", line 5, in f' in plain.stderr
    assert done.stderr == plain.stderr


@pytest.mark.parametrize("where", ["prog.py", "helper.py"])
def test_traceback_of_a_syntax_error(world, where):
    broken = "import fakeverbs.enums\nx = )\n"
    (world / "prog" / "helper.py").write_text(broken if where == "helper.py" else "")
    program = "import fakeverbs.enums\nimport helper\n" + ("x = )\n" if where == "prog.py" else "")
    done, plain = (launch(world, program=program, plain=plain) for plain in (False, True))
    assert "SyntaxError" in plain.stderr
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)


def test_a_failing_import_names_the_mapped_module(world):
    done = launch(world, program="import fakeverbs.nothing")
    assert done.returncode == 1
    assert "No module named 'shiftfake.nothing'" in done.stderr
    assert "run.py" not in done.stderr


def test_the_programs_own_excepthook_is_used_once(world):
    program = "import sys\nsys.excepthook = lambda t, e, tb: print('hook', t.__name__, tb.tb_lineno)\n1 / 0\n"
    done, plain = (launch(world, program=program, plain=plain) for plain in (False, True))
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_interrupt_ends_by_the_signal(world):
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n"
    (world / "prog" / "prog.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "run", str(world / "prog" / "prog.py")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT, done
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "shiftverbs" not in done.stderr


def test_module_as_with_python_m(world):
    package = world / "prog" / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import fakeverbs.enums as e\nwho = e.who\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom . import part\nimport fakeverbs.enums\n"
        "print(part.who, fakeverbs.enums.who, sys.argv, __name__, __package__, __spec__.name, sys.path[0])\n"
    )
    done = launch(world, "-m", "tool", "-x", "1", cwd=world / "prog")
    plain = launch(world, "-m", "tool", "-x", "1", cwd=world / "prog", plain=True)
    assert done.stdout == plain.stdout.replace("fakeverbs", "shiftfake"), done.stderr
    assert plain.returncode == done.returncode == 0


def test_unittest_runs_mapped_test_modules(world):
    (world / "prog" / "test_it.py").write_text(
        "import unittest\nimport fakeverbs.enums as e\n"
        "class T(unittest.TestCase):\n    def test_who(self):\n        self.assertEqual(e.who, 'shiftfake')\n"
    )
    done = launch(world, "-m", "unittest", "test_it", cwd=world / "prog")
    assert done.returncode == 0, done.stderr
    assert launch(world, "-m", "unittest", "test_it", cwd=world / "prog", plain=True).returncode == 1


def test_module_that_does_not_exist(world):
    done = launch(world, "-m", "nowhere")
    assert done.returncode == 1 and "No module named nowhere" in done.stderr


def test_program_from_standard_input(world):
    done = launch(world, "-", "x", stdin="import sys, fakeverbs.enums as e\nprint(e.who, sys.argv)\n")
    assert done.stdout == "shiftfake ['-', 'x']\n", done.stderr


def test_directory_with_main(world):
    directory = world / "prog" / "app"
    directory.mkdir()
    (directory / "__main__.py").write_text(
        "import near\nprint(near.who, __name__, __file__.rpartition('/')[2])\n"
    )
    (directory / "near.py").write_text("from fakeverbs.enums import who\n")
    done = launch(world, str(directory))
    assert done.stdout == "shiftfake __main__ __main__.py\n", done.stderr


def test_byte_code_cache_stays_the_unmapped_programs(world):
    helper = world / "prog" / "helper.py"
    helper.write_text("import fakeverbs.enums\nwho = fakeverbs.enums.who\n")
    (world / "prog" / "prog.py").write_text("import helper\nprint(helper.who)\n")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{world}/lib/site-packages:{ROOT}"}
    seen = []
    for before in ([], ["-c", LAUNCHER], [], ["-c", LAUNCHER]):
        command = [sys.executable, *before, str(world / "prog" / "prog.py")]
        seen.append(
            subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout.strip()
        )
    assert seen == ["fakeverbs", "shiftfake", "fakeverbs", "shiftfake"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("/nowhere/prog.py",), "can't open file"),
        ((), "usage"),
        (("-x", "prog.py"), "usage"),
        (("-m",), "usage"),
        (("--only",), "--only wants the name of a package"),
        (("--only", "a-b", "prog.py"), "'a-b' is not the name of a package"),
        (("--except", "x,", "prog.py"), "'' is not the name of a package"),
        (("--except", "fakeverbs", "prog.py"), "never mapped"),
        (("--most", "x", "prog.py"), "there is no option --most"),
        (("--only", "x"), "no program is named"),
        ((sys.executable,), "not Python source"),
    ],
)
def test_bad_arguments(world, args, message):
    done = launch(world, *args)
    assert done.returncode == 2
    assert message in done.stderr


def test_console_command_passes_arguments_through(world):
    (world / "prog" / "prog.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "run", str(world / "prog" / "prog.py"), "--json", "-h"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "['--json', '-h']\n"), done.stderr


def test_a_real_pyverbs_program_gets_our_classes(world):
    """Every style against the real packages; pyverbs' own classes stay the bases."""
    (world / "prog" / "helper.py").write_text(
        "from pyverbs.qp import QP\nfrom pyverbs import pd as p\nPD = p.PD\n"
    )
    (world / "prog" / "prog.py").write_text(
        "import pyverbs.device as d\nimport pyverbs.enums as e\nimport pyverbs.cq\nimport pyverbs\n"
        "from pyverbs.mr import MR\nfrom pyverbs.libibverbs_enums import IBV_QPT_RC\nimport helper\nimport sys\n"
        "assert e.IBV_QPT_RC == IBV_QPT_RC == 2\n"
        "for c in (d.Context, helper.PD, MR, pyverbs.cq.CQ, helper.QP):\n"
        "    print(c.__module__, next(k.__module__ for k in c.__mro__ if k.__module__.startswith('pyverbs.')))\n"
        "print(sys.modules['pyverbs.qp'].QP is not helper.QP, pyverbs.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "run", str(world / "prog" / "prog.py")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = [f"shiftverbs.{name} pyverbs.{name}" for name in ("device", "pd", "mr", "cq", "qp")]
    assert done.stdout.splitlines() == [*expected, "True shiftverbs"]
