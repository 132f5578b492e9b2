"""Tensors of the store as safetensors files, and back.

The package `safetensors` is imported by the first call that needs it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mooncake_py.compat import codes
from mooncake_py.compat.tensors import TensorCalls

log = logging.getLogger(__name__)


class TensorFileCalls(TensorCalls):
    def save_tensor_to_safetensor(self, key: str, file_name: Any = None) -> int:
        """Write the tensor under the key into a file (None: one that is called like the key), in
        which it has the key's name. The file appears whole or not at all."""
        tensor = self.get_tensor(key)
        if tensor is None:
            return codes.OBJECT_NOT_FOUND if self._client is not None else codes.INVALID_PARAMS
        path = Path(os.fspath(file_name) if file_name else key)
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            from safetensors.torch import save  # noqa: PLC0415 - only who has it calls this

            draft.write_bytes(save({key: tensor.contiguous()}))
            draft.replace(path)
        except (OSError, ImportError) as error:
            log.warning("%s was not written: %s", path, error)
            draft.unlink(missing_ok=True)
            return codes.FILE_WRITE_FAIL
        return codes.OK

    def load_tensor_from_safetensor(self, key: Any, file_name: Any = None) -> Any:
        """Put the tensor of a file under the key, and answer it; None when that cannot be. Of
        several in the file the one that is called like the key. The arguments may stand the other
        way round, as both are in use."""
        first, second = os.fspath(key), os.fspath(file_name) if file_name else os.fspath(key)
        name, path = first, second
        looks = os.sep in first or first.endswith(".safetensors")
        if looks and not os.path.isfile(second) and os.path.isfile(first):
            name, path = second, first
        if not os.path.isfile(path):
            return None
        try:
            from safetensors import SafetensorError  # noqa: PLC0415
            from safetensors.torch import load_file  # noqa: PLC0415
        except ImportError as error:
            log.warning("%s was not read: %s", path, error)
            return None
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            log.warning("%s was not read: %s", path, error)
            return None
        tensor = found.get(name, next(iter(found.values())) if len(found) == 1 else None)
        if tensor is None or self.put_tensor(name, tensor) != codes.OK:
            return None
        return tensor
