"""Upstream's host allocator: memory that nodes on this host reach by its descriptor."""

from __future__ import annotations

import logging

from mooncake_py.compat import codes
from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import Memory

log = logging.getLogger(__name__)

_allocated: dict[int, Memory] = {}  # of the allocator, by address


class MooncakeHostMemAllocator:
    """Memory that nodes on this host reach without help of this process, once it is registered."""

    def alloc(self, size: int) -> int:
        """Its address, or 0."""
        try:
            memory = Memory(size, name="mooncake-host")
        except MooncakeError as error:
            log.warning("no host memory: %s", error)
            return 0
        _allocated[memory.base] = memory
        return memory.base

    def free(self, address: int, size: int = 0) -> int:
        memory = _allocated.pop(address, None)
        if memory is None:
            return codes.INVALID_PARAMS
        memory.close()
        return codes.OK


def bind_to_numa_node(node: int) -> int:
    """Accepted and not needed: nodes of the store place their memory themselves."""
    return codes.OK if node >= 0 else codes.INVALID_PARAMS


def descriptor_at(address: int, nbytes: int) -> int:
    """The memfd that begins at this address, or -1 for memory that is not the allocator's."""
    memory = _allocated.get(address)
    return memory.fd if memory is not None and nbytes <= memory.nbytes else -1
