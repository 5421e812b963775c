"""Taking a state apart and nesting it again are inverse; equal values have equal digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainpath.checkpoint.capture import canonical, digest, nest, take_apart
from trainpath.errors import ConfigError

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(1.5)
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        | st.dictionaries(st.integers(0, 3), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(NESTED)
def test_values_survive_being_taken_apart(value):
    """Any nesting of mappings, lists and scalars comes back equal."""
    (part,) = take_apart({"name": value}, set())
    assert all(leaf.path[0] == "name" for leaf in part.leaves)
    assert nest({leaf.path[1:]: leaf.value for leaf in part.leaves}) == value


def test_tensors_are_found_inside_lists_and_mappings():
    """A tensor in a nested value is a leaf of its own, named as stock torch names it."""
    (part,) = take_apart({"s": {"a": [1, torch.ones(1)], "b": {"c": 2}, "d": [1, 2]}}, set())
    assert [leaf.key for leaf in part.leaves] == ["s.a.0", "s.a.1", "s.b.c", "s.d"]


def test_digests_follow_values_not_objects():
    """Equal values built apart have one digest; a change anywhere gives another."""

    def make(last):
        shared = "x" * 3
        return {"a": [shared, shared], "b": (1, 2.0), "c": np.arange(3), "d": torch.arange(last)}

    other = {"a": ["xxx", "x" * 3], "b": (1, 2.0), "c": np.arange(3), "d": torch.arange(4)}
    assert digest(make(4)) == digest(other)
    assert digest(make(4)) != digest(make(5))
    assert digest([1]) != digest([True])
    assert digest(["ab"]) != digest(["a", "b"])


def test_names_lose_the_prefixes_of_wrappers():
    """Prefixes of compile and checkpoint wrappers go; a layer called `module` stays."""
    assert canonical("layer._orig_mod.weight") == "layer.weight"
    assert canonical("module.weight") == "module.weight"
    assert canonical("module.module.weight", leading=True) == "weight"


def test_sharded_tensors_are_refused_clearly():
    """A DTensor is refused with what to use instead."""

    class DTensor(torch.Tensor):
        pass

    model = nn.Module()
    model.register_buffer("shard", torch.ones(2).as_subclass(DTensor))
    with pytest.raises(ConfigError, match=r"torch\.distributed\.checkpoint\.save"):
        _ = [leaf.is_tensor for leaf in take_apart({"model": model}, set())[0].leaves]
