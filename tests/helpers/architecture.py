"""Draws docs/pictures/architecture.svg, a run's way through the source, from the source itself.

python tests/helpers/architecture.py > docs/pictures/architecture.svg

Chosen are only the functions. Who calls whom, the files and the sentences are read from the code.
"""

import ast
import html
import re
from pathlib import Path

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
COMMAND, RANK = "#2a6fb0", "#b0592a"
# A run's functions in the order of a run, by process.
FUNCTIONS = {
    "cli/app.py": ("main", "run"),
    "cli/command.py": ("compose",),
    "cli/start_runs.py": ("start_runs",),
    "cli/plan.py": ("plan",),
    "config/resolve.py": ("resolve",),
    "tracking/run_folder_claim.py": ("claim_run",),
    "launch/launcher.py": ("launch", "run_ranks"),
    "launch/ranks.py": ("Ranks",),
    "launch/rank_process.py": ("run_rank",),
    "worker.py": ("run_task",),
    "rank/session.py": ("open_session",),
    "rank/process_group.py": ("process_group",),
    "train/train_task.py": ("run_training",),
    "train/build_state.py": ("build_session_state",),
    "train/snapshot.py": ("restore",),
    "train/loop.py": ("train", "take_step"),
    "train/evaluation.py": ("evaluate",),
    "rank/records.py": ("Records",),
    "checkpoint/writer.py": ("CheckpointWriter",),
    "checkpoint/store.py": ("save_checkpoint",),
    "train/best_model.py": ("export_best",),
}
FIRST_OF_RANK = "launch/rank_process.py"
ROW, INDENT, LEFT, WIDTH = 44, 22, 20, 860


def definitions(file: str) -> dict[str, ast.AST]:
    """Return a file's top-level functions, classes and tables by name."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    named = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    tables = {ast.unparse(n.target): n for n in tree.body if isinstance(n, ast.AnnAssign)}
    return named | tables


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a function uses, also in strings such as ddp_runner.worker:run_task."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    texts = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return names | {re.split(r"[.:]", text)[-1] for text in texts if text.startswith("ddp_runner.")}


def reached(file: str, name: str) -> set[str]:
    """Return the names that a function uses, itself or through other functions of its file.

    Functions that the picture shows are not followed: they have rows of their own.
    """
    local, seen, waiting, names = definitions(file), set[str](), [name], set[str]()
    while waiting:
        current = waiting.pop()
        seen.add(current)
        used = names_in(local[current])
        names |= used
        waiting += (used & local.keys()) - seen - set(FUNCTIONS[file])
    return names


def knows(file: str, other: str, name: str) -> bool:
    """Return whether a file imports a function of another, or is given it by name."""
    module = f"ddp_runner.{other.removesuffix('.py').replace('/', '.')}"
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {(node.module, alias.name) for node in imports for alias in node.names}
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return file == other or (module, name) in imported or name in parameters


def callers() -> dict[tuple[str, str], tuple[str, str] | None]:
    """Return the caller of each function: the nearest row above that uses it.

    Raises:
        ValueError: a function is gone, or no row above uses it.
    """
    rows = [(file, name) for file, names in FUNCTIONS.items() for name in names]
    result: dict[tuple[str, str], tuple[str, str] | None] = {rows[0]: None}
    for number, (file, name) in enumerate(rows):
        if name not in definitions(file):
            raise ValueError(f"{file} has no {name}")
        above = [
            row for row in rows[:number] if name in reached(*row) and knows(row[0], file, name)
        ]
        if number and not above:
            raise ValueError(f"no row above uses {file}: {name}")
        if number:
            result[file, name] = above[-1]
    return result


def sentence(file: str, name: str) -> str:
    """Return the first sentence of a docstring."""
    node = definitions(file)[name]
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z])[.:;] ", text.replace("``", ""))[0].rstrip(".")


def svg() -> str:
    """Return the picture: a row for each function, below and right of its caller."""
    parents = callers()
    depths: dict[tuple[str, str], int] = {}
    tops: dict[tuple[str, str], int] = {}
    parts, color = [], COMMAND
    for number, (row, parent) in enumerate(parents.items()):
        file, name = row
        if file == FIRST_OF_RANK:
            color = RANK
        depth = 0 if parent is None else depths[parent] + 1
        depths[row], tops[row] = depth, 40 + number * ROW
        x, y = LEFT + depth * INDENT, tops[row]
        if parent is not None:
            elbow = LEFT + depths[parent] * INDENT + 8
            parts.append(
                f'<path d="M{elbow} {tops[parent] + 34}V{y + 17}H{x}" fill="none" stroke="#999"/>'
            )
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH - x - 20}" height="34" rx="4" fill="#fff" '
            f'stroke="{color}"/>'
            f'<text x="{x + 8}" y="{y + 14}" font-weight="bold" fill="{color}">{name}'
            f'<tspan font-weight="normal" fill="#666">  ddp_runner/{file}</tspan></text>'
            f'<text x="{x + 8}" y="{y + 28}" fill="#222">{html.escape(sentence(*row))}</text>'
        )
    height = 40 + len(parents) * ROW + 10
    legend = (
        f'<text x="{LEFT}" y="24" fill="{COMMAND}">the command, without torch</text>'
        f'<text x="{LEFT + 220}" y="24" fill="{RANK}">each rank, forked with torch imported</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="DejaVu Sans Mono, monospace" font-size="12">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{legend}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    print(svg(), end="")
