"""Cuts a model into stages, a run of blocks each, and keeps on a rank the tensors of its own.

The model computes ``head(blocks(embed(inputs)))``. It has the methods ``embed(*inputs)`` and
``head(hidden)``, and ``model.blocks`` names its blocks, called in order as
``block(hidden, *context)``. If it has ``context(*inputs)``, that returns what else the blocks
take; each stage computes it, since all ranks of a pipeline have the same samples.

A stage keeps all modules of the model, without the tensors of the other stages. So names, and
weights that have a seed for each module, are those of the whole model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only  # as torch.distributed itself does

from ddp_runner.errors import UserError, counted, typed
from ddp_runner.parallelism.modules import matched
from ddp_runner.parallelism.shards import spec_of

ENDS = ("embed", "head")  # the methods of a model that the first and the last stage call


@dataclass
class Stages:
    """A rank's stages of a model: number `rank`, and every `size`-th stage after it."""

    module: nn.Module  # the whole model's modules, with the tensors of this rank's stages
    blocks: Sequence[Sequence[nn.Module]]  # of each stage of the model
    group: dist.ProcessGroup  # the ranks that have the model together
    replicas: dist.ProcessGroup | None  # the ranks with the same stages, if there are several
    device: torch.device
    # Parameters that several stages have, with the group of their ranks, by names on this rank.
    ties: Sequence[tuple[Sequence[str], dist.ProcessGroup]] = ()
    copies: frozenset[str] = frozenset()  # names of parameters that another rank counts
    hidden: dict[int, Tensor] = field(default_factory=dict)  # each stage's last output, on meta

    @property
    def own(self) -> range:
        """The numbers of this rank's stages."""
        return range(self.group.rank(), len(self.blocks), self.group.size())

    def compute(self, stage: int, hidden: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Return the output of one of this rank's stages; the first takes no hidden state."""
        model = cast(Any, self.module)
        if stage == 0:
            hidden = model.embed(*args, **kwargs)
        context = model.context(*args, **kwargs) if hasattr(model, "context") else ()
        for block in self.blocks[stage]:
            hidden = block(hidden, *context)
        if stage == len(self.blocks) - 1:
            return model.head(hidden)
        if not isinstance(hidden, Tensor):
            raise UserError(
                f"a stage returns a {type(hidden).__name__}, and a pipeline sends one tensor",
                "let embed and the blocks return one, and context what else blocks need",
            )
        return hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the whole model. Collective: every rank of the group must call.

        Each rank passes the same samples and gets the same outputs. They have no graph.

        Raises:
            UserError: in a backward through the outputs.
        """
        needs_graph, value = torch.is_grad_enabled(), None
        with torch.no_grad():
            for stage in range(len(self.blocks)):
                value = self._shared(stage, value, args, kwargs)
        for leaf in tree_leaves(value) if needs_graph else ():
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaf.requires_grad_().register_hook(_reject_backward)
        return value

    def _shared(self, stage: int, value: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Return a stage's output, sent by its rank; all ranks raise what that rank raises."""
        source, box = stage % self.group.size(), list[Any]([None])
        is_own, error = source == self.group.rank(), None
        if is_own:
            try:
                value = self.compute(stage, value, args, kwargs)
                box = [tree_map_only(Tensor, spec_of, value)]
            except Exception as failure:  # the user's code
                error = failure
                box = [failure if isinstance(failure, UserError) else RuntimeError(typed(failure))]
        cpu = torch.device("cpu")
        dist.broadcast_object_list(box, group_src=source, group=self.group, device=cpu)
        if isinstance(box[0], Exception):
            raise error or box[0]
        if not is_own:
            value = tree_map_only(Tensor, partial(spec_of, device=self.device), box[0])
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                sent = leaf.contiguous() if is_own else leaf
                dist.broadcast(sent, group=self.group, group_src=source)
        if isinstance(box[0], Tensor):
            self.hidden[stage] = box[0]
        return value


def stages_of(module: nn.Module) -> Stages | None:
    """Return a rank's stages; None if it has the whole model, or a part of each layer."""
    return getattr(module, "pipeline_stages", None)


def whole_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the whole model by name; a tied one has several names.

    Those of other ranks' stages are on the meta device.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    if stages_of(module) is None:
        return own
    state: Mapping[str, Tensor] = cast(Any, module).whole_state
    whole = {name: value for name, value in state.items() if isinstance(value, nn.Parameter)}
    present = {value: own[name] for name, value in whole.items() if name in own}
    return {name: present.get(value, value) for name, value in whole.items()}


def plan_cut(
    module: nn.Module,
    num_stages: int,
    *,
    patterns: Sequence[str],  # the key model.blocks
    ends: Mapping[str, Sequence[str]],  # the key model.pipeline
    split: Sequence[int] | None,  # the first block of each later stage; None: by parameters
) -> tuple[Sequence[Sequence[nn.Module]], Mapping[str, frozenset[int]]]:
    """Return the blocks of each stage of all ranks of a pipeline, and the stages of each tensor.

    The latter are by name, and all names of a tensor have all its stages.
    `ends` has the parts outside the blocks that each method uses; a part in neither is on every
    stage.

    Raises:
        UserError: the model has no stages, or fewer blocks than stages; a name matches nothing; or
            a layer mixes the samples of a batch.
    """
    fix = "write parallelism=fsdp"
    if missing := [name for name in ENDS if not callable(getattr(module, name, None))]:
        raise UserError(
            f"{type(module).__name__} has no stages: a pipeline needs its methods embed and head, "
            f"and it lacks {' and '.join(missing)}",
            fix,
        )
    if len(patterns) != 1:
        raise UserError(f"model.blocks ({patterns}) must be one pattern for a pipeline", fix)
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise UserError(
                f"{name} is a BatchNorm, which would count the samples that fill a micro-batch",
                "write parallelism=ddp",
            )
    named = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    named |= module.named_buffers(remove_duplicate=False)
    blocks = matched(module, patterns[0], key="model.blocks")
    beside = {name.rpartition(".")[0] for name in blocks}
    for name, part in module.named_modules(remove_duplicate=False):
        is_block = part in blocks.values() and name.rpartition(".")[0] in beside
        if is_block and name not in blocks:
            raise UserError(f"{name} is a block twice, and a pipeline calls each once", fix)
    groups = [_below(named, name) for name in blocks]
    inside = set(chain.from_iterable(groups))
    parts = {end: _end(named, end, names) - inside for end, names in ends.items()}
    sizes = [sum(named[name].numel() for name in names) for names in groups]
    outer = [sum(named[name].numel() for name in parts.get(end, ())) for end in ENDS]
    starts = [0, *_starts(sizes, outer, num_stages=num_stages, split=split), len(blocks)]
    stages = [range(*bounds) for bounds in pairwise(starts)]
    block_of = {name: index for index, names in enumerate(groups) for name in names}
    used = defaultdict[Tensor, set[int]](set)
    for name, value in named.items():
        block = block_of.get(name)
        used[value] |= {number for number, stage in enumerate(stages) if block in stage}
        used[value] |= {(num_stages - 1) * ENDS.index(end) for end in parts if name in parts[end]}
    users = {name: frozenset(used[value] or range(num_stages)) for name, value in named.items()}
    modules = [*blocks.values()]
    return [[modules[index] for index in stage] for stage in stages], users


def _below(named: Mapping[str, Tensor], part: str) -> set[str]:
    """Return the names of a part's tensors; the part may be a tensor itself."""
    return {name for name in named if name == part or name.startswith(f"{part}.")}


def _end(named: Mapping[str, Tensor], end: str, parts: Sequence[str]) -> set[str]:
    if end not in ENDS:
        raise UserError(f"model.pipeline ({end}) must be {' or '.join(ENDS)}")
    for part in parts:
        if not _below(named, part):
            raise UserError(
                f"model.pipeline.{end} ({part}) matches no parameter of the model",
                "name a module or a parameter outside the blocks",
            )
    return set[str]().union(*(_below(named, part) for part in parts))


def _starts(
    sizes: Sequence[int], ends: Sequence[int], *, num_stages: int, split: Sequence[int] | None
) -> Sequence[int]:
    """Return the first block of each stage after the first.

    Raises:
        UserError: a stage would be empty.
    """
    count, sums = len(sizes), [0, *accumulate(sizes)]
    if count < num_stages:
        raise UserError(
            f"model.blocks names {counted(count, 'block')}, fewer than the {num_stages} stages of "
            "a pipeline",
            "use fewer ranks in a pipeline, or write parallelism=fsdp",
        )
    if split is not None:
        bounds = [0, *split, count]
        if len(split) != num_stages - 1 or any(start >= end for start, end in pairwise(bounds)):
            raise UserError(
                f"parallelism.split ({[*split]}) must have the first block of each stage after the "
                f"first: {num_stages - 1} ascending numbers from 1 to {count - 1}"
            )
        return split

    @cache
    def best(start: int, remaining: int) -> tuple[int, tuple[int, ...]]:
        """Return the largest stage of the best cut from a block on, and the cut."""
        before = sums[start] - (ends[0] if start == 0 else 0)
        if remaining == 1:
            return sums[-1] - before + ends[1], ()
        options = []
        for end in range(start + 1, count - remaining + 2):
            largest, rest = best(end, remaining - 1)
            options.append((max(largest, sums[end] - before), (end, *rest)))
        return min(options)

    return best(0, num_stages)[1]


def remember_whole(module: nn.Module) -> None:
    """Set ``module.whole_state``: the whole model's state_dict on the meta device."""
    found = dict[int, Tensor]()
    state = dict[str, Tensor]()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in found:
            meta = torch.empty_like(value, device="meta", requires_grad=False)
            is_parameter = isinstance(value, nn.Parameter)
            found[id(value)] = nn.Parameter(meta, value.requires_grad) if is_parameter else meta
        state[name] = found.get(id(value), value)
    cast(Any, module).whole_state = state


def drop_others(module: nn.Module, keeps: Callable[[str], bool]) -> None:
    """Replace the tensors with other names by None; their modules stay."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for owner in (part._parameters, part._buffers):
            for key, value in owner.items():
                if value is not None and not keeps(f"{prefix}.{key}" if prefix else key):
                    owner[key] = None


def tie_groups(
    users: Mapping[str, frozenset[int]], names: Iterable[str], size: int
) -> Mapping[tuple[int, ...], Sequence[str]]:
    """Return the names of parameters that several ranks of a pipeline have, by these ranks."""
    shared = dict[tuple[int, ...], list[str]]()
    for name in names:
        ranks = tuple(sorted({stage % size for stage in users[name]}))
        if len(ranks) > 1:
            shared.setdefault(ranks, []).append(name)
    return shared


def _reject_backward(_: Tensor) -> None:
    raise UserError(
        "the outputs of a pipeline have no graph: its schedule computes the gradients",
        "let train.step call the model, or write parallelism=fsdp",
    )
