"""The launch lines of `deploy/sglang.md` and `deploy/compat.md` are read by SGLang itself."""

from __future__ import annotations

import argparse
import json

import cpu_device  # noqa: F401 - first: it makes SGLang importable
import guides
import pytest
from click.testing import CliRunner
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from mooncake_py.hicache.settings import settings_of
from mooncake_py.master import server
from mooncake_py.store import node


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def test_f27_the_launch_line_of_the_guide_is_one_that_sglang_reads() -> None:
    (words,) = guides.launched("sglang.md", "-m", "sglang.launch_server")
    given = parsed(words)
    assert given.enable_hierarchical_cache
    assert given.hicache_storage_backend == "dynamic"
    extra = json.loads(given.hicache_storage_backend_extra_config)
    assert extra["class_name"] == "HiCacheBackend"
    settings, _ = settings_of(extra)
    assert settings.master == "10.0.0.1:50051"


def test_f68_the_backends_that_the_guide_names_are_sglangs() -> None:
    text = (guides.DEPLOY / "compat.md").read_text()
    assert "`--hicache-storage-backend mooncake`" in text
    assert "mooncake" in StorageBackendFactory._registry
    assert "`--disaggregation-transfer-backend mooncake`" in text
    assert TransferBackend("mooncake") is TransferBackend.MOONCAKE
    words = ["--model-path", "m", "--disaggregation-transfer-backend", "mooncake"]
    assert parsed(words).disaggregation_transfer_backend == "mooncake"


@pytest.mark.parametrize("guide", ["sglang.md", "vllm.md", "lmcache.md", "compat.md"])
def test_f68_our_own_daemons_take_what_the_guides_give_them(guide: str) -> None:
    found = 0
    for name, command in (("mooncake-master", server.main), ("mooncake-node", node.main)):
        for words in guides.launched(guide, name):
            found += 1
            done = CliRunner().invoke(command, [*words, "--settings"])
            assert done.exit_code == 0, done.output
    assert found
