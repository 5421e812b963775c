"""Read shards through a cache, checking every byte: one rank or worker of a job.

Prints "ready", then after each line on its standard input reads all shards once, in its own
order, and prints a line; at the end of the input it prints the statistics.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import pickle
import random
import sys
from pathlib import Path

from trainpath.cache import ShardCache


class EvictAnything:
    """A policy that makes room at any price, to put the budget under pressure."""

    def victims(self, key, residents, *, in_use_since_ns):
        return [resident for resident in residents if resident.name.key != key]


def content(name, size):
    """Return the bytes of the shard `name`, as the test has put them on the server."""
    block = hashlib.blake2b(name.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    """Run."""
    arguments = json.loads(sys.argv[1])
    if "pickled" in arguments:
        cache = pickle.loads(Path(arguments["pickled"]).read_bytes())
    else:
        policy = EvictAnything() if arguments.pop("evict", False) else None
        cache = ShardCache(
            arguments["directory"],
            max_bytes=arguments.get("max_bytes"),
            min_free_bytes=0,
            policy=policy,
        )
    shards = arguments["shards"]  # name: [url, size]
    order = random.Random(os.getpid())
    say("ready")
    with cache:
        for _ in sys.stdin:
            for name in order.sample(sorted(shards), len(shards)):
                url, size = shards[name]
                with cache.open(url) as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                assert view[:] == content(name, size), name
                view.close()
            say("read")
        stats = cache.stats()
    say(json.dumps(dataclasses.asdict(stats)))


main()
