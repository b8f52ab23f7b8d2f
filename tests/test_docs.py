"""The examples in the README and in docstrings run, and print what they say."""

import doctest
import importlib
import pathlib
import re
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted(
    p.stem for p in (ROOT / "tfa_stochastic_depth").glob("*.py") if p.stem != "__init__"
)


def test_readme_blocks_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(ROOT / "tests" / "fixtures" / "addons.zip") as file:
        (tmp_path / "old_model.h5").write_bytes(file.read("model.h5"))
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["again"].predict(namespace["images"], verbose=0) == pytest.approx(
        namespace["wrapped"].predict(namespace["images"], verbose=0), abs=1e-5
    )


def test_readme_table_is_what_the_command_above_it_prints(capsys):
    import tensorflow as tf

    from tfa_stochastic_depth import find_residuals

    model = tf.keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    table = str(
        find_residuals(model, 0.5, where=lambda block: block.name.startswith("conv2"))
    ).splitlines()
    shown = re.findall(r"^    (.*)$", (ROOT / "README.md").read_text(), re.M)
    first = shown.index("3 residual blocks in 'resnet50'")
    shown = shown[first : first + 5]
    assert shown[:4] == table[:4]
    assert shown[4] == "..."


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"tfa_stochastic_depth.{name}")
    assert doctest.testmod(module).failed == 0


def test_public_functions_with_arguments_have_an_example():
    import tfa_stochastic_depth

    names = "StochasticDepth find_residuals wrap_residuals linear_decay linear_warmup cutoff "
    names += "exponential_warmup SurvivalProbSchedule RealisedDepth survival_probs"
    for name in names.split():
        assert ">>>" in getattr(tfa_stochastic_depth, name).__doc__
