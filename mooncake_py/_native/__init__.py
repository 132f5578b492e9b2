"""The native core behind cffi: the only place that imports cffi or the compiled module.

`ffi` and `lib` are the raw binding; `memory.py` and the engine's wrappers are what other rooms use.
"""

from __future__ import annotations

try:
    from mooncake_py._native._mooncake import ffi, lib
except ModuleNotFoundError as error:
    raise ImportError(
        "the native core of mooncake_py is not built. Remedy: pip install . "
        "(or, in a source tree, python setup.py build_ext --inplace)"
    ) from error

__all__ = ["ffi", "lib"]
