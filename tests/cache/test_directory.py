"""The cache directory by itself: its budget under any order of events."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from trainpath.cache.directory import CacheDirectory, Evicted
from trainpath.cache.names import ObjectName, digest

LIMIT = 100


class EvictSmallest:
    """A policy that evicts in an order of its own."""

    def victims(self, key, residents, *, in_use_since_ns):
        return sorted(residents, key=lambda resident: resident.name.num_bytes)


def held(root):
    """Return the bytes of all files under `root`."""
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "publish", "release", "open", "close"]), st.integers(0, 9)
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(steps=steps, sizes=st.lists(st.integers(0, 130), min_size=10, max_size=10))
def test_never_over_budget(steps, sizes):
    """Whatever is reserved, published, given back and opened, the limit holds at each step."""
    with tempfile.TemporaryDirectory() as root:
        directory = CacheDirectory(
            root, max_bytes=LIMIT, min_free_bytes=0, timeout_s=5, policy=EvictSmallest()
        )
        directory.create()
        running, opened = {}, {}
        for step, index in steps:
            key = digest(str(index))
            name = ObjectName(key, "0" * 16, sizes[index], 0, "0" * 8)
            if step == "reserve" and index not in running:
                room = directory.reserve(key, sizes[index], Evicted())
                if room is not None:
                    running[index] = room
            elif step == "publish" and index in running:
                directory.publish(running.pop(index), name).close()
            elif step == "release" and index in running:
                directory.release(running.pop(index))
            elif step == "open" and index not in opened:
                file = directory.open(name)
                if file is not None:
                    opened[index] = file
            elif step == "close" and index in opened:
                opened.pop(index).close()
            assert held(root) <= LIMIT
            residents = {resident.key for resident in directory.residents()}
            assert {digest(str(index)) for index in opened} <= residents
            used = sum(resident.num_bytes for resident in directory.residents())
            assert used + directory.reserved_bytes() == held(root)
        for room in running.values():
            directory.release(room)
        for file in opened.values():
            file.close()
