"""`pip install ./compat` in a fresh environment: what is there then, and when it refuses."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import wait_until

ROOT = Path(__file__).parents[2]
UPSTREAM = "mooncake_transfer_engine-0.3.13.dist-info"


class Environment:
    """A new venv that sees the packages of this one, and this tree, as installed."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (self.site,) = (folder / "lib").glob("python3*/site-packages")
        seen = [sysconfig.get_path("purelib"), str(ROOT)]
        (self.site / "seen.pth").write_text("\n".join(seen) + "\n")
        self.source = folder / "compat"  # pip writes beside what it builds
        shutil.copytree(
            ROOT / "compat", self.source, ignore=shutil.ignore_patterns("build", "*.eg*")
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env=clean, cwd=self.bin, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    def install(self) -> subprocess.CompletedProcess[str]:
        """As `pip install ./compat`; what it depends on and is built with is here already."""
        return self.run(
            "python", "-m", "pip", "install", "--no-deps", "--no-build-isolation",
            "--disable-pip-version-check", str(self.source),
        )  # fmt: skip

    def pretend_upstream(self) -> Path:
        made = self.site / UPSTREAM
        made.mkdir()
        (made / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: mooncake-transfer-engine\nVersion: 0.3.13\n"
        )
        return made


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("fresh") / "venv")


@pytest.fixture(scope="module")
def installed(fresh: Environment) -> Environment:
    wheel = fresh.pretend_upstream()
    try:
        refused = fresh.install()
        assert refused.returncode != 0
        assert "mooncake-transfer-engine is installed" in refused.stdout + refused.stderr
        # pip's own environment for builds sees no packages; the look goes to where they are
        program = (
            "import runpy, sys; sys.path = [each for each in sys.path if 'site-packages' not in"
            f" each]; runpy.run_path({str(fresh.source / 'setup.py')!r})"
        )
        alone = fresh.run("python", "-c", program)
        assert "pip uninstall mooncake-transfer-engine" in alone.stderr
    finally:
        shutil.rmtree(wheel)
    done = fresh.install()
    assert done.returncode == 0, done.stdout + done.stderr
    return fresh


def test_f68_it_installs_and_refuses_over_upstreams_wheel(installed: Environment) -> None:
    shown = installed.run("python", "-m", "pip", "show", "mooncake_py-compat")
    assert "Version: 0.1.0" in shown.stdout
    program = (
        "from mooncake.store import MooncakeDistributedStore, ReplicateConfig, ObjectDataType,"
        " MooncakeHostMemAllocator, bind_to_numa_node\n"
        "from mooncake.engine import TransferEngine, TransferOpcode, TransferNotify\n"
        "import mooncake; print(mooncake.__file__, TransferEngine.__module__)"
    )
    got = installed.run("python", "-c", program)
    assert got.returncode == 0, got.stderr
    assert str(installed.site) in got.stdout
    assert "mooncake_py.compat.engine" in got.stdout
    wheel = installed.pretend_upstream()
    try:
        got = installed.run("python", "-c", "import mooncake.store")
        assert "both installed" in got.stderr
    finally:
        shutil.rmtree(wheel)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def master(installed: Environment) -> Iterator[tuple[str, str]]:
    """(address, admin address) of `mooncake_master`, started with a launch script's flags."""
    port, admin = free_port(), free_port()
    child = subprocess.Popen(
        [str(installed.bin / "mooncake_master"), f"--rpc_port={port}", "--rpc_address=127.0.0.1",
         f"--metrics_port={admin}", "--metrics_host", "127.0.0.1", "--default_kv_lease_ttl=7s",
         "--eviction_high_watermark_ratio=0.8", "--eviction_ratio=0.1", "--client_ttl=20",
         "--enable_http_metadata_server=true", "--rpc_thread_num=8", "--enable_offload=false",
         "--nologtostderr"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield f"127.0.0.1:{port}", f"127.0.0.1:{admin}"
    child.terminate()
    _, said = child.communicate(timeout=20)
    assert "Traceback" not in said


def page(address: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_f68_the_master_of_a_launch_script_and_the_pages_that_clients_poll(
    installed: Environment, master: tuple[str, str]
) -> None:
    address, admin = master
    wait_until(lambda: "ok" in page(admin, "/health").lower(), 30_000)
    assert page(admin, "/get_all_segments").strip() == ""
    program = (
        "import sys\nfrom mooncake.store import MooncakeDistributedStore as S\ns = S()\n"
        f"assert s.setup('127.0.0.1', 'P2PHANDSHAKE', 32 << 20, 16 << 20, 'tcp', '', '{address}')"
        " == 0\nassert s.put('a', b'1' * 4096) == 0 and s.is_exist('a') == 1\n"
        "assert s.get('a') == b'1' * 4096\nprint('up', flush=True)\nsys.stdin.read()\ns.close()"
    )
    client = subprocess.Popen(
        [str(installed.bin / "python"), "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline().strip() == "up"
    wait_until(lambda: len(page(admin, "/get_all_segments").split()) == 1)
    assert "mooncake_" in page(admin, "/metrics")
    client.communicate("", timeout=20)


def test_f68_flags_are_translated_and_unknown_ones_refused_by_name(installed: Environment) -> None:
    program = "import sys, mooncake.master as m; print(m.arguments_of(sys.argv[1:]))"

    def said(*flags: str) -> str:
        done = installed.run("python", "-c", program, *flags)
        return done.stdout + done.stderr

    assert "'127.0.0.1:50052'" in said("--rpc_port=50052", "-rpc-address", "127.0.0.1")
    assert "lease_ms=120000', '--set', 'lease_max_ms=120000" in said("--default_kv_lease_ttl=2m")
    assert "evict_high_ratio=0.5', '--set', 'evict_low_ratio=0.45" in said(
        "--eviction_high_watermark_ratio=0.5"
    )
    assert "dead_ms=30000" in said("--client_ttl=30")
    assert "'etcd://h1:2379,h2:2379/prod'" in said(
        "--enable_ha=true", "--etcd_endpoints=h1:2379;h2:2379", "--cluster_id=prod"
    )
    assert "'redis' is not supported" in said("--enable_ha", "--ha_backend_type=redis")
    assert "not supported: --enable_snapshot, --root_fs_dir" in said(
        "--enable_snapshot", "--root_fs_dir=/x", "--rpc_port=1"
    )
    assert "'memory'" in said("--enable_snapshot=false", "--enable_cxl=false")
    assert "'later' is no duration" in said("--default_kv_lease_ttl=later")
    refused = installed.run("mooncake_master", "--enable_snapshot")
    assert refused.returncode == 1
    assert "--enable_snapshot" in refused.stderr
    told = installed.run("mooncake_master", "--help")
    assert told.returncode == 0
    assert "--default_kv_lease_ttl            lease_ms\n" in told.stdout
