"""The report: figures, predictions, verdict, text; and runs that lack something."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainpath.errors import ConfigError
from trainpath.metrics import Report, Span
from trainpath.metrics import segments as S
from trainpath.metrics.records import encode_info, encode_status, encode_step
from trainpath.metrics.render import add_up

MS = 1_000_000


def report_of(logs, parts, *, busy=None, warmup=0, **status):
    """Report on one rank that did `parts`."""
    steps = logs.chain(parts, busy=busy)
    return Report.from_logs([logs.log_of(steps, **status)], world_size=1, mode="on", warmup=warmup)


def test_figures_of_a_segment(logs):
    """Exposed mean, percentiles, share, hidden and service period are what they are called."""
    parts = [logs.segments(data_decode=d, forward=100 - d) for d in [10, 20, 30, 40]]
    busy = logs.segments(data_decode=60)
    parallelism = tuple(3 if i == S.DATA_DECODE else 1 for i in range(S.NUM_SEGMENTS))

    report = report_of(logs, parts, busy=busy, parallelism=parallelism)

    decode = report.segments["data.decode"]
    assert decode.exposed_s == pytest.approx(0.025)
    assert decode.p50_s == pytest.approx(0.025)
    assert decode.max_s == pytest.approx(0.040)
    assert decode.share == pytest.approx(0.25)
    assert decode.hidden_s == pytest.approx(0.035)
    assert decode.period_s == pytest.approx(0.020)
    assert report.step_s == pytest.approx(sum(f.exposed_s for f in report.segments.values()))
    assert sum(f.share for f in report.segments.values()) == pytest.approx(1)


def test_exposed_time_is_not_the_gain(logs):
    """Without comm the loader hidden behind it limits the step: max(T - exposed, P), not T - E."""
    parts = [logs.segments(data_decode=1.5, forward=10, backward=34.5, comm_transfer=157)] * 4
    busy = logs.segments(data_decode=96)

    report = report_of(logs, parts, busy=busy)

    gone = report.segments["comm.transfer"].gone
    assert gone.step_s == pytest.approx(0.096)
    assert (gone.next, gone.next_is_hidden) == ("data.decode", True)
    assert report.verdict.bottleneck == "comm.transfer"
    assert report.verdict.next == "data.decode"
    assert report.verdict.gain == pytest.approx(1 - 96 / 203)


def test_stages_of_the_loader_share_one_period(logs):
    """One worker does all data stages: their periods add up to the loader's."""
    parts = [logs.segments(comm_transfer=90, forward=10)] * 4
    busy = logs.segments(data_storage=20, data_decode=30, data_collate=10)

    gone = report_of(logs, parts, busy=busy).segments["comm.transfer"].gone

    assert gone.step_s == pytest.approx(0.060)
    assert gone.next == "data.decode"


def test_no_period_beyond_the_step(logs):
    """Busy time of units that nobody told us about never predicts a step longer than now."""
    parts = [logs.segments(data_storage=5, comm_transfer=50, forward=45)] * 4

    report = report_of(logs, parts, busy=logs.segments(data_storage=900))

    assert report.segments["comm.transfer"].gone.step_s == pytest.approx(0.1)
    assert report.segments["data.storage"].gone.step_s == pytest.approx(0.095)


def test_compute_bound(logs):
    """Where no stall costs 3 % the verdict says so."""
    report = report_of(logs, [logs.segments(forward=50, backward=49, data_queue=1)] * 4)

    assert report.verdict.bottleneck == "compute"
    assert "compute bound" in str(report)


def test_straggler_cause_is_part_of_the_gain(logs):
    """Removing what makes one rank late also removes the others' wait for it."""
    rows = [logs.segments(forward=20), logs.segments(forward=20, data_storage=40)]
    ranks = logs.synchronous([rows] * 10)
    both = [logs.log_of(steps, rank=r, world_size=2) for r, steps in enumerate(ranks)]

    report = Report.from_logs(both, world_size=2, mode="on", warmup=0)

    assert report.verdict.bottleneck == "data.storage"
    assert report.verdict.predicted_step_s == pytest.approx(0.023)
    (row,) = report.stragglers
    assert (row.rank, row.num_late, row.cause) == (1, 10, "data.storage")
    assert row.cause_share == row.explained == 1
    assert row.share == pytest.approx(40 / 126)
    assert report.segments["comm.straggler"].exposed_s == pytest.approx(0.020)
    assert "rank 1 late in 10 of 10 steps" in str(report)


