"""Compare runs: read them (``runs``), compute (``analysis``), show the result (``render``).

The package never imports torch. The command is ``python -m ddp_runner.compare``; other code uses
``runs.read_runs`` and ``analysis.compare``.
"""
