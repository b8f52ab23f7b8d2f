"""The tutorials run, at settings as small as they allow."""

import importlib.util
import pathlib

import pytest

TUTORIALS = pathlib.Path(__file__).resolve().parent.parent / "tutorials"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TUTORIALS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_tutorial_is_tested_here():
    assert {path.stem for path in TUTORIALS.glob("*.py")} == {"digits_resnet", "schedules"}


@pytest.mark.slow
def test_digits_resnet(tmp_path, capfd):
    results = load("digits_resnet").main(
        "--depth 8 --width 4 --image-size 8 --epochs 1 --batch-size 128 --survival-prob 0.4".split()
        + ["--out", str(tmp_path / "new")]
    )
    assert results["blocks"] == ["stage1_block1", "stage2_block1", "stage3_block1"]
    assert list(results["survival_probs"]) == pytest.approx([0.8, 0.6, 0.4])
    assert results["executed"] == pytest.approx(0.6)
    assert set(results["accuracy"]) == set(results["step_seconds"]) == {"plain", "stochastic depth"}
    assert all(0 <= accuracy <= 1 for accuracy in results["accuracy"].values())
    assert all(seconds > 0 for seconds in results["step_seconds"].values())
    assert results["max_difference"] < 1e-4
    assert (results["saved_model"] / "saved_model.pb").is_file()
    assert results["curves"].read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    assert all(name in printed for name in results["blocks"])
    assert "share of the branches expected to run   0.600" in printed


def test_schedules(capsys):
    ran = load("schedules")
    issue = {"on": (4, 2), "off": (2, 0), "inference": (3, 1)}
    assert ran.gradients == {"layer_or_input": issue, "input_plus_layer": issue}
    assert ran.expected == pytest.approx(3.9)
    assert ran.history["expected_depth"] == pytest.approx([5.37, 4.67, 3.97, 3.9])
    assert ran.history["realised_depth"][-1] == ran.depth.switches.sum(axis=1).mean()
    assert ran.depth.switches.shape == (10, 6)
    assert ran.last_block == pytest.approx([1, 0.88, 0.76, 0.64, 0.52, 0.4, 0.4, 0.4])
    assert len(ran.traces) == 1
    printed = capsys.readouterr().out
    for line in ("on         value 4  gradient 2", "off        value 2  gradient 0"):
        assert printed.count(line) == 2
    assert printed.count("inference  value 3  gradient 1") == 2


def test_digits_resnet_refuses_a_depth_that_is_no_resnet(capsys):
    with pytest.raises(SystemExit):
        load("digits_resnet").parse_args(["--depth", "9"])
    assert "--depth must be 6n+2 with n at least 1. Received: 9" in capsys.readouterr().err