def test_a_rank_that_computes_longer_is_named(logs):
    """Where compute makes one rank late, the verdict is the straggler wait, with rank and cause."""
    rows = [logs.segments(forward=20), logs.segments(forward=60)]
    ranks = logs.synchronous([rows] * 5)
    both = [logs.log_of(steps, rank=r, world_size=2) for r, steps in enumerate(ranks)]

    verdict = Report.from_logs(both, world_size=2, mode="on", warmup=0).verdict

    assert verdict.bottleneck == "comm.straggler"
    assert "mostly for rank 1, which is late by forward" in verdict.text


def test_checkpoint_cost_has_all_three_parts(logs):
    """Blocking, interference and durable time are measured from steps and spans."""
    parts = [logs.segments(forward=100)] * 10
    parts[4] = logs.segments(forward=100, ckpt_capture=7)
    parts[5] = logs.segments(forward=125)
    parts[6] = logs.segments(forward=115)
    steps = logs.chain(parts)
    log = logs.log_of(steps)
    begin = steps[5].start_ns
    log.spans.append(Span("ckpt staging", S.CKPT_CAPTURE, begin, begin + 20 * MS, "stage 4"))
    log.spans.append(Span("ckpt writer", S.CKPT_BACKPRESSURE, begin, begin + 200 * MS, "write 4"))

    report = Report.from_logs([log], world_size=1, mode="on", warmup=0)

    cost = report.checkpoint
    assert cost.num_saves == 1
    assert cost.blocking_s == pytest.approx(0.007)
    assert cost.interference_s == pytest.approx(0.040)
    assert cost.durable_s == pytest.approx(0.200)
    (line,) = [line for line in str(report).splitlines() if line.startswith("checkpoint")]
    assert "blocking 7.0 ms" in line
    assert "interference +40.0 ms" in line
    assert "durable after 200.0 ms" in line


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 10**9), min_size=S.NUM_SEGMENTS, max_size=S.NUM_SEGMENTS))
def test_printed_parts_add_up(logs, row):
    """Whatever the parts, the printed shares sum to 100.0 % and the printed ms to the step."""
    if not sum(row):
        row[0] = 1
    text = str(report_of(logs, [tuple(row)]))

    shares = [float(x) for x in re.findall(r"^ (?!sum)\S.*? (\d+\.\d) %", text, re.MULTILINE)]
    assert round(sum(shares), 6) == 100
    table = re.findall(r"^ (\S+) +(\d+\.\d+) +\d+\.\d %", text, re.MULTILINE)
    digits = len(table[0][1].partition(".")[2])
    total = sum(float(value) for name, value in table if name != "sum")
    printed = float(re.search(r"step (\d+\.\d+) ms", text).group(1))
    assert round(total, digits) == float(dict(table)["sum"]) == printed


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20), st.integers(0, 3))
def test_largest_remainder(values, decimals):
    """Rounded values sum to the rounded total, and none moves by a whole unit."""
    total = sum(values)
    unit = 10**decimals

    rounded = add_up(values, total, decimals)

    assert round(sum(rounded) * unit) == round(total * unit)
    assert all(abs(a - b) * unit < 1 + 1e-6 for a, b in zip(rounded, values, strict=True))


def test_text_is_ascii_and_fits_a_screen(logs):
    """The longest possible report is at most 40 lines of ASCII."""
    parts = [tuple(MS * (i + 1) for i in range(S.NUM_SEGMENTS))] * 4
    culprits = [
        [logs.segments(forward=10, python=50 * (r == s)) for r in range(6)] for s in range(6)
    ]
    ranks = logs.synchronous(culprits * 2)
    all_logs = [
        logs.log_of(
            [
                step._replace(
                    segments_ns=tuple(map(sum, zip(step.segments_ns, parts[0], strict=True))),
                    wall_ns=step.wall_ns + sum(parts[0]),
                )
                for step in steps
            ],
            rank=rank,
            world_size=6,
            problems=tuple(f"problem {i} of {rank}" for i in range(5)),
        )
        for rank, steps in enumerate(ranks)
    ]
    report = Report.from_logs(all_logs, world_size=6, mode="on", warmup=0)

    text = str(report)

    assert text.isascii()
    assert len(text.splitlines()) <= 40
    assert len(report.stragglers) == 6
    assert "more ranks were late" in text
    assert "more in report.notes" in text


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_few_steps(logs, num_steps):
    """No step, one step, fewer than the warm-up: a sensible text, no failure."""
    report = report_of(logs, [logs.segments(forward=10)] * num_steps, warmup=3)

    text = str(report)
    assert report.num_steps == (num_steps if num_steps < 4 else 1)
    assert json.dumps(report.to_dict())
    if num_steps == 0:
        assert "no steps" in text
        assert "nothing measured yet" in text
    elif num_steps < 4:
        assert "the warm-up steps are in the figures" in text
    else:
        assert "first 3 left out" in text


