"""How parameters are cut into buckets, and what a bucket carries."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainpath.comm.buckets import Bucket, assign
from trainpath.errors import ConfigError

CPU = torch.device("cpu")


def parameters(*sizes, dtype=torch.float32):
    """Parameters of the given lengths."""
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_a_bucket_closes_at_its_cap():
    """The first bucket has a cap of its own; no gradient is split."""
    buckets = assign([3, 2, 1, 0], parameters(10, 5, 1, 1), first_cap_bytes=8, cap_bytes=40)

    assert buckets == [[3, 2], [1, 0]]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30),
    st.randoms(use_true_random=False),
    st.integers(1, 100),
)
def test_every_parameter_is_in_one_bucket_of_its_dtype(shapes, random, cap):
    """Whatever the order: each index once, one dtype a bucket, launched as they become full."""
    tensors = [
        torch.zeros(size, dtype=torch.float64 if wide else torch.float32) for size, wide in shapes
    ]
    order = list(range(len(tensors)))
    random.shuffle(order)

    buckets = assign(order, tensors, first_cap_bytes=4, cap_bytes=cap)

    assert sorted(itertools.chain(*buckets)) == sorted(order)
    assert all(len({tensors[index].dtype for index in bucket}) <= 1 for bucket in buckets)
    ends = [max(order.index(index) for index in bucket) for bucket in buckets if bucket]
    assert ends == sorted(ends)


def test_gradients_travel_through_a_bucket():
    """What is loaded is scaled, and stored back to where it came from, in any layout."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    mine = list(conv.parameters())
    for parameter in mine:
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad.clone() for parameter in mine]
    bucket = Bucket([0, 1], mine, device=CPU)

    bucket.load(mine, ["weight", "bias"], bytearray(b"\1\1"), scale=0.5)
    kept = [parameter.grad for parameter in mine]
    bucket.store(mine, bytearray(b"\1\1"))

    for parameter, old, same in zip(mine, before, kept, strict=True):
        assert torch.equal(parameter.grad, old * 0.5)
        assert parameter.grad is same
    assert bucket.views[0].is_contiguous(memory_format=torch.channels_last)
    assert bucket.verdict().failure() is None


def test_unused_parameters_keep_none_unless_a_peer_used_them():
    """The flag that travels along decides whether a missing gradient is made."""
    mine = parameters(2, 3)
    bucket = Bucket([0, 1], mine, device=CPU)

    bucket.load(mine, ["a", "b"], bytearray(2), scale=1.0)
    bucket.flat += torch.tensor([0, 0, 7, 7, 7, 0, 1, 0, 0, 0])  # what a peer added
    bucket.store(mine, bytearray(2))

    assert mine[0].grad is None
    assert torch.equal(mine[1].grad, torch.full((3,), 7.0))


@pytest.mark.parametrize("rank", [0, 37, 301, 4095])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_a_failure_travels_with_the_bucket(dtype, rank):
    """A single failed rank is named exactly in any dtype, however coarse."""
    bucket = Bucket([0], parameters(2, dtype=dtype), device=CPU)

    bucket.load_failure(rank)

    assert bucket.verdict().is_known()
    assert bucket.verdict().failure() == f"rank {rank}"


def test_a_sparse_gradient_is_refused():
    """The error names the parameter and the way out."""
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    bucket = Bucket([0], list(embedding.parameters()), device=CPU)

    with pytest.raises(ConfigError, match=r"'table'.*sparse=False"):
        bucket.load(list(embedding.parameters()), ["table"], bytearray(b"\1"), scale=1.0)
