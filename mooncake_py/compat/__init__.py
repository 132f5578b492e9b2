"""Upstream Mooncake's Python names over our own classes, for code that was written for them.

`store` is `mooncake.store`, `engine` is `mooncake.engine`. The distribution in `compat/` provides
the package `mooncake` that re-exports them. Names, argument orders and integer codes are those of
upstream; what happens below is ours.

Rules. A call answers with its code and never raises, neither for what the cluster does nor for
arguments that cannot be right (`guard.py`): types, lengths, addresses that are no memory. Before
`setup` and after `close` it answers INVALID_PARAMS (upstream's process dies there). Only a call
that does not fit the signature raises TypeError, and `setup(dict)` raises RuntimeError when it
fails, because its callers ignore what it returns. An asynchronous batch is done when all of it is.
"""
