"""The `trainpath` command: the demo, and the metrics of runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainpath.errors import ConfigError, TrainpathError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments (default: those of the process).

    Returns:
        The exit status: 0, or 2 after an error, which is one line on stderr.
    """
    if sys.stdout is None:  # the interpreter was started with it closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except TrainpathError as error:
        message = " ".join(str(error).split())
        print(f"trainpath {arguments.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `trainpath report DIR | head`: not our error.
        _drop_output()
        return 0
    except OSError as error:  # a directory that cannot be read, a full disk behind stdout
        print(f"trainpath {arguments.command}: {error}", file=sys.stderr)
        _drop_output()
        return 2
    return status


def _drop_output() -> None:
    """Let what is still buffered for stdout go nowhere, so that the exit is quiet too."""
    with contextlib.suppress(OSError):  # no descriptor behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainpath",
        description="Measure, remove and decide: the data path of distributed PyTorch training.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_report(commands)
    _add_compare(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: object) -> None:
        from importlib import metadata

        print(f"trainpath {metadata.version('trainpath')}")
        parser.exit()


_Commands = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="train a real model on this machine, first the stock way, then with trainpath",
        description="Train a small language model on two ranks, from a throttled object server on "
        "loopback: the stock way and with trainpath, in turns; then kill a run and resume it. "
        "About a minute, no network, no GPU; exits with 1 if losses or samples differ.",
    )
    command.add_argument("--rounds", type=int, default=2, help="interleaved rounds (default 2)")
    command.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep everything the demo makes in a new DIR"
    )
    command.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from trainpath.demo.driver import run_demo

    if arguments.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {arguments.rounds}")
    outcome = run_demo(rounds=arguments.rounds, keep=arguments.keep)
    return 0 if outcome.passed else 1


def _add_report(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "report",
        help="where the step time of a run went",
        description="Say where the step time of a run went; the run may be finished, killed or "
        "still running.",
    )
    command.add_argument("directory", type=Path, help="the run's metrics directory")
    _add_common(command)
    command.set_defaults(run=_report)


def _add_compare(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "compare",
        help="what changed between two runs",
        description="Compare two runs of a job, for example TRAINPATH_MODE=observe and on.",
    )
    command.add_argument("before", type=Path, help="metrics directory of the baseline")
    command.add_argument("after", type=Path, help="metrics directory of the other run")
    _add_common(command)
    command.set_defaults(run=_compare)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--warmup", type=int, default=None, metavar="N", help="steps left out at the beginning"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _report(arguments: argparse.Namespace) -> int:
    from trainpath.metrics.report import DEFAULT_WARMUP, Report

    warmup = DEFAULT_WARMUP if arguments.warmup is None else arguments.warmup
    report = Report.from_directory(arguments.directory, warmup=warmup)
    if arguments.json:
        _print_json(report.to_dict())
    else:
        report.print()
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from trainpath.metrics.compare import compare
    from trainpath.metrics.report import DEFAULT_WARMUP, Report

    warmup = DEFAULT_WARMUP if arguments.warmup is None else arguments.warmup
    before = Report.from_directory(arguments.before, warmup=warmup)
    after = Report.from_directory(arguments.after, warmup=warmup)
    comparison = compare(before, after)
    if arguments.json:
        _print_json(comparison.to_dict())
    else:
        comparison.print()
    return 0


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=1))
