"""Compose two configs, so that Hydra's parsers have built their tables.

That takes a tenth of a second, which no command spends that is forked from the server of ``warm``.
"""

from hydra.core.global_hydra import GlobalHydra

from ddp_runner.cli.command import compose, parse

for words in (["model=toy", "seed=1"], ["model=convnet", "parallelism=fsdp", "metrics=[top_k]"]):
    compose(parse(words))
GlobalHydra.instance().clear()
