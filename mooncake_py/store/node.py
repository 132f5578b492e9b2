"""`mooncake-node`: settings, start, the lines people read, signals, stop.

SIGTERM and SIGINT end a start at once, and a running node in order; exit 0. A second one exits at
once.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import fields

import click

from mooncake_py import config
from mooncake_py import log as log_lines
from mooncake_py.config import NodeSettings, Origin
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.stopping import Stopped, StopSignals

log = logging.getLogger(__name__)

PROCESS = "node"
SWITCH_SECONDS = 0.0005  # threads hand over the interpreter this soon: pulls before disk work


@click.command()
@click.option("--master", metavar="HOST:PORT", help="gRPC API of the master. [127.0.0.1:50051]")
@click.option("--listen", metavar="HOST:PORT", help="Engine; port 0: any. [127.0.0.1:0]")
@click.option("--advertise", metavar="HOST", help="Host under which others reach this one.")
@click.option("--segment-bytes", metavar="SIZE", help="Memory to offer. [1GiB]")
@click.option(
    "--segment-file", metavar="PATH", help="Memory that outlives the node; not mapped by readers."
)
@click.option("--disk", metavar="PATH", help="Folder of the disk tier. [none]")
@click.option("--disk-size", "disk_size_bytes", metavar="SIZE", help="What it may take. [10GiB]")
@click.option("--name", metavar="NAME", help="Unique in the cluster. [host name and port]")
@click.option("--domain", metavar="LABEL", help="Of what fails together, such as a rack.")
@click.option("--numa-node", metavar="NUMBER", help="Of memory and threads; auto, off. [auto]")
@click.option(
    "--drain-ms", metavar="TIME", help="After SIGTERM: for moving objects elsewhere. [10000]"
)
@click.option("--transports", metavar="LIST", help="Of local, shm, rdma and tcp. [local,shm,tcp]")
@click.option(
    "--health-listen", metavar="HOST:PORT", help="Health service; auto: any port; off. [auto]"
)
@click.option("--log-level", type=click.Choice(config.LOG_LEVELS), help="[info]")
@click.option("--settings", "show", is_flag=True, help="Print all settings and their origins.")
def main(show: bool, **given: str | None) -> None:
    """A node of a mooncake cluster: offers this machine's memory to the store."""
    try:
        config.refuse_unknown(PROCESS, [f.name for f in fields(NodeSettings)])
        settings, origins = config.resolve(NodeSettings, PROCESS, given)
        _check_disk(settings, origins)
        if show:
            click.echo("\n".join(map(str, origins)))
            return
        log_lines.setup(settings.log_level)
        _serve(settings, origins)
    except MooncakeError as error:
        click.echo(f"mooncake-node: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _check_disk(settings: NodeSettings, origins: list[Origin]) -> None:
    """UsageError: the size of a disk tier without its folder; nothing would be kept on any disk."""
    for origin in origins:
        given = origin.name.startswith("disk_") and origin.source != "default"
        if given and not settings.disk:
            raise UsageError(
                f"{origin.name} is set ({origin.source}), and there is no --disk",
                remedy="name the folder with --disk PATH, or leave the setting out",
            )


def _serve(settings: NodeSettings, origins: list[Origin]) -> None:
    config.silence_grpc_core()
    from mooncake_py.store import memory_domain  # noqa: PLC0415
    from mooncake_py.store.node_process import Node  # noqa: PLC0415  (loads gRPC's core)
    from mooncake_py.transfer.advertised import warn_of_unknown_host  # noqa: PLC0415

    stop = StopSignals(raises=True)
    sys.setswitchinterval(SWITCH_SECONDS)
    chosen = [str(origin) for origin in origins if origin.source != "default"]
    log.info("settings %s", " ".join(chosen) or "all default")
    warn_of_unknown_host(settings.advertise)
    names, nbytes = settings.transport_names(), settings.segment_bytes
    memory_domain.bind(settings.numa_node, names, nbytes)
    node: Node | None = None
    try:
        node = Node(settings)
        node.start()
        stop.raises = False
    except Stopped:
        log.info("stopped while starting")
        if node is not None:
            node.stop()
        return
    if not stop.came():
        click.echo(
            f"mooncake-node ready name={node.name} engine={node.address} master={settings.master} "
            f"segment_bytes={node.segment_bytes} transports={settings.transports} "
            f"health={node.health} mapped={'no' if settings.segment_file else 'yes'}"
        )
    stop.wait()
    log.info("draining")
    node.stop()


if __name__ == "__main__":
    main()
