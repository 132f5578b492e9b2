"""`mooncake.store`, by mooncake_py."""

from mooncake_py.compat.store import *  # noqa: F403
