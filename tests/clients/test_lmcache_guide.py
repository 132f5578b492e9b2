"""The file of `deploy/lmcache.md` is read by LMCache itself."""

from __future__ import annotations

from pathlib import Path

import guides
from lmcache.v1.config import LMCacheEngineConfig


def test_f68_the_file_of_the_guide_is_one_that_lmcache_reads(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(guides.files("lmcache.md")["lmcache.yaml"])
    config = LMCacheEngineConfig.from_file(str(file))
    assert config.remote_url == "mooncakestore://10.0.0.1:50051/"
    assert config.extra_config["master_server_address"] == "10.0.0.1:50051"
    assert not config.local_cpu
