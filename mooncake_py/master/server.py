"""`mooncake-master`: options to settings, one running `Master`, signals to a clean stop.

A start that cannot work is one line on stderr: exit 2 for a wrong option, 1 for everything else.
SIGTERM and SIGINT stop the master and exit 0; a second signal exits at once.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import fields
from typing import Any

import click

from mooncake_py import config
from mooncake_py import log as log_lines
from mooncake_py.clock import SystemClock
from mooncake_py.config import MasterSettings, Origin
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.stopping import StopSignals

log = logging.getLogger("mooncake_py.master.server")  # also when run with -m

PROCESS = "master"
SWITCH_SECONDS = 0.0005  # threads hand over the interpreter this soon: calls are short


def load_settings(
    options: dict[str, Any], environ: dict[str, str] | None = None
) -> tuple[MasterSettings, CatalogSettings, list[Origin]]:
    """Both settings classes out of options by field name. UsageError as in `config.resolve`."""
    known = [f.name for kind in (MasterSettings, CatalogSettings) for f in fields(kind)]
    for name in options:
        if name not in known:
            raise UsageError(
                f"there is no setting {name!r}", remedy="mooncake-master --settings lists them"
            )
    config.refuse_unknown(PROCESS, known, environ)
    process, first = config.resolve(MasterSettings, PROCESS, options, environ)
    catalog, second = config.resolve(CatalogSettings, PROCESS, options, environ)
    return process, catalog, first + second


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in texts)
    for name, value in pairs.items():
        if not value:
            raise UsageError(f"--set {name}: there is no value", remedy="write --set name=value")
    return pairs


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="gRPC API; port 0: any. [127.0.0.1:50051]")
@click.option(
    "--lane-listen", metavar="HOST:PORT", help="Hot lane; auto: any port of that host; off. [auto]"
)
@click.option("--advertise", metavar="HOST", help="Host under which others reach this one.")
@click.option(
    "--metadata", metavar="PATH", help="File, folder, memory, or etcd://h1,h2,h3. [a user's file]"
)
@click.option(
    "--metrics", "metrics_listen", metavar="HOST:PORT", help="/metrics and /health; off. [off]"
)
@click.option("--log-level", type=click.Choice(config.LOG_LEVELS), help="[info]")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="Any other setting.")
@click.option("--settings", "show", is_flag=True, help="Print all settings and their origins.")
def main(pairs: tuple[str, ...], show: bool, **given: str | None) -> None:
    """The master of a mooncake cluster: knows where every object is, holds none."""
    try:
        options = {name: value for name, value in given.items() if value is not None}
        settings, catalog, origins = load_settings({**_pairs(pairs), **options})
        if show:
            click.echo("\n".join(map(str, origins)))
            return
        log_lines.setup(settings.log_level)
        _serve(settings, catalog, origins)
    except MooncakeError as error:
        click.echo(f"mooncake-master: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _serve(settings: MasterSettings, catalog: CatalogSettings, origins: list[Origin]) -> None:
    config.silence_grpc_core()
    from mooncake_py.master.process import Master  # noqa: PLC0415  (loads gRPC's core)
    from mooncake_py.transfer.advertised import warn_of_unknown_host  # noqa: PLC0415

    stop = StopSignals()
    sys.setswitchinterval(SWITCH_SECONDS)
    master = Master(
        settings, catalog, SystemClock(), lambda text: click.echo(f"mooncake-master {text}")
    )
    chosen = [str(origin) for origin in origins if origin.source != "default"]
    log.info("settings %s", " ".join([*chosen, "all others default"]))
    log.info("catalog %s", master.recovered)
    warn_of_unknown_host(settings.advertise)
    if not stop.came():
        click.echo(
            f"mooncake-master ready grpc={master.grpc} lane={master.lane} "
            f"metadata={master.metadata} metrics={master.metrics}"
        )
    stop.wait()
    log.info("stopping")
    master.close()


if __name__ == "__main__":
    main()
