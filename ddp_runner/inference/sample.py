"""``task=sample``: write a text with the language model of a run.

There is no cache of keys and values: each token is a forward over the last
``dataset.sequence_length`` tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_runner.config.sections import InferenceConfig
from ddp_runner.data.text_tokenizer import Characters, TextTokenizer
from ddp_runner.data.trees import shape_of, shapes_on_failure
from ddp_runner.errors import UserError, printable
from ddp_runner.files import replace_file
from ddp_runner.inference.model import kept_tokenizer, load_model, open_logger
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, report_start
from ddp_runner.seeds import derive
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.start_block import shown_path
from ddp_runner.train.state import autocast


def run_sampling(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Print the text that the model writes after ``inference.prompt``, and keep it as a file.

    It needs the run's folder but not its data. The same seed gives the same text.

    Raises:
        UserError: the run has no tokenizer or no language model, its weights are unusable, or the
            prompt has no tokens.
    """
    report_start(session, step=0)
    config, settings, device = session.config, session.config.inference, session.devices[0]
    assert settings.run is not None
    run_dir = RunDir(Path(settings.run))
    tokenizer = kept_tokenizer(run_dir)
    tokens = encoded_prompt(tokenizer, settings.prompt)
    module, weights = load_model(
        run_dir.path,
        weights=settings.weights,
        device=device,
        allowed_targets=config.allowed_targets,
        log=session.log,
    )
    count = settings.num_tokens
    data = f"a prompt of {len(tokens)} tokens, {count} to write"
    with open_logger(session, run_dir, weights, data=data, num_rounds=count) as logger:
        new_tokens = sampled(
            module,
            tokens,
            settings,
            vocab_size=tokenizer.vocab_size,
            context=config.dataset.get("sequence_length"),
            generator=torch.Generator().manual_seed(derive(config.seed, "sample")),
            device=device,
        )
        with autocast(device, config.train.precision):
            for number, token in enumerate(new_tokens, start=1):
                tokens.append(token)
                logger.step_done(step=number, epoch=1)
                if number < count and stop_requested():
                    logger.finish(Status.PREEMPTED, step=weights.step, epoch=0)
                    return Status.PREEMPTED
        text = tokenizer.decode(tokens)
        path = session.run_dir.path / "sample.txt"
        replace_file(path, text)
        session.log("\n".join(map(printable, text.splitlines())))
        session.log(f"the text is in {shown_path(path)}")
        logger.finish(Status.COMPLETED, step=weights.step, epoch=0)
    return Status.COMPLETED


def encoded_prompt(tokenizer: TextTokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt, or of a line end if it is empty.

    Raises:
        UserError: it has no tokens, or has characters that the run's vocabulary lacks.
    """
    text = prompt or "\n"
    if isinstance(tokenizer, Characters) and (unknown := {*text} - {*tokenizer.characters}):
        raise UserError(
            f"inference.prompt ({prompt!r}) has characters that the run's vocabulary lacks "
            f"({', '.join(map(repr, sorted(unknown)))})",
            "write another prompt",
        )
    tokens: list[int] = tokenizer.encode(text).tolist()
    if not tokens:
        raise UserError(f"inference.prompt ({prompt!r}) has no tokens", "write another prompt")
    return tokens


@torch.no_grad()
def sampled(
    model: nn.Module,
    tokens: Sequence[int],
    settings: InferenceConfig,
    *,
    vocab_size: int,
    context: int | None,
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[int]:
    """Yield ``inference.num_tokens`` tokens that the model writes after `tokens`.

    The model maps int64 (1, length) to logits (1, length, vocabulary), and may have logits for more
    than the `vocab_size` tokens of the tokenizer. There is at least one token to start with.
    `context` is the most tokens that the model sees; None: all. The generator is on the CPU, so
    that every device draws the same numbers.

    Raises:
        UserError: the model returns other shapes, or logits that are not finite.
    """
    written = list(tokens)
    for _ in range(settings.num_tokens):
        seen = written[-context:] if context else written
        logits = _next_logits(model, torch.tensor([seen], device=device), vocab_size)
        written.append(choose(logits, settings.temperature, settings.top_k, generator))
        yield written[-1]


def choose(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """Draw a token by its logits (vocab_size,); return the likeliest with temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # Make the largest logit 0: no temperature overflows then.
    chances = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(chances.multinomial(1, generator=generator))


def _next_logits(model: nn.Module, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the logits after the last token, float64 (vocab_size,), on the CPU."""
    fix = "task=sample takes a language model, such as model=gpt"
    with shapes_on_failure("the model cannot take tokens,", tokens, fix=fix):
        outputs = model(tokens)
    fits = isinstance(outputs, Tensor) and outputs.shape[:-1] == tokens.shape
    if not fits or outputs.shape[-1] < vocab_size:
        raise UserError(
            f"the model returns {shape_of(outputs)} for tokens {tuple(tokens.shape)}, not logits "
            f"{(*tokens.shape, vocab_size)}",
            fix,
        )
    logits: Tensor = outputs[0, -1, :vocab_size].double().cpu()
    if not logits.isfinite().all():
        raise UserError(
            "the model gives logits that are not finite",
            "name an earlier checkpoint in inference.weights",
        )
    return logits
