"""The examples, each run as a user would: alone, and under torchrun on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# A few steps only, and what must stand in the output.
CASES = {
    "01_observe.py": (["--steps", "12"], ["step    0  loss", "data.", "forward", "verdict"]),
    "02_accelerate.py": (
        ["--steps", "12", "--save-every", "5"],
        ["step   10  loss", "forward", "checkpoint"],
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
        ["--steps", "12", "--images", "512"],
        ["step   10  loss", "forward", "verdict"],
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


@pytest.mark.parametrize("launcher", [ALONE, TORCHRUN], ids=["alone", "torchrun"])
@pytest.mark.parametrize("name", CASES)
def test_example(name, launcher, tmp_path):
    """The example ends well, prints its key lines and leaves no file behind."""
    arguments, expected = CASES[name]

    output = run_example(launcher, name, arguments, tmp_path)

    assert [line for line in expected if line not in output] == [], output
    left = [path.name for path in tmp_path.iterdir()]
    # torch makes folders of its own there: torchelastic_*, torchinductor_*.
    assert [name for name in left if not name.startswith("torch")] == []


def test_language_model_resumes_exactly(tmp_path):
    """Six steps, then six more after --resume, print the loss of twelve steps in one go."""

    def lines(folder, *arguments):
        arguments = ["--folder", str(tmp_path / folder), "--save-every", "6", *arguments]
        output = run_example(ALONE, "02_accelerate.py", arguments, tmp_path).splitlines()
        return [line for line in output if line.startswith(("resumed", "step   12"))]

    whole = lines("whole", "--steps", "12")
    first = lines("halves", "--steps", "6")
    second = lines("halves", "--steps", "12", "--resume")

    assert first == []
    assert len(whole) == 1
    assert second == ["resumed at step 6", *whole]
