"""SGLang's cache on a machine without a GPU: its copies between device and host, done by torch.

The kernels that move KV between a GPU's pool and the host pool are the one thing of SGLang's cache
that cannot run here. Everything else that the tests drive (tree, controller, threads, host pools,
storage factory) is SGLang's own code, unchanged.
"""

from __future__ import annotations

from typing import Any

import shims

shims.install()

from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402


def _layers(pool: Any, buffer: Any) -> list[Any]:
    """Views of the buffer, one a layer, in which tokens (or page and token) come first."""
    if pool.layout == "layer_first":
        return [buffer[layer] for layer in range(pool.layer_num)]
    if pool.layout == "page_head":  # page, head, token, layer, width
        return [buffer[:, :, :, layer].transpose(1, 2) for layer in range(pool.layer_num)]
    return [buffer[:, layer] for layer in range(pool.layer_num)]


def _place(pool: Any, indices: Any) -> Any:
    tokens = indices.cpu().long()
    if pool.layout in ("page_first_direct", "page_head"):
        return tokens // pool.page_size, tokens % pool.page_size
    return tokens


def _pairs(pool: Any, device_pool: Any) -> list[tuple[list[Any], Any]]:
    """(host views by layer, device tensors by layer) of every buffer of the pool."""
    if hasattr(pool, "device_k_buffers"):
        return [
            (_layers(pool, pool.k_buffer), pool.device_k_buffers),
            (_layers(pool, pool.v_buffer), pool.device_v_buffers),
        ]
    return [(_layers(pool, pool.kv_buffer), device_pool.kv_buffer)]


def _backup(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    place, device = _place(self, host_indices), device_indices.cpu().long()
    for views, sources in _pairs(self, device_pool):
        for view, source in zip(views, sources, strict=True):
            view[place] = source[device]


def _load(  # noqa: PLR0913 - SGLang's signature
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    place, device = _place(self, host_indices), device_indices.cpu().long()
    for views, targets in _pairs(self, device_pool):
        targets[layer_id][device] = views[layer_id][place]


def install() -> None:
    common._cuda_host_register = lambda buffer, granularity=None: None
    for module in (base, common):
        module._cuda_host_unregister = lambda buffer: None
    for pool in (mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost):
        pool.backup_from_device_all_layer = _backup
        pool.load_to_device_per_layer = _load
    assert mamba
    fixtures.get_device = lambda: "cpu"


install()
