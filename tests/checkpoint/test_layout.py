"""The plan divides tensors evenly, and frames are what torch.save puts around a payload."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpath.checkpoint.capture import Leaf
from trainpath.checkpoint.layout import frame, make_plan, record_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3))
def test_a_framed_payload_is_a_record_of_torch(dtype, shape):
    """Head, payload and tail load by torch.load and pass the zip check of CRCs."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    around = frame(dtype, tuple(shape))
    payload = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert around.num_bytes == len(payload)
    record = bytearray(around.head + payload + around.tail)
    for at in around.crc_at:
        record[at : at + 4] = zlib.crc32(payload).to_bytes(4, "little")
    assert len(record) == around.length == len(record_bytes(tensor))
    assert torch.equal(torch.load(io.BytesIO(record), weights_only=True), tensor)
    assert zipfile.ZipFile(io.BytesIO(record)).testzip() is None


def test_a_frame_of_a_huge_tensor_takes_no_memory():
    """Frames of tensors beyond 4 GiB (zip64) are made without their payload."""
    around = frame(torch.float32, (3, 1 << 30))
    assert around.num_bytes == 12 << 30
    assert len(around.head) + len(around.tail) < 4096
    assert len(around.crc_at) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_every_tensor_has_one_home_and_the_load_is_even(sizes, world_size):
    """Each tensor is written once, records do not overlap, balance is within one tensor."""
    leaves = [
        Leaf(("m", str(index)), torch.zeros(size), balanced=balanced)
        for index, (size, balanced) in enumerate(sizes)
    ]
    plan = make_plan(leaves, world_size, None)
    assert make_plan(leaves, world_size, plan) is plan
    written = [slot.leaf for slots in plan.slots for slot in slots]
    assert sorted(written) == list(range(len(leaves)))
    load = [0] * world_size
    for rank, slots in enumerate(plan.slots):
        end = 0
        for slot in slots:
            assert slot.offset % 64 == 0
            assert slot.payload_at % 64 == 0
            assert slot.offset >= end
            end = slot.offset + slot.frame.length
            assert plan.slots[plan.homes[slot.leaf][0]][plan.homes[slot.leaf][1]] is slot
            assert rank == 0 or leaves[slot.leaf].balanced
            load[rank] += slot.frame.length
        assert plan.sizes[rank] >= end
    lengths = [(frame(torch.float32, (size,)).length, balanced) for size, balanced in sizes]
    fixed = sum(length for length, balanced in lengths if not balanced)
    largest = max(length for length, _ in lengths)
    assert max(load) - min(load) <= max(largest, fixed)


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "tie"])
def test_the_plan_changes_with_what_it_is_for(change):
    """Another name, shape, dtype or tie makes another plan with another digest."""
    one, two = torch.zeros(4), torch.zeros(4)
    first = make_plan([Leaf(("m", "a"), one), Leaf(("m", "b"), two)], 1, None)
    changed = {
        "name": [Leaf(("m", "a"), one), Leaf(("m", "c"), two)],
        "shape": [Leaf(("m", "a"), one), Leaf(("m", "b"), torch.zeros(5))],
        "dtype": [Leaf(("m", "a"), one), Leaf(("m", "b"), two.double())],
        "tie": [Leaf(("m", "a"), one), Leaf(("m", "b"), one)],
    }[change]
    second = make_plan(changed, 1, first)
    assert second is not first
    assert second.digest != first.digest


def test_equal_values_of_other_memory_keep_the_plan():
    """Where a tensor lives is no part of the plan: nothing stale can be saved."""
    plan = make_plan([Leaf(("m", "a"), torch.zeros(4))], 1, None)
    assert make_plan([Leaf(("m", "a"), torch.ones(4))], 1, plan) is plan
