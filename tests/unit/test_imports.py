"""Importing the package: any order, any thread, little time, nothing that is not there."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOREIGN = ("torch", "sglang", "vllm", "lmcache", "safetensors", "mooncake", "cuda", "pyverbs")
PROGRAM = """
import importlib, json, sys, threading
first, names, count = json.loads(sys.argv[1])
class Refuse:  # as on a machine that has none of these
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {foreign!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
failed = []
def load(part):
    for name in part:
        try:
            importlib.import_module(name)
        except BaseException as error:
            failed.append(f"{{name}}: {{error!r}}")
load(first)
threads = [threading.Thread(target=load, args=(names[i::count],)) for i in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert not any(thread.is_alive() for thread in threads), "a deadlock"
assert not failed, failed
print(len(names))
"""


def modules() -> list[str]:
    """All but those of `hicache` that are about torch's tensors, and what imports these."""
    found = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for path in (ROOT / "mooncake_py").rglob("*.py")
        if path.parent.name != "hicache"
        or path.name in ("__init__.py", "page_keys.py", "settings.py", "page_store.py")
    ]
    return sorted(name for name in found if not name.endswith("__main__"))


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


def load(seed: int, first: list[str], threads: int) -> None:
    names = modules()
    assert len(names) > 150
    random.Random(seed).shuffle(names)
    given = json.dumps([first, names, threads])
    assert int(run(PROGRAM.format(foreign=FOREIGN), given)) == len(names)


def test_a50_modules_are_imported_in_any_order_and_without_what_engines_bring() -> None:
    load(1, [], 1)


def test_a50_threads_import_what_they_need_at_once() -> None:
    """The packages are there already: CPython itself hands out half-made modules when one thread
    begins with a package and another with a module inside of it."""
    packages = {name.rsplit(".", 1)[0] for name in modules() if "." in name}
    load(2, sorted(packages), 4)


def test_a50_importing_the_package_does_not_open_what_only_calls_need() -> None:
    """No thread is started, no socket opened, and what is heavy is left for who needs it."""
    text = run(
        "import mooncake_py, os, sys, threading;"
        "from mooncake_py import StoreClient;"
        "fds = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')"
        " if os.path.islink(f'/proc/self/fd/{n}')];"
        "print(threading.active_count(), sum('socket' in each for each in fds),"
        " 'torch' in sys.modules, 'sqlite3' in sys.modules)"
    )
    assert text.split() == ["1", "0", "False", "False"]
