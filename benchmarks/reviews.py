"""The reviews' BERT beside logistic regression on the same split: accuracy, F1 and seconds.

python benchmarks/reviews.py --data-root data

Logistic regression over character n-grams sees which groups of characters a text has, but not
where. A network from scratch should beat it. Each split seed evaluates on another 10% of the
reviews, which shows the role of chance: over 1,741 reviews an accuracy has a standard error of
0.009.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import CONFIG_DIR


def main() -> None:
    """Run both for each split and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, help="folder that holds reviews_zh.csv")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--overrides", nargs="*", default=[], help="more keys for the runner")
    args = parser.parse_args()
    data_root = Path(args.data_root).resolve()
    print("split  what                                accuracy      F1  seconds")
    for split in args.splits:
        for longest in (1, 2, 3):
            name = f"logistic regression, 1 to {longest} characters"
            show(split, name, *regression(split, longest, data_root))
        show(split, "experiment=reviews_bert", *bert(split, data_root, args.overrides))


def show(split: int, name: str, accuracy: float, f1: float, seconds: float) -> None:
    """Print one line of the table."""
    print(f"{split:5}  {name:35} {accuracy:8.4f}  {f1:.4f}  {seconds:7.1f}", flush=True)


def regression(split: int, longest: int, data_root: Path) -> tuple[float, float, float]:
    """Return accuracy, F1 and seconds of a regression on groups of 1 to `longest` characters."""
    settings: dict[str, Any] = yaml.safe_load((CONFIG_DIR / "dataset/csv_text.yaml").read_text())
    source = make("dataset", settings | {"tokenizer": None, "split_seed": split})
    parts, _ = source.read(data_root)
    (train_texts, train_labels, _), (eval_texts, eval_labels, _) = (
        zip(*parts[split], strict=True) for split in ("train", "eval")
    )
    start = time.perf_counter()
    vectorizer = TfidfVectorizer(
        analyzer="char", ngram_range=(1, longest), min_df=2, sublinear_tf=True
    )
    features = vectorizer.fit_transform(train_texts)
    model = LogisticRegression(C=4.0, max_iter=1000).fit(features, train_labels)
    predicted = model.predict(vectorizer.transform(eval_texts))
    seconds = time.perf_counter() - start
    return accuracy_score(eval_labels, predicted), f1_score(eval_labels, predicted), seconds


def bert(split: int, data_root: Path, overrides: list[str]) -> tuple[float, float, float]:
    """Return accuracy and F1 after the last epoch, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = (
            sys.executable, "-m", "ddp_runner", "experiment=reviews_bert", "hydra.run.dir=run",
            f"data_root={data_root}", f"dataset.split_seed={split}", *overrides,
        )  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        metrics = json.loads((Path(folder) / "run" / "run.json").read_text())["metrics"]
    return metrics["eval/accuracy"], metrics["eval/f1"], seconds


if __name__ == "__main__":
    main()
