"""The launch lines and files of `deploy/vllm.md` are read by vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path

import guides
import vllm_engine  # noqa: F401 - first: the shims

from vllm.config import KVTransferConfig  # isort: skip
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.mooncake_store import MooncakeStoreConfig


def test_f68_the_connectors_of_the_guide_are_vllms_and_take_its_settings() -> None:
    launches = guides.launched("vllm.md", "vllm", "serve")
    roles = []
    for words in launches:
        given = json.loads(words[words.index("--kv-transfer-config") + 1])
        config = KVTransferConfig(**given)
        assert KVConnectorFactory.get_connector_class(config)
        roles.append(config.kv_role)
    assert roles == ["kv_both", "kv_producer", "kv_consumer"]


def test_f68_the_file_of_the_guide_is_one_that_vllm_reads(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(guides.files("vllm.md")["mooncake.json"])
    config = MooncakeStoreConfig.from_file(str(file))
    assert (config.mode, config.master_server_address) == ("standalone-store", "10.0.0.1:50051")
    assert set(json.loads(file.read_text())) <= set(MooncakeStoreConfig.__annotations__)
