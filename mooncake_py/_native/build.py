"""What the binding is made of: declarations for cffi and the C file that it turns into.

Used by `setup.py` only, and loaded from its path, so that it works before anything is installed.
The declarations are the bare headers in `native/abi/`, the very same files that the public C
header includes: one text, read by two compilers, cannot drift. A header joins once the sources
that define its functions are there, so that a partly filled tree still builds and imports.
"""

from __future__ import annotations

from pathlib import Path

import cffi

MODULE = "mooncake_py._native._mooncake"
ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"

# What the core calls: mooncake_py/_native/check.py defines it.
CALLBACKS = 'extern "Python" int32_t mc_python_signal(void);'

# header -> folder of native/src that defines it (None: it declares constants only)
_ABI: dict[str, str | None] = {
    "constants.h": None,
    "memory.h": "memory",
    "segment.h": "memory",
    "engine.h": "engine",
    "pulls.h": "node",
    "keys.h": "master",
    "door.h": "master",
    "puts.h": "client",
}


def sources() -> list[Path]:
    """Every C++ source of the core, in a stable order."""
    return sorted((NATIVE / "src").rglob("*.cc"))


def headers() -> list[Path]:
    """Every header a source may include: a newer one makes all objects stale."""
    return sorted(NATIVE.rglob("*.h"))


def abi_headers() -> list[Path]:
    """The declarations to bind, in the order in which they build on one another."""
    defined = {source.relative_to(NATIVE / "src").parts[0] for source in sources()}
    return [
        NATIVE / "abi" / name
        for name, folder in _ABI.items()
        if folder is None or folder in defined
    ]


def write_binding(target: Path) -> None:
    """Write the C source of the extension module to `target`."""
    ffi = cffi.FFI()
    names = abi_headers()
    ffi.cdef("\n".join(header.read_text() for header in names))
    ffi.cdef(CALLBACKS)
    includes = "".join(f'#include "abi/{header.name}"\n' for header in names)
    ffi.set_source(MODULE, f"#include <stdint.h>\n{includes}")
    target.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_c_code(str(target))
