"""Settings: what wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainpath.config import Settings
from trainpath.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("TRAINPATH_MODE", "TRAINPATH_METRICS_DIR", "TRAINPATH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_default_mode_is_on():
    """Without argument or variable everything is on and nothing is written."""
    settings = Settings.resolve(mode=None)

    assert settings.mode == "on"
    assert settings.metrics_dir is settings.cache_dir is settings.checkpoint_dir is None


def test_environment_wins_over_the_mode_argument(monkeypatch):
    """TRAINPATH_MODE makes a script its own baseline without an edit."""
    monkeypatch.setenv("TRAINPATH_MODE", "observe")

    assert Settings.resolve(mode="on").mode == "observe"


def test_argument_wins_over_the_directories_of_the_environment(monkeypatch):
    """A directory given in the script is the one used."""
    monkeypatch.setenv("TRAINPATH_METRICS_DIR", "/a")

    assert Settings.resolve(mode=None).metrics_dir == Path("/a")
    assert Settings.resolve(mode=None, metrics_dir="/b").metrics_dir == Path("/b")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"mode": "fast"}, "mode"),
        ({"mode": None, "save_every": 0, "checkpoint_dir": "x"}, "save_every"),
        ({"mode": None, "save_every": 5}, "checkpoint_dir"),
        ({"mode": None, "save_every": 5, "checkpoint_dir": ""}, "checkpoint_dir"),
        ({"mode": None, "keep": 0}, "keep"),
        ({"mode": None, "preempt_deadline_s": 0}, "preempt_deadline_s"),
    ],
)
def test_senseless_settings_are_named(arguments, word):
    """Each bad setting is refused by name."""
    with pytest.raises(ConfigError, match=word):
        Settings.resolve(**arguments)
