from typing import Any

from _cffi_backend import FFI

ffi: FFI
lib: Any  # the functions and constants of native/abi/*.h
