"""Runs against runs: read (``runs``), worked out (``analysis``), shown (``tables``, ``plots``).

Torch-free. ``python -m ddp_runner.compare`` is the command; other code calls ``runs.read_runs``
and ``analysis.compare``.
"""
