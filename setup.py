"""Builds the native core: every `native/src/**/*.cc` and the cffi binding, one extension module.

Needs gcc, g++ and Python's headers, nothing else; no library is searched for at build time
(what depends on the machine, such as SSE4.2 or libibverbs, is chosen at run time). Our sources
compile with warnings as errors. `CXX`, `CXXFLAGS` and `CC` are honoured, CXXFLAGS last.
All metadata is in `pyproject.toml`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g1",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Werror",
]
INCLUDES = [f"-I{ROOT / 'native'}", f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}"]
JOBS = 2  # a build beside other work should not take the whole machine


def load_binding() -> ModuleType:
    """`_native/build.py` by its path: importing the package would need what is being built."""
    path = ROOT / "mooncake_py/_native/build.py"
    spec = importlib.util.spec_from_file_location("mooncake_native_build", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"mooncake_py: {path} is missing from this source tree")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cxx() -> list[str]:
    """The C++ compiler's command, after checking that a build can work at all."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    missing = [tool for tool in (command[0], "gcc") if shutil.which(tool) is None]
    if "CC" in os.environ:
        missing = [tool for tool in missing if tool != "gcc"]
    if missing:
        raise SystemExit(
            f"mooncake_py: no {' and no '.join(missing)} here to compile the native core with. "
            "Remedy: apt-get install gcc g++"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"mooncake_py: Python.h of Python {version} is not installed. "
            f"Remedy: apt-get install python{version}-dev"
        )
    return command


class BuildNative(build_ext):
    """Compiles the core's sources in parallel, then the generated binding, and links both."""

    def build_extension(self, ext: Extension) -> None:
        binding = load_binding()
        compiler = cxx()
        work = ROOT / "build/native"  # kept, so that no way of building compiles anything twice
        inputs = [*binding.headers(), ROOT / "setup.py"]
        newest = max(path.stat().st_mtime for path in inputs)

        def compile_one(source: Path) -> str:
            target = work / source.relative_to(ROOT).with_suffix(".o")
            stale = max(newest, source.stat().st_mtime)
            if self.force or not target.exists() or target.stat().st_mtime <= stale:
                target.parent.mkdir(parents=True, exist_ok=True)
                extra = shlex.split(os.environ.get("CXXFLAGS", ""))
                command = [*compiler, *FLAGS, *INCLUDES, *extra]
                subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(JOBS) as pool:
            try:
                objects = list(pool.map(compile_one, binding.sources()))
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"mooncake_py: {error.cmd[-3]} does not compile") from None
        generated = work / "_mooncake.c"
        binding.write_binding(generated)
        ext.sources = [os.path.relpath(generated), "native/python/held.c"]
        ext.extra_objects = objects
        ext.depends = [*objects, *map(str, binding.abi_headers())]
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "mooncake_py._native._mooncake",
            sources=[],
            include_dirs=[str(ROOT / "native"), str(ROOT / "native/include")],
            extra_compile_args=["-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            libraries=["dl"],
            language="c++",
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
