"""The demo: the whole path on real input, and a judge that can say no."""

from __future__ import annotations

import json

import pytest

from trainpath.demo.corpus import pack
from trainpath.demo.driver import NUM_RANKS, STEPS, judge, run_demo
from trainpath.demo.steplog import StepLog, read_steps
from trainpath.errors import ConfigError


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the demo once, one round, and keep what it made."""
    work = tmp_path_factory.mktemp("demo") / "work"
    return run_demo(rounds=1, keep=work), work


@pytest.mark.timeout(300)
def test_every_yes_is_a_yes(demo):
    """Losses of both arms and of the killed and resumed run are identical."""
    outcome, _ = demo

    assert outcome.passed
    assert 0 < outcome.resumed_at_step <= outcome.killed_after_step + 1


@pytest.mark.timeout(300)
def test_parts_sum_to_the_wall_time_of_every_step_and_rank(demo):
    """Closure: for each line of each rank's JSONL the segments sum to the wall, to 0.1 %."""
    _, work = demo
    num_steps = 0
    for arm in ("stock-0", "trainpath-0"):
        for rank in range(NUM_RANKS):
            lines = (work / arm / "metrics" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
            for row in map(json.loads, lines):
                if "wall_ns" in row:
                    num_steps += 1
                    assert abs(sum(row["seg"].values()) - row["wall_ns"]) <= row["wall_ns"] / 1000

    assert num_steps == 2 * NUM_RANKS * STEPS


def write_run(directory, *, flip_loss_at=None, swap_sample_at=None, steps=STEPS):
    """Write the step logs of a run, with one value wrong if asked."""
    for rank in range(NUM_RANKS):
        log = StepLog(directory, rank)
        for step in range(1, steps + 1):
            loss = 1.0 / step + rank + (1e-16 if step == flip_loss_at else 0) * step
            log.write(step, loss, [step, rank + (1 if step == swap_sample_at else 0)])
        log.close()


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({}, (True, True, True)),
        ({"stock-0": {"flip_loss_at": 30}}, (False, True, True)),
        ({"trainpath-0": {"steps": STEPS - 1}}, (False, False, False)),
        ({"resumed-0": {"swap_sample_at": 30}}, (True, False, False)),
        ({"resumed-0": {"flip_loss_at": 30}}, (True, True, False)),
    ],
)
def test_the_judge_says_no(tmp_path, broken, expected):
    """One bit of one loss, one sample or one missing step turns a yes into a no."""
    for arm in ("stock-0", "trainpath-0", "resumed-0"):
        write_run(tmp_path / arm, **broken.get(arm, {}))
    outcome = judge(tmp_path, 1, 20)

    assert expected == (
        outcome.losses_identical,
        outcome.samples_identical,
        outcome.resume_exact,
    )
    assert outcome.passed is all(expected)


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    """Half a line at the end of a step log is no step."""
    write_run(tmp_path, steps=3)
    with (tmp_path / "steps-0.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')

    assert [row.step for row in read_steps(tmp_path, 0)] == [1, 2, 3]


def test_corpus_is_the_same_every_time(tmp_path):
    """Packing twice gives equal bytes; asking for too much names what is missing."""
    options = {"num_shards": 2, "samples_per_shard": 3, "passage_bytes": 4096}
    names = pack(tmp_path / "a", **options)
    assert names == pack(tmp_path / "b", **options) == ["corpus-000000.tar", "corpus-000001.tar"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ConfigError, match="passages"):
        pack(tmp_path / "c", num_shards=10**6, samples_per_shard=10, passage_bytes=4096)
