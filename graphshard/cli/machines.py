"""`graphshard machines [NAME]`: what `--hw` and `machine=` may name, numbers with their sources."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from graphshard.cli.common import print_json, print_text


def add_machines(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    machines = verbs.add_parser(
        "machines",
        help="list the machines that can be planned for, or all numbers of one",
        description="Without NAME: devices and networks with their main numbers. With NAME, a "
        "device (h100), a network (ib400) or both (h100-ib200, h100-200Gbit, "
        "h100-ib400:pod=32:oversubscribed=2): every number, with its source.",
    )
    machines.add_argument("name", metavar="NAME", nargs="?")
    machines.add_argument("--json", action="store_true", help="print the result as JSON")
    machines.set_defaults(run=_machines)


def _machines(args: argparse.Namespace) -> None:
    from graphshard.cost.presets import facts_of, network_names, preset_names
    from graphshard.view.machines import machine_text, machines_text

    if args.name is not None:
        facts = facts_of(args.name)
        if args.json:
            print_json([asdict(fact) for fact in facts])
        else:
            print_text(machine_text(facts))
        return
    devices, networks = preset_names(), network_names()
    if args.json:
        told = {"devices": devices, "networks": networks}
        print_json(
            {k: {n: [asdict(f) for f in facts_of(n)] for n in names} for k, names in told.items()}
        )
    else:
        print_text(machines_text([*map(facts_of, devices)], [*map(facts_of, networks)]))
