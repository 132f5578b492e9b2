"""The fixed rows of the protocol as numpy dtypes: what `model.py` packs one by one, many at a time.

The layouts are those of `model.EXTENT_ROW`, `PLACEMENT_ROW` and so on, and EXTENT is the C
`mc_extent_row`: little-endian, no padding. `np.frombuffer(payload, EXTENT)` reads a payload without
a copy; `rows.tobytes()` writes one. Digests are opaque (`V16`): a bytes type would lose zeros at
the end.
"""

from __future__ import annotations

import numpy as np

EXTENT = np.dtype(
    [
        ("key_index", "<u4"),
        ("segment_index", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("generation", "<u8"),
        ("expires_ms", "<u8"),
        ("digest", "V16"),
        ("tag", "<u8"),  # in grants: the name of the group; a reader's rows: store/stripes.py
    ]
)

PLACEMENT = np.dtype(
    [
        ("key_index", "<u4"),
        ("segment_index", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("generation", "<u8"),
    ]
)

PART = np.dtype([*PLACEMENT.descr, ("start", "<u8")])

COPY = np.dtype(
    [
        ("extent", EXTENT),
        ("source_index", "<u4"),
        ("reserved", "<u4"),
        ("source_offset", "<u8"),
        ("source_generation", "<u8"),
    ]
)

FAILED = np.dtype([("key_index", "<u4"), ("reserved", "<u4"), ("segment_id", "<u8")])

# mc_pull_piece: a part of a value, in a region of the client.
PULL_PIECE = np.dtype(
    [("offset", "<u8"), ("length", "<u8"), ("region", "<u4"), ("reserved", "<u4")]
)

# Ranges [start, below) of generations; one replica of an object in a segment.
GENERATIONS = np.dtype([("start", "<u8"), ("below", "<u8")])
REPLICA = np.dtype([("offset", "<u8"), ("generation", "<u8")])

# A copy between the memory (`segment_id`, `offset`, under `memory_generation`) and the disk of one
# node, where the object is known by `generation`.
DISK_TASK = np.dtype(
    [
        ("generation", "<u8"),
        ("length", "<u8"),
        ("segment_id", "<u8"),
        ("offset", "<u8"),
        ("memory_generation", "<u8"),
        ("expires_ms", "<u8"),
    ]
)

# `task`: generation of an offload, memory generation of a promotion; `code`: 0 or of errors.py.
DISK_DONE = np.dtype([("task", "<u8"), ("code", "<u4"), ("reserved", "<u4")])
