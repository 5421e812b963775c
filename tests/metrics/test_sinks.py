"""Sinks: JSON lines and Chrome traces."""

from __future__ import annotations

import json

from trainpath.metrics.sinks import ChromeTrace, JsonLines
from trainpath.types import Sink


def test_both_are_sinks(tmp_path):
    """Both satisfy the `Sink` protocol and may be closed twice."""
    for sink in (JsonLines(tmp_path / "a.jsonl"), ChromeTrace(tmp_path / "b.json")):
        assert isinstance(sink, Sink)
        sink.write(3, {"step_s": 0.5})
        sink.close()
        sink.close()

    assert json.loads((tmp_path / "a.jsonl").read_text()) == {
        "kind": "values",
        "step": 3,
        "step_s": 0.5,
    }
    (counter,) = [
        event
        for event in json.loads((tmp_path / "b.json").read_text())["traceEvents"]
        if event["ph"] == "C"
    ]
    assert counter["args"] == {"value": 0.5, "step": 3}


def test_a_cut_line_is_ended_first(tmp_path):
    """Appending to a file that a full disk cut in the middle of a line keeps later lines whole."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"st')

    sink = JsonLines(path)
    sink.append('{"step": 2}\n')
    sink.append("")
    sink.close()
    sink.append("never\n")

    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'


def test_traces_are_bounded_and_merge(tmp_path):
    """A trace drops events beyond its limit; merging a broken file is refused quietly."""
    other = ChromeTrace(tmp_path / "1.json", 1)
    other.add_batch("worker 0", [(0, 1000, 2000)], "batch 0")
    other.close()
    trace = ChromeTrace(tmp_path / "0.json", 0, max_events=4)
    for start in range(10):
        trace.add_batch("worker 0", [(0, start, start + 1)], "batch")
    (tmp_path / "broken.json").write_text("{")

    assert len(trace.events) == 4
    assert trace.merge(tmp_path / "1.json")
    assert not trace.merge(tmp_path / "broken.json")
    assert not trace.merge(tmp_path / "missing.json")
    trace.close()
    events = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    assert [e["dur"] for e in events if e["pid"] == 1 and e["ph"] == "X"] == [1.0]