def test_missing_ranks_are_said(logs):
    """Ranks without rows, and ranks whose rows end early, are named."""
    ranks = logs.synchronous([[logs.segments(forward=10)] * 3] * 8)
    some = [
        logs.log_of(ranks[0], rank=0, world_size=3),
        logs.log_of(ranks[1][:5], rank=1, world_size=3),
        logs.log_of([], rank=2, world_size=3),
    ]

    report = Report.from_logs(some, world_size=3, mode="on", warmup=0)

    assert report.ranks == (0, 1)
    assert report.num_steps == 5
    assert any("no steps of rank 2" in note for note in report.notes)
    assert any("steps after 4 of 7 are missing of rank 1" in note for note in report.notes)


def test_disjoint_ranks_fall_back_to_one(logs):
    """Ranks without a common step still give the report of the first."""
    ranks = logs.synchronous([[logs.segments(forward=10)] * 2] * 8)
    both = [
        logs.log_of(ranks[0][:3], rank=0, world_size=2),
        logs.log_of(ranks[1][5:], rank=1, world_size=2),
    ]

    report = Report.from_logs(both, world_size=2, mode="on", warmup=0)

    assert (report.ranks, report.num_steps) == ((0,), 3)
    assert any("no step in common" in note for note in report.notes)


def test_odd_things_are_printed(logs):
    """Lost steps, problems, pressure and a step that does not close are said, not hidden."""
    steps = logs.chain([logs.segments(forward=10)] * 4)
    steps[1] = steps[1]._replace(wall_ns=steps[1].wall_ns + 5)
    log = logs.log_of(
        steps, dropped_steps=7, problems=("store: gone",), cpu_stall_us=400_000, clock_ns=10**7
    )

    text = str(Report.from_logs([log], world_size=1, mode="on", warmup=0))

    assert "lost 7 steps" in text
    assert "store: gone" in text
    assert "cpu pressure 40.0%, NOISY" in text
    assert "parts of 1 steps do not sum to their wall" in text
    assert "clock 1.00%" in text


def test_directory_of_a_killed_run(logs, tmp_path):
    """A file without footer, cut in its last line, is read up to there and said to be so."""
    steps = logs.chain([logs.segments(forward=10)] * 6)
    lines = [encode_info(logs.info()), *map(encode_step, steps)]
    (tmp_path / "rank-00000.jsonl").write_text("".join(lines)[:-30])

    report = Report.from_directory(tmp_path, warmup=0)

    assert report.num_steps == 5
    assert any("no footer" in note for note in report.notes)


def test_directory_of_a_restarted_job(logs, tmp_path):
    """Of a job that was restarted, on fewer ranks, the last run is reported."""
    first = logs.chain([logs.segments(forward=10)] * 9)
    second = logs.chain([logs.segments(forward=20)] * 5, first=9)
    footer = encode_status(logs.log_of(second).status, kind="footer")
    for rank in range(2):
        header = encode_info(logs.info(rank, 2))
        lines = [header, *map(encode_step, first)]
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text("".join(lines))
    with (tmp_path / "rank-00000.jsonl").open("a") as file:
        file.write("".join(["\n", encode_info(logs.info()), *map(encode_step, second), footer]))

    report = Report.from_directory(tmp_path, warmup=0)

    assert (report.world_size, report.ranks, report.num_steps) == (1, (0,), 5)
    assert report.step_s == pytest.approx(0.020)
    assert any("started 2 times" in note for note in report.notes)


def test_unreadable_lines_are_counted(logs, tmp_path):
    """Lines of another program or version are left out and counted."""
    steps = logs.chain([logs.segments(forward=10)] * 4)
    lines = [encode_info(logs.info()), "no json\n", '{"kind":"step"}\n', "[1]\n"]
    lines += map(encode_step, steps)
    (tmp_path / "rank-00000.jsonl").write_text("".join(lines))

    report = Report.from_directory(tmp_path, warmup=0)

    assert report.num_steps == 4
    assert any("3 unreadable lines" in note for note in report.notes)


def test_no_directory(tmp_path):
    """A directory without metrics is one clear error."""
    with pytest.raises(ConfigError, match="give the metrics_dir"):
        Report.from_directory(tmp_path / "missing")


def test_rich_rendering(logs):
    """On a terminal the same figures come as a rich table."""
    from rich.console import Console

    report = report_of(logs, [logs.segments(forward=60, comm_transfer=40)] * 4)
    console = Console(width=110, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(report)

    text = capture.get()
    assert "comm.transfer" in text
    assert "100.0 %" in text
    assert str(report.verdict)[:40] in text
