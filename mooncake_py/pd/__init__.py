"""Prefill/decode migration: KV pages move between instances as their layers are computed.

Stands on the transfer engine alone; no store and no master is needed. A prefill rank writes
straight into the pages that a decode rank offered for one request (a *room*), layer by layer:

    decode:   incoming = decode_rank.receive(room, pages, instance, timeout_ms=1000)
    prefill:  outgoing = prefill_rank.send(room, pages)
              for layer in range(80): compute(layer); outgoing.write_layer(layer, timeout_ms=1000)
              outgoing.finish(timeout_ms=1000)
    decode:   incoming.wait_layer(0, timeout_ms=1000); ...; incoming.wait(timeout_ms=1000)

The two sides may divide the heads over different numbers of ranks. Rooms and their safety:
`decode.py`; what is said on the wire: `protocol.py`.
"""

from mooncake_py.pd.bootstrap import Bootstrap, find_instance, publish_rank
from mooncake_py.pd.decode import DecodeRank, Incoming, PrefillInstance
from mooncake_py.pd.layout import KvLayout, KvPool
from mooncake_py.pd.prefill import Outgoing, PrefillRank
from mooncake_py.pd.router import Route, Router
from mooncake_py.pd.settings import HandOverSettings

__all__ = [
    "Bootstrap",
    "DecodeRank",
    "HandOverSettings",
    "Incoming",
    "KvLayout",
    "KvPool",
    "Outgoing",
    "PrefillInstance",
    "PrefillRank",
    "Route",
    "Router",
    "find_instance",
    "publish_rank",
]
