"""Stand-ins for packages that engines' modules import at their top and never use here.

`install()` makes every name of ABSENT, and whatever lies below it, importable: a module whose
attributes are ghosts. A ghost can be called, indexed, subclassed and used as a decorator (which
then leaves the function as it is); it computes nothing. A package that is really installed wins.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ABSENT = (
    "triton",
    "datasets",
    "sentencepiece",
    "sgl_kernel",
    "flashinfer",
    "compressed_tensors",
    "torchvision",
    "torchaudio",
    "tvm_ffi",
    "xgrammar",
    "torch_memory_saver",
    "deep_gemm",
    "gguf",
    "kernels",
    "IPython",
    "partial_json_parser",
    "llguidance",
    "openai_harmony",
)

NOT_EVEN_GHOSTS = ("get_current_target",)  # asked for to find out what device there is


class Ghost:
    """What a missing package's attribute looks like."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and not named and (isinstance(args[0], type) or callable(args[0])):
            return args[0]  # used as a decorator
        return Ghost()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in NOT_EVEN_GHOSTS:
            raise AttributeError(name)
        return Ghost()

    def __getitem__(self, _: Any) -> Any:
        return Ghost()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Any:
        return iter(())

    def __or__(self, _: Any) -> Any:
        return object

    __ror__ = __or__


def _any_schema(*_: Any) -> dict[str, str]:
    return {"type": "any"}


class _GhostClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Ghost()


class _GhostModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():  # looks like a class: usable in annotations and isinstance
            body = {"__init__": lambda *_, **__: None}
            return _GhostClass(name, (), {**body, "__get_pydantic_core_schema__": _any_schema})
        return Ghost()


class _Finder:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == each or name.startswith(each + ".") for each in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _GhostModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Last in the search order: what is installed is found before."""
    from transformers.utils import import_utils  # noqa: PLC0415 - asked before there are ghosts

    import_utils.is_torchvision_available()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(ABSENT))  # type: ignore[arg-type]


def hide(*modules: str) -> None:
    """Ghosts instead of these parts of a package that is there."""
    sys.meta_path.insert(0, _Finder(modules))  # type: ignore[arg-type]
