"""The commands of those who operate a running cluster: keys, drain, undrain, role, restart, scale.

Options alone; ``operate`` does what they say and is imported when one is called. Part of ``main``.
"""

import sys
from typing import Annotated

import typer

from services.cli import options
from services.runtime.settings import Role

app = typer.Typer()


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Whom it is for: letters, digits, . _ @ -")],
    streams: Annotated[int, typer.Option(help="Most requests at once; 0: no limit.")] = 0,
    per_minute: Annotated[int, typer.Option(help="Most requests a minute; 0: no limit.")] = 0,
) -> None:
    """Draw an API key: it is shown once on stderr; the line for --api-keys goes to stdout."""
    from services.router import keys

    drawn = keys.new_key()
    line = keys.key_line(name, drawn, streams, per_minute)
    print(f"key for {name}, shown once: {drawn}", file=sys.stderr)
    print(line)


InstanceId = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, from status.")]


@app.command()
def drain(
    instance: InstanceId,
    address: options.Address = options.ADDRESS,
    now: Annotated[
        bool, typer.Option("--now", help="What runs there goes on elsewhere at once.")
    ] = False,
) -> None:
    """Let an instance take no more requests. Needs KVRELAY_CLUSTER_TOKEN."""
    from services.cli import operate

    operate.drain(address, instance, now=now)


@app.command()
def undrain(instance: InstanceId, address: options.Address = options.ADDRESS) -> None:
    """Let a drained instance take requests again. Needs KVRELAY_CLUSTER_TOKEN."""
    from services.cli import operate

    operate.drain(address, instance, undo=True)


@app.command()
def role(
    instance: InstanceId,
    to: Annotated[Role, typer.Argument(metavar="prefill|decode|colocated")],
    address: options.Address = options.ADDRESS,
) -> None:
    """Give a running instance another role, once what it does has ended. Needs the cluster token.

    Nothing is restarted and no request is lost; the id stays.
    """
    from services.cli import operate

    operate.change_role(address, instance, to)


@app.command()
def restart(
    instances: Annotated[
        list[str] | None, typer.Argument(metavar="[INSTANCE]...", help="None: all of them.")
    ] = None,
    address: options.Address = options.ADDRESS,
) -> None:
    """Restart instances one after the other, without losing a request. Needs the cluster token."""
    from services.cli import operate

    operate.restart(address, instances or ())


Wanted = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Instances there should be; unsaid: as many as now."),
]


@app.command()
def scale(
    prefill: Wanted = None,
    decode: Wanted = None,
    colocated: Wanted = None,
    address: options.Address = options.ADDRESS,
) -> None:
    """Have more or fewer instances in a cluster that `kvrelay serve` keeps, on its machine.

    Those that go finish what they do, or it goes on elsewhere. Needs KVRELAY_CLUSTER_TOKEN.
    """
    from services.cli import operate

    wanted = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
    operate.scale(address, {role: count for role, count in wanted.items() if count is not None})
