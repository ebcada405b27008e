"""What ranks give `shard_` and `migrate`: plan and heat of rank 0, and a comparison of everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from thermocline import __version__
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.plan.model import Plan
from thermocline.plan.run_file import fingerprint

from .planned_tables import Collection
from .process_groups import CPU, broadcast_object, check_same, current_device, gather_objects


def device_of_rows(found: Mapping[str, Collection]) -> contextlib.AbstractContextManager[None]:
    """Make the device of collections the current one."""
    return current_device(next((each.arena.device for each in found.values() if each.arena.device.type != "meta"), CPU))


def raise_on_all_ranks(failed: Exception | None, everyone: list[str]) -> None:
    """Raise where any rank failed. `everyone` has what each rank says about its failure, or ""."""
    if failed is not None:
        raise failed
    for rank, error_there in enumerate(everyone):
        if error_there:
            raise BadInput(f"rank {rank} stopped: {error_there}", rank=rank)


def read_inputs(
    given: Plan | str | Path | None,
    heat: HeatProfile | str | Path | None,
    found: Mapping[str, Collection],
    settings: Mapping[str, str],
) -> tuple[Plan, HeatProfile | None]:
    """Plan and heat of rank 0. Raises on all ranks if another rank was given others. Collective."""
    failed: Exception | None = None
    plan: Plan | None = None
    profile: HeatProfile | None = None
    inputs = {"the version of thermocline": __version__, **settings}
    try:
        plan = given if given is None or isinstance(given, Plan) else Plan.load(given)
        profile = heat if heat is None or isinstance(heat, HeatProfile) else HeatProfile.load(heat)
        inputs["collections"] = "; ".join(f"{name}: {_describe(collection)}" for name, collection in found.items())
        if plan is not None:
            inputs["the number of ranks of the plan"] = f"{plan.topology.nodes} x {plan.topology.gpus_per_node}"
            inputs["the plan"] = f"sha256 {fingerprint(plan.model_copy(update={'created': ''}))[:12]}"  # of the decisions
        if profile is not None:
            inputs["the heat"] = f"sha256 {profile.sha256[:12]}"
    except (BadInput, OSError) as error:
        failed = error
    with device_of_rows(found):
        everyone = gather_objects((f"{failed}" if failed else "", inputs))
        raise_on_all_ranks(failed, [error_there for error_there, _ in everyone])
        first = {"the heat": "none", **everyone[0][1]}
        if "the plan" not in first:
            raise BadInput(
                "the plan is None on rank 0, whose plan all ranks use; give it a plan, or a plan file", parameter="plan"
            )
        check_same([first | each for _, each in everyone], "shard_")
        lacking = any("the heat" not in each for _, each in everyone)  # a profile may be large
        used: tuple[Plan, HeatProfile | None] = broadcast_object(plan), broadcast_object(profile) if lacking else profile
    return used


def _describe(collection: Collection) -> str:
    tables = ", ".join(f"{t.name} {t.rows} x {t.dim} for {' '.join(t.features)}" for t in collection.tables)
    rows = collection.rows
    given = f"{rows.optimizer}, seed {rows.seed}, update={rows.update!r}, residency={rows.residency!r}"
    return f"{tables}, mode {collection.mode}, {given}"
