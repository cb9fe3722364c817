"""A reduce-scatter for FSDP2 over gloo, whose own sums the whole tensor on every rank.

Source: https://github.com/pytorch/pytorch/pull/118911, which built gloo's from an all-reduce.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class GlooReduceScatter:
    """Sends each rank its part alone, and adds there: half of the bytes of an all-reduce."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of the given size."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill the output, a vector, with this rank's part of the sum or mean of all inputs.

        Collective: every rank of the group must call.

        Raises:
            NotImplementedError: another operation, or one to wait for later.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"{op}, async_op={async_op}")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
