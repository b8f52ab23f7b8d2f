"""The benchmarks run, at settings as small as they allow. No test asks how fast anything is."""

import importlib
import json
import math
import pathlib

import numpy as np
import pytest

from tfa_stochastic_depth import find_residuals, linear_warmup
from tfa_stochastic_depth.layer import stochastic_depth_layers

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch):
    """Imports a file of benchmarks/ as its neighbours do."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [value]


def test_a_run_writes_every_variant_with_finite_numbers(bench, tmp_path, capsys, monkeypatch):
    path = tmp_path / "new" / "results.json"
    picture = path.with_suffix(".png")
    monkeypatch.setattr(bench("run"), "Setting", None)  # measured in another process
    options = "--quick --turns 3 --only convnext graph float32 --json".split()
    bench("run").main([*options, str(path), "--png", str(picture)])
    (panel,) = json.loads(path.read_text())["steps"].values()
    variants, skipped = panel["variants"], panel["skipped"]
    assert {*variants, *skipped} == {
        *("plain", "mask 0.5", "mask/sample 0.5", "tfa 0.5"),
        *("batch 0.5", "batch 1", "batch 0", "row 0.5"),
        *("plain/half", "plain predict", "ours predict 0.5"),
    }
    assert all(math.isfinite(number) for number in numbers([variants, panel["line"]]))
    executed = {name: row["executed"] for name, row in variants.items()}
    assert executed["plain"] == executed["mask 0.5"] == executed["batch 1"] == 1
    assert (executed["batch 0"], executed["row 0.5"], executed["plain/half"]) == (0, 0.5, 0.5)
    assert variants["plain"]["fit"] == variants["plain predict"]["mean"] == 1
    assert panel["branches"] == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in variants)
    assert all(reason in printed for reason in skipped.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_variants_are_chosen_with_what_they_are_compared_with(bench, capsys):
    options = "--quick --turns 3 --only convnext graph float32 --variants".split()
    (panel,) = bench("run").main([*options, "batch 0", "ours predict 0.5"])["steps"].values()
    assert list(panel["variants"]) == ["plain", "batch 0", "plain predict", "ours predict 0.5"]
    with pytest.raises(SystemExit):
        bench("run").main([*options, "batch 0.4"])
    assert "--variants: batch 0.4: not in" in capsys.readouterr().err


def test_the_switches_noted_are_those_that_the_steps_drew(bench):
    models, variants = bench("models"), bench("variants")
    case = models.Case(models.chain, {"blocks": 5}, {"blocks": 5}, 4, models.HALF)
    variant = variants.Setting(case, quick=True).make("batch 0.5")
    layers = stochastic_depth_layers(variant.model)
    biases = [layer.layer.trainable_weights[-1] for layer in layers]
    drawn = []
    for _ in range(6):
        variant.before_step()
        before = [bias.numpy() for bias in biases]
        variant.step()
        # A branch that was dropped has a gradient of exactly zero.
        drawn.append([(bias.numpy() != old).any() for bias, old in zip(biases, before)])
    assert variant.executed() == pytest.approx(np.mean(drawn, axis=1))
    assert 0 < np.mean(drawn) < 1


@pytest.mark.parametrize(
    ("name", "blocks", "depth"), [("convolutions", 11, 5.5), ("resnet110", 54, 40.25)]
)
def test_models_have_the_blocks_that_they_claim(bench, name, blocks, depth):
    case = bench("models").CASES[name]
    found = find_residuals(case.build(quick=False), case.rules[case.main])
    assert (len(found.blocks), found.expected_depth) == (blocks, pytest.approx(depth))
    assert not found.refusals


def test_the_fit_finds_the_line_under_disturbed_turns(bench):
    rng = np.random.default_rng(0)
    executed = rng.choice([0.25, 0.5, 0.75], 60)
    ratios = 0.1 + 0.9 * executed + rng.normal(0, 0.01, 60)
    ratios[::10] += 5
    intercept, slope = bench("measure").fit(executed, ratios)
    assert intercept == pytest.approx(0.1, abs=0.03)
    assert slope == pytest.approx(0.9, abs=0.05)
    fitted, error = bench("measure").fit_at_mean(executed, ratios)
    assert fitted == pytest.approx(0.1 + 0.9 * executed.mean(), abs=0.01)
    assert error < 0.02


def test_the_fit_of_equal_steps_is_a_trimmed_mean(bench):
    ratios = np.array([1.0, 1.1, 0.9, 1.0, 1.0, 9.0])
    assert bench("measure").fit(np.ones(6), ratios) == (pytest.approx(1.0), 0.0)


@pytest.mark.parametrize(
    ("words", "sections", "models", "dtypes"),
    [
        ([], 4, 5, 2),
        (["memory"], 1, 5, 2),
        (["transformer", "float32"], 1, 1, 1),
        (["resnet110"], 4, 1, 2),
        (["resnet110", "--variants", "batch 0"], 1, 1, 2),
    ],
)
def test_only_chooses(bench, words, sections, models, dtypes):
    args = bench("run").parse_args(["--only", *words] if words else [])
    assert (len(args.sections), len(args.models), len(args.dtypes)) == (sections, models, dtypes)


@pytest.mark.parametrize("what", ["trace", "fit"])
def test_the_first_step_is_measured(bench, what, capsys):
    bench("alone").main([what, "resnet110", "batch 1 to 0.5", "--quick"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == ["build", "first_step"]
    assert all(seconds > 0 for seconds in found.values())


def test_a_step_of_keras_trains(bench):
    setting = bench("variants").Setting(bench("models").CASES["resnet110"], quick=True)
    variant = setting.make("plain")
    before = variant.model.get_weights()
    variant.fit_step()
    assert all((a != b).any() for a, b in zip(before, variant.model.get_weights()))


def test_warmup_trains_every_variant(bench, tmp_path, capsys, monkeypatch):
    assert list(bench("warmup").variants([0.5, 0.2]))[3:5] == ["early 0.5", "from start 0.2"]
    path = tmp_path / "new" / "warmup.json"
    monkeypatch.setattr(bench("warmup"), "KINDS", {"warm-up": linear_warmup})  # for time
    options = "--depth 8 --width 2 --epochs 1 --batch-size 512 --seeds 1 --probs 0.4 --json"
    found = bench("warmup").main([*options.split(), str(path)])
    names = ["plain", "warm-up 0.4"]
    assert list(found) == names
    assert json.loads(path.read_text()) == found
    assert all(math.isfinite(number) for number in numbers(found))
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)


def test_warmup_gives_mean_and_sample_deviation(bench):
    warmup = bench("warmup")
    runs = [dict.fromkeys(warmup.COLUMNS, value) for value in (1.0, 3.0)]
    assert warmup.summary(runs)["accuracy"] == (2.0, pytest.approx(math.sqrt(2)))
    assert warmup.summary(runs[:1])["accuracy"] == (1.0, 0.0)


def test_update_measures_a_share_of_the_step(bench, capsys):
    found = bench("update").main(["--quick", "--models", "transformer", "--turns", "3"])
    assert [len(shares) for shares in found.values()] == [3]
    assert all(share < 1 for share in found["transformer"])
    assert "transformer: the update is" in capsys.readouterr().out


def test_stages_say_what_is_to_be_expected_of_their_time(bench, capsys, monkeypatch):
    """Steps that take what their blocks do: 1 for the first, 3 for the second, 5 for the third."""
    stages = bench("stages")

    def interleave(variants, turns):
        seconds = {"plain": np.full(turns, 10.0), None: np.full(turns, 1.0)}
        for name, variant in variants.items():
            if name in seconds:
                continue
            if isinstance(variant, stages.Kept):
                variant.before_step()
                seconds[name] = np.full(turns, 1.0 + [1, 3, 5] @ np.array(variant._probs))
                continue
            for _ in range(turns):
                variant.before_step()
                variant.step()
            seconds[name] = 1.0 + variant.switches.drawn() @ [1, 3, 5]
        return seconds

    monkeypatch.setattr(stages, "interleave", interleave)
    shares, found = stages.main(["--quick", "--turns", "30"])
    assert list(shares.values()) == pytest.approx([0.1, 0.3, 0.5, 0.1])
    assert list(found) == ["1 to 0.5", "0.75"]
    for executed, expected, measured, _ in found.values():
        assert 0 < executed < 1
        assert measured == pytest.approx(expected)
    assert "1 blocks that give (None, 16, 16, 4): 0.300" in capsys.readouterr().out
