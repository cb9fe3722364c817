"""A reduce-scatter for FSDP2 over gloo, whose own sums the whole tensor on every rank.

Source: https://github.com/pytorch/pytorch/pull/118911, which built gloo's from an all-reduce.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class GlooReduceScatter:
    """Sends each rank its part alone, and adds there: half of the bytes of an all-reduce.

    Sums and means, which FSDP2 asks for. Anything else is torch's own reduce-scatter.
    """

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
    ) -> dist.Work | None:
        """Fill the output, a vector, with this rank's part of all inputs, reduced by `op`.

        Collective: every rank of the group must call.

        Returns:
            What to wait for, if `async_op`; else None, and the output is filled.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None
