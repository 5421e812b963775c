"""Kill downloaders with SIGKILL at random moments; the survivors must not notice.

This process has one thread, so it may fork. In each round two children open the same shard
and one, chosen at random, is killed; the other one must come back with the right bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time

from trainpath.cache import ShardCache


def content(name, size):
    """Return the bytes of the shard `name`, as the test has put them on the server."""
    block = hashlib.blake2b(name.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def child(cache, name, url, size):
    """Fork a process that opens one shard and says by its exit code if that went well."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with cache.open(url) as file:
            good = file.read() == content(name, size)
        os._exit(0 if good else 1)
    except BaseException:
        os._exit(2)


def say(line):
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    """Run."""
    arguments = json.loads(sys.argv[1])
    directory, shards, longest_s = (
        arguments["directory"],
        arguments["shards"],
        arguments["longest_s"],
    )
    chance = random.Random(arguments["seed"])
    outcomes = []
    with ShardCache(directory, min_free_bytes=0, max_bytes=arguments["max_bytes"]) as cache:
        for name, (url, size) in shards.items():
            children = [child(cache, name, url, size) for _ in range(2)]
            chance.shuffle(children)
            time.sleep(chance.uniform(0, longest_s))
            os.kill(children[0], signal.SIGKILL)
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
            with cache.open(url) as file:
                good = file.read() == content(name, size)
            outcomes.append([*statuses, good])
    say(json.dumps(outcomes))


main()
