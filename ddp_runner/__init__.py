"""A config-driven experiment runner for distributed PyTorch: ``python -m ddp_runner``.

In a notebook, ``load`` returns the model of a run, ``load_tokenizer`` the tokenizer of its texts,
``read_runs`` a data frame.
"""

from ddp_runner.inference.notebook import load, load_tokenizer, read_runs

__all__ = ["load", "load_tokenizer", "read_runs"]
__version__ = "0.1.0"
