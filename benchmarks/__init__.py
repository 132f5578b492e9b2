"""Our put and get beside what the machine can do and, when installed, beside upstream Mooncake.

    python -m benchmarks [--size tiny|small|full] [--json FILE] [--upstream PYTHON]

Every contender is a process of its own that runs the same loop (`worker.py`) over its own store:
the physical limits (`store_limits.py`), our client (`store_ours.py`), upstream's client in an
interpreter that has it (`store_upstream.py`). The runner lets them take turns, a few operations
each, so that a machine that drifts does so for all of them. p50 and ratios within one run mean
something; figures of two runs do not compare.

Importing this package loads nothing: `worker.py` also runs in upstream's environment.
"""
