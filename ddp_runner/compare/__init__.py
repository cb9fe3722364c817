"""Compare runs: ``runs`` reads them, ``analysis`` computes, ``formats`` and ``report`` show it.

The package never imports torch. The command is ``python -m ddp_runner.compare``; other code uses
``runs.read_runs`` and ``analysis.compare``.
"""
