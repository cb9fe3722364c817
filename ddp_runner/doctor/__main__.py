"""The command ``python -m ddp_runner.doctor``: examines this machine, or all of a launch.

python -m ddp_runner.doctor
torchrun --nnodes=2 --nproc-per-node=1 … -m ddp_runner.doctor
srun -N2 --ntasks-per-node=1 python -m ddp_runner.doctor
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from ddp_runner.dist_env import DistEnv, dist_env
from ddp_runner.doctor.alone import examine
from ddp_runner.doctor.finding import Finding, problem, within
from ddp_runner.doctor.machine import QUIET
from ddp_runner.doctor.render import Report, as_json, as_text
from ddp_runner.errors import UserError
from ddp_runner.host.streams import line_width
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR
from ddp_runner.tracking.outputs import OUTPUTS

WIDTH = 80  # of what is printed without a terminal
GROUP_FACTOR = 10  # the time of all looks between machines, in waits for one rank


def main() -> None:
    """Run the command and exit."""
    os.environ.setdefault(QUIET, "FATAL")
    try:
        exit_code = run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = EXIT_USER_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # a look that got no answer still holds its thread


def run(arguments: Sequence[str]) -> int:
    """Examine, print the report on rank 0, and return the exit code: 1 if there is a problem.

    Collective where a launcher has started this process: every rank must call.

    Raises:
        UserError: the launcher's variables make no sense.
    """
    args = _parser().parse_args(arguments)
    env = dist_env()
    is_first = env is None or env.local_rank == 0
    own = examine(args.outputs) if is_first else []
    report = Report({socket.gethostname(): own})
    if env is not None:
        reports: list[Report] = []
        work = partial(_with_others, env, own, args, reports)
        advice = "see what the ranks printed; a firewall, or a machine that is not there"
        with redirect_stdout(sys.stderr):  # what the group prints is no part of the report
            failures = within(GROUP_FACTOR * args.timeout, "group", work, advice=advice)
        if failures:
            report = Report(report.machines, failures)
        else:
            (report,) = reports
            is_first = env.is_rank_zero
    if is_first:
        width = line_width(sys.stdout) or WIDTH
        print(as_json(report) if args.json else as_text(report, width=width), flush=True)
    return EXIT_FAILED if report.has_problem else EXIT_COMPLETED


def _with_others(
    env: DistEnv, own: list[Finding], args: argparse.Namespace, reports: list[Report]
) -> Iterator[Finding]:
    """Add the report of all machines to a list; yield a problem if the ranks cannot meet.

    Collective: every rank must call.
    """
    from ddp_runner.config.schema import BackendConfig
    from ddp_runner.distributed import gather_objects
    from ddp_runner.doctor import between
    from ddp_runner.doctor.machines import find_machines
    from ddp_runner.rank.process_group import process_group

    backend = BackendConfig(name="gloo", timeout_s=args.timeout, device="cpu")
    where = args.init_method or env.init_method
    try:
        with process_group(env, backend=backend, init_method=where):
            machines = find_machines(env)
            found = gather_objects(own)
            looks = partial(
                between.examine,
                machines,
                outputs=args.outputs,
                data_root=args.data_root,
                timeout_s=args.timeout,
            )
            findings = list(between.guarded(looks))
            by_machine = {name: found[rank] for rank, name in sorted(machines.names.items())}
            reports.append(Report(by_machine, findings))
            gather_objects(None)  # nobody leaves while another one still measures
    except UserError as error:
        yield problem("group", str(error), "start all ranks so that they can meet")
    except (RuntimeError, ValueError) as error:
        if not reports:  # else the group has failed at the very end, after all looks
            advice = (
                f"start the command on every machine within {args.timeout:g} s, and open the "
                "ports between them"
            )
            yield problem(
                "group", f"{env.world_size} ranks did not meet: {between.cause(error)}", advice
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.doctor",
        description="Check this machine. Under torchrun, srun or mpirun, check all machines of the "
        "launch and the network between them. Rank 0 prints the report.",
        epilog="Exit code: 0 if there is no problem, else 1; 2 for a mistake in the command.",
    )
    add = parser.add_argument
    outputs = "folder of the runs (default: outputs)"
    add("--outputs", type=Path, default=OUTPUTS, metavar="FOLDER", help=outputs)
    data = "folder of the datasets (default: DDP_RUNNER_DATA_ROOT, or data)"
    root = Path(os.environ.get("DDP_RUNNER_DATA_ROOT", "data"))
    add("--data-root", type=Path, default=root, metavar="FOLDER", help=data)
    add("--timeout", type=float, default=60.0, metavar="S", help="longest wait for another rank")
    meet = "where the ranks meet, if the launcher does not say: tcp://HOST:PORT"
    add("--init-method", metavar="URL", help=meet)
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    main()
