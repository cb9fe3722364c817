"""Measures the peaks of a run with the model and a batch of its own, between two steps."""

from torch import nn

from ddp_runner.data.batches import MicroBatch
from ddp_runner.parallelism.ddp import all_reduce_bytes
from ddp_runner.train.evaluation import DTYPES, forward
from ddp_runner.train.peaks import Peaks, measure_peaks
from ddp_runner.train.state import TrainState, restored_after


def peaks_of(state: TrainState, batch: MicroBatch) -> Peaks:
    """Measure, and leave the state as it was. Collective: every rank must call.

    Args:
        state: after some steps, when DDP's buckets are final.
        batch: of this rank, of a step that it has taken.
    """
    setup = state.setup
    # The replicas of DataParallel are on more devices, and a server computes no gradients.
    computes_alone = not isinstance(state.model, nn.DataParallel) and setup.role.gradients is None
    with restored_after(state):
        return measure_peaks(
            (lambda: forward(state, state.module, batch).loss_sum) if computes_alone else None,
            parameters=[one for one in state.module.parameters() if one.requires_grad],
            num_samples=batch.num_samples,
            all_reduces=all_reduce_bytes(state.model),
            devices=setup.devices,
            dtype=DTYPES[setup.config.train.precision],
            group=setup.group,
        )
