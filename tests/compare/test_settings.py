"""How settings are told apart in a few words."""

from collections import Counter

from ddp_runner.compare.settings import labels, rounded, telling_keys, varied_keys

LONG = "x" * 60  # so that a label with it is too long


def test_a_long_label_has_only_the_keys_that_tell_the_settings_apart() -> None:
    """A key that follows from those before it is left out; both together may tell apart."""
    both = [(a, b) for a in (0, 1) for b in (0, 1)]
    settings = [{"world_size": 2, "a": a, "b": b, "c": f"{LONG}{a}"} for a, b in both]
    assert labels(settings) == [f"a {a}, b {b}" for a, b in both]
    short = [one | {"c": a} for one, (a, _) in zip(settings, both, strict=True)]
    assert labels(short)[0] == "a 0, b 0, c 0"


def test_a_label_has_what_differs_and_is_never_empty() -> None:
    """What all have in common is left out, unless nothing else would be left of one."""
    both = [{"parallelism.name": "ddp", "world_size": 2, "clip": clip} for clip in (0.5, 1.0)]
    assert labels(both) == ["clip 0.5", "clip 1.0"]
    assert labels(both[:1]) == ["ddp, 2 ranks"]
    assert labels([both[0], both[1] | {"clip": None}]) == ["ddp, 2 ranks, clip 0.5", "ddp, 2 ranks"]


def test_only_long_fractions_are_rounded() -> None:
    """As far as all stay different, and with the digits before the point."""
    assert rounded([0.013898129, 0.1, None, 7, "0.123456"]) == [0.0139, 0.1, None, 7, "0.123456"]
    assert rounded([0.12345678, 0.12345679]) == [0.12345678, 0.12345679]
    assert rounded([123456.789, float("inf"), -0.0]) == [123456.789, float("inf"), 0.0]
    assert rounded([[0.123456], True]) == [[0.123456], True]


def test_a_long_label_takes_the_keys_that_tell_most_apart() -> None:
    """Not the first ones, and none for what a setting does not have."""
    values = {"model.name": LONG, "b": 0}
    settings = [{**values, "a": f"{LONG}{lr > 0.2}", "lr": lr, "width": width} for lr, width in (
        (0.1, None), (0.2, None), (0.3, None), (0.3, 8))]  # fmt: skip
    assert telling_keys(settings) == ("lr", "width")
    assert labels(settings) == ["lr 0.1", "lr 0.2", "lr 0.3", "lr 0.3, width 8"]


def test_what_a_mode_takes_from_the_run_is_no_column_of_its_own() -> None:
    """FSDP's precision is that of the run; a mode's own key of the same name may differ."""
    keys = ("parallelism.name", "world_size", "num_devices", "train.precision")
    settings = [
        dict(zip((*keys, "parallelism.precision"), ("fsdp", 2, 2, one, one), strict=True))
        for one in ("fp32", "bf16")
    ]
    settings.append(dict(zip(keys, ("ddp", 2, 2, "fp32"), strict=True)))
    assert "parallelism.precision" not in varied_keys(settings)
    settings[1]["parallelism.precision"] = "fp8"
    assert {"parallelism.precision", "train.precision"} < set(varied_keys(settings))


def test_labels_look_at_each_value_once() -> None:
    """A thousand settings with forty keys are a usual sweep."""
    seen = Counter[str]()

    class Value(str):
        """Counts how often it is read."""

        def __repr__(self) -> str:
            seen[self] += 1
            return super().__repr__()

    labels([{f"key{k}": Value(f"{LONG} {k} {i}") for k in range(4)} for i in range(4)])
    assert set(seen.values()) == {1}
    assert len(seen) == 16
