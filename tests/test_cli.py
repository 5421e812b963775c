"""The command line: report and compare; errors are one line and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainpath.cli import main
from trainpath.metrics import Recorder, StepClock
from trainpath.metrics import segments as S


@pytest.fixture
def run_directory(tmp_path):
    """The metrics of a real, short run."""
    clock = StepClock()
    with Recorder(clock, directory=tmp_path / "run", mode="observe"):
        for _ in range(12):
            clock.switch(S.FORWARD)
            clock.switch(S.BACKWARD)
            clock.end_step()
    return tmp_path / "run"


def test_report(run_directory, capsys):
    """`report DIR` prints the report as plain text where stdout is no terminal."""
    assert main(["report", str(run_directory)]) == 0

    text = capsys.readouterr().out
    assert "9 steps (3 to 11, first 3 left out), mode observe" in text
    assert "verdict" in text
    assert text.isascii()


def test_report_as_json(run_directory, capsys):
    """`--json` prints all figures, `--warmup` says how many steps are left out."""
    assert main(["report", str(run_directory), "--json", "--warmup", "0"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["num_steps"] == 12
    assert sum(f["share"] for f in report["segments"].values()) == pytest.approx(1)


def test_compare(run_directory, capsys):
    """`compare A B` prints the table, and JSON when asked."""
    assert main(["compare", str(run_directory), str(run_directory)]) == 0
    assert "baseline 'observe'" in capsys.readouterr().out
    assert main(["compare", str(run_directory), str(run_directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"] == 1


@pytest.mark.parametrize(
    "argv",
    [["report", "missing"], ["compare", "missing", "missing"], ["report", ".", "--warmup", "-1"]],
)
def test_errors_are_one_line(argv, tmp_path, monkeypatch, capsys, run_directory):
    """A command that cannot work says why in one line on stderr and returns 2."""
    monkeypatch.chdir(run_directory if argv[1] == "." else tmp_path)

    assert main(argv) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith(f"trainpath {argv[0]}: ")


def test_no_command_is_a_usage_error(capsys):
    """Without a command argparse explains the usage and exits with 2."""
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
    assert "usage: trainpath" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_module_runs_without_torch(argument):
    """`python -m trainpath --help` works where torch cannot be imported."""
    check = (
        "import sys, runpy; sys.modules['torch'] = None; "
        f"sys.argv = ['trainpath', {argument!r}]; "
        "runpy.run_module('trainpath', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"trainpath" in done.stdout


def test_closed_pipe_is_quiet(run_directory):
    """`trainpath report DIR | head -0` ends quietly."""
    done = subprocess.run(
        f"{sys.executable} -m trainpath report {run_directory} | true",
        shell=True,
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("redirection", "status", "says"), [(">&-", 0, ""), ("> /dev/full", 2, "No space left")]
)
def test_stdout_that_takes_nothing(run_directory, redirection, status, says):
    """A closed stdout is no error; a full disk behind it is one line."""
    done = subprocess.run(
        f"{sys.executable} -m trainpath report {run_directory} {redirection}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (status, status // 2)
    assert says in done.stderr


def test_what_cannot_be_read_or_made_is_one_line(run_directory, tmp_path, capsys):
    """A rank's file that is a directory and a `--keep` that exists give no traceback."""
    (tmp_path / "odd" / "rank-00000.jsonl").mkdir(parents=True)
    for argv, says in (
        (["report", str(tmp_path / "odd")], "Is a directory"),
        (["demo", "--keep", str(run_directory)], "File exists"),
        (["demo", "--rounds", "0"], "--rounds must be at least 1"),
    ):
        assert main(argv) == 2
        assert says in capsys.readouterr().err
