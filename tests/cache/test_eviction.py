"""The default policy: keep what a running job uses, give up what none does."""

from __future__ import annotations

from trainpath.cache import KeepUntilFull, Resident
from trainpath.cache.names import ObjectName, digest


def resident(url, last_used_ns):
    """Return what a policy sees of a cached object."""
    return Resident(ObjectName(digest(url), "0" * 16, 10, 0, "0" * 8), last_used_ns)


def test_only_idle_objects_are_victims():
    """Objects used since the oldest running job began are kept, the others go oldest first."""
    old, older, current = resident("old", 20), resident("older", 10), resident("current", 100)

    victims = KeepUntilFull().victims(digest("new"), [old, current, older], in_use_since_ns=50)

    assert list(victims) == [older, old]


def test_an_object_is_not_its_own_victim():
    """An earlier version of the incoming object is left to the publication of the new one."""
    victims = KeepUntilFull().victims(digest("a"), [resident("a", 1)], in_use_since_ns=50)

    assert list(victims) == []
