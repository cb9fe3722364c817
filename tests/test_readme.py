"""The README's commands and choices are valid, and the pages' links lead somewhere."""

import re
import shlex
from pathlib import Path

from configs import freeze, resolved

from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware

ROOT = Path(__file__).resolve().parent.parent
BIG = Hardware(num_gpus=8, num_cores=64)  # has what any of the commands asks for


def commands() -> list[str]:
    """Return the commands that start the runner: in bash blocks, and in the table of tasks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if re.search(r"-m ddp_runner(\s|$)", line)]
    return found + tasks()


def tasks() -> list[str]:
    """Return the commands of the table of tasks, without those that name the reader's own files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## I want to")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*) \|", table, flags=re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    words = [
        word
        for word in words
        if not re.search(r"\.\.\.|my_package|--config-dir|-m ddp_runner\.", word)
    ]
    assert len(words) >= 10
    return [word if "ddp_runner" in word else f"python -m ddp_runner {word}" for word in words]


def test_the_readme_shows_enough_commands() -> None:
    """A block that is no longer found would make the tests below pass for nothing."""
    assert len(commands()) >= 5
    assert any(line.startswith("torchrun") for line in commands())


def test_each_command_of_the_readme_is_accepted(tmp_path: Path) -> None:
    """Composed and resolved as it stands, each job of a sweep, with folders in place of DIR."""
    rejected = {line: found for line in commands() if (found := _rejected(line, tmp_path))}
    assert not rejected


def _rejected(line: str, folder: Path) -> list[str]:
    before, _, after = line.partition("-m ddp_runner")
    words = [_filled(word, folder) for word in shlex.split(after, comments=True)]
    env = None
    if "torchrun" in before:
        flags = dict(re.findall(r"--(nnodes|nproc-per-node)[= ](\d+)", before))
        local = int(flags["nproc-per-node"])
        env = DistEnv(0, 0, local * int(flags.get("nnodes", 1)), local)
    elif "srun" in before:
        local = int(re.findall(r"--ntasks-per-node=(\d+)", before)[0])
        env = DistEnv(0, 0, local, local, launcher="srun")
    overrides = [word for word in words if not word.startswith("-")]
    if strange := [word for word in overrides if "=" not in word]:
        return strange
    jobs: list[list[str]] = [[]]
    for word in overrides:
        key, _, values = word.partition("=")
        swept = values.split(",") if "-m" in words and "[" not in values else [values]
        jobs = [[*job, f"{key}={value}"] for job in jobs for value in swept]
    invalid = list[str]()
    for job in jobs:
        try:
            assert isinstance(resolved(*job, hardware=BIG, env=env)[0], Config)
        except UserError as error:
            invalid.append(str(error))
    skips_some = "sweep.skip_invalid=true" in words and len(invalid) < len(jobs)
    return [] if skips_some else invalid


def _filled(word: str, folder: Path) -> str:
    key, _, value = word.partition("=")
    if (key, value) == ("dataset.path", "my.txt"):
        (folder / value).write_text("a text\n", encoding="utf-8")
        return f"{key}={folder / value}"
    if key == "resume":
        freeze(folder, resolved("model=toy")[0])
        return word if value == "auto" else f"resume={folder}"
    if key == "data_root" or value in ("DIR", "FOLDER"):
        return f"{key}={folder}"
    return word


def test_every_choice_of_the_readme_is_there() -> None:
    """The table of choices lists the options of conf/, all of them and no other."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    for group in groups - {"experiment", "hydra"}:
        row = re.search(rf"^\| `{group}` \|([^|]*)\|", text, flags=re.MULTILINE)
        assert row is not None, f"no row for {group}"
        options = {path.stem for path in (CONFIG_DIR / group).glob("*.yaml")}
        assert set(re.findall(r"`(\w+)`", row[1])) == options


def test_every_link_between_pages_leads_somewhere() -> None:
    """To a file that exists, and to a heading of it."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    broken = list[str]()
    for page in pages:
        for link in re.findall(r"\]\(([^)\s:]+)\)", _prose(page)):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (heading and heading not in _headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_the_documentation_stays_short() -> None:
    """A README of two screens, and few pages, each with a question as its title."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 27
    titles = {page.name: page.read_text(encoding="utf-8").splitlines()[0] for page in pages}
    others = {"keys.md", "architecture.md"}
    assert not [name for name, title in titles.items() if name not in others and title[-1] != "?"]


def _prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def _headings(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", _prose(page), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}
