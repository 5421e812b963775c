"""The examples, each run as a user would: alone, and under torchrun on two ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# A few steps only, and what must stand in the output.
CASES = {
    "01_observe.py": (["--steps", "6"], ["step    0  loss", "data.", "forward", "verdict"]),
    "02_accelerate.py": (
        ["--steps", "6", "--save-every", "4"],
        ["step    6  loss", "forward", "checkpoint"],
    ),
    "03_one_part_at_a_time.py": (
        ["--steps", "10"],
        [
            "as expected: True",
            "6 reads, 2 downloads",
            "keys as the model has them: 0.weight",
            "steps kept [5, 10], restored 10",
        ],
    ),
    "04_images.py": (
        ["--steps", "6", "--images", "256"],
        ["step    6  loss", "forward", "verdict"],
    ),
}
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run_example(launcher, name, arguments, tmp_path):
    """Run one example with its temporary folders under `tmp_path` and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment.pop("TRAINPATH_MODE", None)
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_here():
    """No example is left out of these tests."""
    assert sorted(CASES) == sorted(path.name for path in EXAMPLES.glob("*.py"))


RUNS = [(name, launcher) for name in CASES for launcher in (ALONE, TORCHRUN)]
# The test of resuming runs it alone.
RUNS.remove(("02_accelerate.py", ALONE))


@pytest.mark.parametrize(
    ("name", "launcher"),
    RUNS,
    ids=[f"{name}-{'alone' if launcher is ALONE else 'torchrun'}" for name, launcher in RUNS],
)
def test_example(name, launcher, tmp_path):
    """The example ends well, prints its key lines and leaves no file behind."""
    arguments, expected = CASES[name]

    output = run_example(launcher, name, arguments, tmp_path)

    assert [line for line in expected if line not in output] == [], output
    left = [path.name for path in tmp_path.iterdir()]
    # torch makes folders of its own there: torchelastic_*, torchinductor_*.
    assert [name for name in left if not name.startswith("torch")] == []


def test_language_model_resumes_exactly(tmp_path):
    """Continued from step 4, with what came later gone, it prints the losses of the whole run."""
    arguments = ["--folder", str(tmp_path / "lm"), "--steps", "8", "--save-every", "4"]

    whole = run_example(ALONE, "02_accelerate.py", arguments, tmp_path)
    shutil.rmtree(tmp_path / "lm" / "checkpoints" / "step-00000008")
    resumed = run_example(ALONE, "02_accelerate.py", [*arguments, "--resume"], tmp_path)

    losses = [line for line in whole.splitlines() if line.startswith("step    8  loss")]
    assert len(losses) == 1
    assert "verdict" in whole
    assert "resumed" not in whole
    assert resumed.startswith("\n".join(["resumed at step 4", *losses]))
