from typing import Any

ffi: Any  # what it makes is C data: its types are those of the declarations, not Python's
lib: Any  # the functions and constants of native/abi/*.h
