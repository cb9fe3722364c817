"""A few faults of the campaign over several hosts in benchmarks/, and that it notices a change."""

import shutil
import sys
from pathlib import Path

import pytest
from clusters import needs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from undisturbed import assert_equal

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # after the helpers, of which one has the same name
from cluster_campaign import campaign, draws
from cluster_checks import disturbed
from cluster_faults import KINDS, Draw
from cluster_training import NUM_STEPS, SETTINGS, undisturbed

pytestmark = needs()


def altered_copy(run: Path, other: Path) -> Path:
    """Copy a run, and change an exported weight of the copy."""
    shutil.copytree(run, other)
    path = other / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1e-6
    save_file(tensors, path, facts)
    return other


@pytest.mark.slow
def test_disturbed_runs_end_as_undisturbed_runs(short_temp: Path) -> None:
    """A rank killed and restarted, a host killed, and a stop, with a shared disk and without."""
    faults = [
        Draw("rank killed", "saving", "2 hosts, restarts", seed="a"),
        Draw("host killed", "training", "2 hosts", seed="b"),
        Draw("SIGTERM", "training", "2 hosts, own disks", seed="c"),
    ]
    result = campaign(short_temp, faults, jobs=1, log=print)
    assert [(seen.was_reached, seen.wrong) for _, seen in result] == [(True, [])] * 3


@pytest.mark.slow
def test_the_campaign_notices_an_altered_weight(short_temp: Path) -> None:
    """By a fault that leads to other weights than expected, bit for bit."""
    run, calls = undisturbed(short_temp / "run", SETTINGS["2 hosts"])
    assert_equal(run, run, num_steps=NUM_STEPS)
    altered = altered_copy(run, short_temp / "altered")
    fault = Draw("rank raises", "training", "2 hosts", seed="d")
    seen = disturbed(short_temp / "fault", fault, altered, num_calls=calls)
    assert len(seen.wrong) == 1
    assert "the run differs in model.safetensors.tensors." in seen.wrong[0]


def test_a_seed_draws_every_kind_of_fault_in_every_phase_and_setting() -> None:
    """The same faults again, and only faults that can happen."""
    faults = draws(100, seed=1)
    assert faults == draws(100, seed=1) != draws(100, seed=2)
    places = {(kind, phase) for kind, phases in KINDS.items() for phase in phases}
    assert {(one.kind, one.phase) for one in faults} == places
    assert {one.setting for one in faults} == set(SETTINGS)
