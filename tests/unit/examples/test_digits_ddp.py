"""What the digits examples share: batches of all ranks, and what their command lines refuse before the training."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module
    for name in [*sys.modules.keys() - before]:
        if name.startswith(("digits_", "pipeline_")):
            del sys.modules[name]


def test_ranks_have_equal_shares_of_a_batch_and_more_ranks_than_rows_are_refused(example) -> None:
    my_batches = example("digits_ddp").my_batches
    shares = [list(my_batches(1438, SimpleNamespace(rank=rank, size=89), seed=1)) for rank in range(89)]
    assert {len(rows) for share in shares for rows in share} == {16}
    assert len(np.unique(np.concatenate([rows for (rows,) in shares]))) == 89 * 16
    with pytest.raises(SystemExit, match="1438 images are too few for 90 ranks"):
        next(my_batches(1438, SimpleNamespace(rank=0, size=90), seed=1))


@pytest.mark.parametrize("name", ["digits_ddp", "digits_stream", "digits_elastic", "pipeline_digits"])
@pytest.mark.parametrize("epochs", ["0", "-3"])
def test_a_training_of_no_epochs_is_refused(example, name: str, epochs: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--epochs", epochs])
    with pytest.raises(SystemExit):
        example(name).main()
    assert f"argument --epochs: invalid positive value: '{epochs}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits_ddp", "digits_stream", "pipeline_digits"])
def test_a_picture_that_cannot_be_written_is_noticed_before_the_training(example, name: str, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    module = example(name)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "file" / "curve.png")])
    monkeypatch.setattr(module, "load", lambda group, seed: pytest.fail("it began"))
    with pytest.raises(OSError, match="file"):
        module.main()
