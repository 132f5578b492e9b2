"""Settings: origins, units, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_py import config
from mooncake_py.config import MasterSettings, NodeSettings, join_address, resolve, split_address
from mooncake_py.errors import UsageError
from mooncake_py.master.server import load_settings, main
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import RELEASE
from mooncake_py.store.node import main as node_main


def test_c06_every_value_says_where_it_came_from() -> None:
    environ = {"MOONCAKE_MASTER_STOP_MS": "5s", "MOONCAKE_MASTER_LISTEN": "[::1]:1"}
    settings, origins = resolve(MasterSettings, "master", {"listen": "h:2"}, environ)
    assert (settings.listen, settings.stop_ms) == ("h:2", 5_000)
    source = {origin.name: origin.source for origin in origins}
    assert source["listen"] == "option"
    assert source["stop_ms"] == "environment"
    assert source["metadata"] == "default"
    assert str(origins[0]) == "listen=h:2 (option)"


def test_options_that_were_not_given_do_not_hide_the_environment() -> None:
    environ = {"MOONCAKE_MASTER_LISTEN": "h:3"}
    settings, _ = resolve(MasterSettings, "master", {"listen": None}, environ)
    assert settings.listen == "h:3"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("512MiB", 512 << 20), ("4g", 4 << 30), ("64 KB", 64 << 10)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert config.size_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "GiB", "1 PiB", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        config.size_bytes(text)


@pytest.mark.parametrize(
    ("text", "ms"), [("250", 250), ("250ms", 250), ("5s", 5_000), ("2m", 120_000)]
)
def test_durations(text: str, ms: int) -> None:
    assert config.duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-1.example:80", "node-1.example", 80),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[fe80::1]:65535", "fe80::1", 65_535),
        (":7", "", 7),
    ],
)
def test_a84_addresses(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", "host:x", "host:65536", "::1:80", "[::1]", "http://h:1", "a b:1", "h:٣"],
)
def test_a84_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        split_address(text)


def test_what_is_written_wrongly_comes_with_how_to_write_it() -> None:
    with pytest.raises(UsageError, match=r"segment_bytes: '64XB' is no size\. Remedy: write it"):
        resolve(NodeSettings, "node", {"segment_bytes": "64XB"}, {})
    with pytest.raises(UsageError, match="Remedy: write HOST:PORT, without a scheme"):
        split_address("http://127.0.0.1:50051")
    with pytest.raises(UsageError, match="evict_high_ratio is above 0 and at most 1"):
        CatalogSettings(evict_high_ratio=2).validate()


def test_values_that_cannot_be_read_name_the_setting() -> None:
    with pytest.raises(UsageError, match=r"stop_ms: 'soon' is no duration"):
        resolve(MasterSettings, "master", {"stop_ms": "soon"}, {})
    with pytest.raises(UsageError, match=r"queue_calls_max: 'many' is no int"):
        resolve(MasterSettings, "master", {"queue_calls_max": "many"}, {})


def test_a21_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"suspect_ms.*dead_ms"):
        load_settings({"suspect_ms": "10s", "dead_ms": "5s"}, {})
    with pytest.raises(UsageError, match="heartbeat_ms"):
        load_settings({"heartbeat_ms": "2s", "suspect_ms": "1s"}, {})
    with pytest.raises(UsageError, match="queue_bytes_max"):
        load_settings({"queue_bytes_max": "1M"}, {})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("metadata", "http://host"),  # or it would be a folder named "http:"
        ("advertise", "two words"),
        ("heartbeat_ms", "0"),  # nodes and master would do nothing else
        ("call_ms_max", "0"),  # every call would be too late
    ],
)
def test_a21_a_master_refuses_values_it_cannot_live_with(setting: str, value: str) -> None:
    with pytest.raises(UsageError, match=setting):
        load_settings({setting: value}, {})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("advertise", "two words"),
        ("health_listen", "nowhere"),
        ("health_listen", "127.0.0.1:99999"),
        ("transports", "tcp,bogus"),
        ("transports", "local"),
        ("name", "n" * 201),
        ("name", "two words"),
    ],
)
def test_a21_a_node_refuses_values_it_cannot_live_with(setting: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{setting}|address"):
        resolve(NodeSettings, "node", {setting: value}, {})


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":7000"])
def test_a44_a_node_tells_nobody_to_dial_all_addresses(listen: str) -> None:
    """A peer on another host that dials 0.0.0.0 reaches itself."""
    with pytest.raises(UsageError, match="advertise"):
        resolve(NodeSettings, "node", {"listen": listen}, {})
    resolve(NodeSettings, "node", {"listen": listen, "advertise": "here"}, {})


def test_typing_mistakes_are_refused() -> None:
    with pytest.raises(UsageError, match="leese_ms"):
        load_settings({"leese_ms": "1"}, {})
    with pytest.raises(UsageError, match="MOONCAKE_MASTER_LEESE_MS"):
        load_settings({}, {"MOONCAKE_MASTER_LEESE_MS": "1"})
    load_settings({}, {"MOONCAKE_NODE_LEESE_MS": "of another process"})


def test_the_release_is_the_packages_version() -> None:
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["version"] == RELEASE


def test_a86_the_help_names_the_real_defaults() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    real = MasterSettings()
    for default in (real.listen, real.lane_listen, real.log_level):
        assert f"[{default}]" in text
    listed = CliRunner().invoke(main, ["--settings"], env={}).output
    assert "listen=127.0.0.1:50051 (default)" in listed
    assert f"dead_ms={CatalogSettings().dead_ms} (default)" in listed


def test_state_is_kept_where_the_user_keeps_it() -> None:
    assert config.state_folder({"XDG_STATE_HOME": "/x"}) == "/x/mooncake"
    assert config.state_folder({}).endswith("/.local/state/mooncake")


def test_c07_the_size_of_a_disk_without_its_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is 10 GiB anyway, and yet who gives it expects a disk."""
    for words in (["--disk-size", "10GiB"], []):
        done = CliRunner().invoke(node_main, [*words, "--settings"])
        assert done.exit_code == 2, done.output
        assert "there is no --disk" in done.output
        assert CliRunner().invoke(node_main, [*words, "--disk", "/x", "--settings"]).exit_code == 0
        monkeypatch.setenv("MOONCAKE_NODE_DISK_SIZE_BYTES", "10GiB")
