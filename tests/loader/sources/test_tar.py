"""`TarDataset`: what it reads, how it is dealt, and what it refuses."""

from __future__ import annotations

import functools
import http.server
import io
import pickle
import random
import tarfile
import threading

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils import data as torch_data

from trainpath.errors import (
    ConfigError,
    DecodeError,
    ShardCorruptError,
    ShardNotFoundError,
    StateMismatchError,
)
from trainpath.loader import DataLoader, TarDataset

NUM_SAMPLES = (5, 0, 7, 3, 6, 4)
TOTAL = sum(NUM_SAMPLES)


def identify(sample):
    """Return the number of a sample (a decode function that workers can import by fork)."""
    return int(sample["cls"])


def write_shard(path, numbers):
    """Write a shard with webdataset's own writer."""
    with webdataset.TarWriter(str(path)) as writer:
        for number in numbers:
            writer.write(
                {
                    "__key__": f"dir/{number:04d}",
                    "txt": f"text {number}",
                    "cls": number,
                    "json": {"n": [number]},
                    "npy": np.arange(number % 5, dtype=np.float32),
                    "bin": bytes([number % 256]) * 600,
                }
            )


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Give a directory of shards, one of them without samples; numbers are consecutive."""
    directory = tmp_path_factory.mktemp("shards")
    first = 0
    for number, count in enumerate(NUM_SAMPLES):
        write_shard(directory / f"s-{number:02d}.tar", range(first, first + count))
        first += count
    return directory


@pytest.fixture
def pattern(shards):
    """Give the shards as one path with braces."""
    return f"{shards}/s-{{00..05}}.tar"


@pytest.fixture(scope="module")
def server(shards):
    """Give the URL of an HTTP server over the shards (with Content-Length, no ranges)."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(shards))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def numbers_of(loader):
    """Return the sample numbers a loader gives, in order."""
    return [number for batch in loader for number in batch.tolist()]


def equal(a, b):
    """Say whether two decoded fields are equal."""
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.filterwarnings("ignore")
def test_reads_what_webdataset_reads(pattern):
    """Samples, keys, fields and decoded values are those of webdataset's own pipeline."""
    theirs = list(webdataset.WebDataset(pattern, shardshuffle=False, empty_check=False).decode())
    ours = TarDataset(pattern).index()
    assert len(ours) == len(theirs) == TOTAL
    for mine, other in zip((ours[i] for i in range(TOTAL)), theirs, strict=True):
        assert [key for key in mine if key != "__url__"] == [
            key for key in other if key not in ("__url__", "__local_path__")
        ]
        assert all(equal(mine[key], other[key]) for key in mine)


def test_works_under_torchs_own_loader(pattern):
    """Indexed, it is a plain map-style dataset: torch's loader and samplers take it."""
    dataset = TarDataset(pattern, decode=identify)
    with pytest.raises(TypeError, match="index"):
        len(dataset)
    assert dataset[3] == 3
    assert dataset.index()[-1] == TOTAL - 1
    with pytest.raises(IndexError):
        dataset[TOTAL]
    loader = torch_data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    assert sorted(numbers_of(loader)) == list(range(TOTAL))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_are_shuffled_and_complete(pattern, num_workers):
    """Each epoch has every sample once in an order of its own, the same for any workers."""
    reference = DataLoader(TarDataset(pattern, decode=identify), 4, shuffle=True, seed=3)
    expected = [numbers_of(reference) for _ in range(3)]
    dataset = TarDataset(pattern, decode=identify)
    with DataLoader(dataset, 4, shuffle=True, num_workers=num_workers, seed=3) as loader:
        with pytest.raises(TypeError):
            len(loader)
        epochs = [numbers_of(loader) for _ in range(3)]
        assert len(loader) == 7
        loader.set_epoch(1)
        assert numbers_of(loader) == epochs[1]
        assert loader.stats().num_pools == (1 if num_workers else 0)
    assert epochs == expected
    assert all(sorted(epoch) == list(range(TOTAL)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_single_samples_and_the_sampler_attribute(pattern):
    """batch_size=None deals samples; sampler.set_epoch, which frameworks call, is heard."""
    loader = DataLoader(TarDataset(pattern, decode=identify), None, shuffle=True, seed=2)
    first = list(loader)
    assert sorted(first) == list(range(TOTAL))
    second = list(loader)
    loader.sampler.set_epoch(0)
    assert list(loader) == first != second
    assert loader.stats().num_batches == 3 * TOTAL


def test_shard_that_changed_since_it_was_counted(shards, tmp_path):
    """A shard that shrank between indexing and reading is an error that names it."""
    path = tmp_path / "s.tar"
    path.write_bytes((shards / "s-02.tar").read_bytes())
    dataset = TarDataset(str(path), decode=identify)
    dataset.learn(0, 9)
    with pytest.raises(ShardCorruptError, match=r"s\.tar holds 7 sample.*changed"):
        numbers_of(DataLoader(dataset, 9))


def test_without_shuffle_the_order_is_the_listed_one(pattern):
    """shuffle=False reads shards and samples as they are listed."""
    assert numbers_of(DataLoader(TarDataset(pattern, decode=identify), 4)) == list(range(TOTAL))


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_equal_numbers_of_batches_and_each_sample_once(pattern, drop_last):
    """Three ranks with workers: disjoint, complete but for a dropped tail, equally many."""
    dealt = []
    repeated = 0
    for rank in range(3):
        with DataLoader(
            TarDataset(pattern, decode=identify, shuffle_window=2),
            2,
            shuffle=True,
            drop_last=drop_last,
            num_workers=1,
            rank=rank,
            world_size=3,
        ) as loader:
            dealt.append([batch.tolist() for batch in loader])
            assert len(loader) == len(dealt[-1])
            repeated = loader.stats().num_repeated
    assert len({len(batches) for batches in dealt}) == 1
    seen = [number for batches in dealt for batch in batches for number in batch]
    assert len(set(seen)) == (24 if drop_last else TOTAL)
    assert len(seen) - len(set(seen)) == repeated == (0 if drop_last else 2)


def test_fewer_shards_than_ranks_is_fine_and_fewer_samples_is_an_error(shards):
    """Samples are dealt, not shards: four ranks share one shard, but not fewer samples."""
    seen = []
    for rank in range(4):
        dataset = TarDataset(str(shards / "s-00.tar"), decode=identify)
        seen += numbers_of(DataLoader(dataset, 1, rank=rank, world_size=4))
    assert sorted(set(seen)) == list(range(5))
    dataset = TarDataset(str(shards / "s-03.tar"), decode=identify)
    with pytest.raises(ConfigError, match=r"3 sample.*4 ranks"):
        next(iter(DataLoader(dataset, 1, rank=0, world_size=4)))


def test_resume_on_other_ranks_workers_and_batch_sizes(pattern):
    """2 ranks x 2 workers, then 1 rank inline: the next sample is the first not delivered."""
    seen, states = [], []
    for rank in range(2):
        with DataLoader(
            TarDataset(pattern, decode=identify),
            3,
            shuffle=True,
            num_workers=2,
            rank=rank,
            world_size=2,
        ) as loader:
            batches = iter(loader)
            seen += [n for _ in range(2) for n in next(batches).tolist()]
            states.append(loader.state_dict())
    assert states[0] == states[1]
    assert states[0]["position"][0] == 12
    alone = DataLoader(TarDataset(pattern, decode=identify), 4, shuffle=True)
    alone.load_state_dict(states[0])
    seen += numbers_of(alone)
    assert sorted(seen) == list(range(TOTAL))


def test_resume_at_random_cuts_equals_the_uninterrupted_run(pattern):
    """Over three epochs, cut at random and cut again, the batches are the same."""
    loader = DataLoader(TarDataset(pattern, decode=identify), 4, shuffle=True, seed=5)
    whole, states = [], []
    for _ in range(3):
        for batch in loader:
            whole.append(batch.tolist())
            states.append(loader.state_dict())
    for cut in range(1, len(whole)):
        resumed = DataLoader(TarDataset(pattern, decode=identify), 4, shuffle=True, seed=5)
        resumed.load_state_dict(states[cut - 1])
        rest = []
        while len(rest) < len(whole) - cut:
            rest += [batch.tolist() for batch in resumed]
        assert rest == whole[cut:]


def test_resume_touches_no_earlier_shard(pattern, shards, tmp_path):
    """A state near the end of an epoch needs none of the shards before it."""
    loader = DataLoader(TarDataset(pattern, decode=identify), 4)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = loader.state_dict()
    for number in range(len(NUM_SAMPLES)):
        name = f"s-{number:02d}.tar"
        (tmp_path / name).write_bytes((shards / name).read_bytes() if number == 5 else b"broken")
    later = DataLoader(TarDataset(f"{tmp_path}/s-{{00..05}}.tar", decode=identify), 4)
    later.load_state_dict(state)
    assert numbers_of(later) == [24]


def test_state_of_other_shards_or_another_order_is_refused(pattern, shards):
    """A cursor into another order would silently repeat samples: it is refused."""
    state = DataLoader(TarDataset(pattern), 4, shuffle=True).state_dict()
    with pytest.raises(StateMismatchError, match="num_shards"):
        DataLoader(TarDataset(str(shards / "s-00.tar")), 4, shuffle=True).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="seed"):
        DataLoader(TarDataset(pattern), 4, shuffle=True, seed=1).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_remote_shards_without_a_cache(server, num_workers):
    """HTTP shards are read through fsspec into unlinked files."""
    dataset = TarDataset(f"{server}/s-{{00..05}}.tar", decode=identify)
    with DataLoader(dataset, 4, num_workers=num_workers) as loader:
        assert numbers_of(loader) == list(range(TOTAL))


class Directory:
    """A cache in its smallest form: the origin is a directory; counts what was opened."""

    def __init__(self, directory):
        self.directory = directory
        self.opened = []

    def open(self, url):
        """Return the file of that name."""
        self.opened.append(url)
        return (self.directory / url.rpartition("/")[2]).open("rb")


def test_shards_are_opened_in_plan_order_through_the_cache(shards):
    """Remote shards go through the cache, no more of them than the plan has reached."""
    cache = Directory(shards)
    dataset = TarDataset("s3://bucket/s-{00..05}.tar", cache=cache, decode=identify)
    loader = DataLoader(dataset, 4)
    batches = iter(loader)
    next(batches)
    assert cache.opened == ["s3://bucket/s-00.tar"]
    next(batches)
    assert cache.opened[-1] == "s3://bucket/s-02.tar"
    assert sum(len(batch) for batch in batches) == TOTAL - 8
    assert len(cache.opened) == len(set(cache.opened)) == len(NUM_SAMPLES)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("content", "error"),
    [(b"not a tar" * 100, ShardCorruptError), (None, ShardNotFoundError), (b"", ShardCorruptError)],
)
def test_bad_shard_is_one_error_at_its_place(shards, tmp_path, num_workers, content, error):
    """A shard gone bad raises its own error, after the batches before it, and no hang."""
    for number in (0, 2, 3):
        name = f"s-{number:02d}.tar"
        (tmp_path / name).write_bytes((shards / name).read_bytes())
    dataset = TarDataset(f"{tmp_path}/s-{{00,02,03}}.tar", decode=identify)
    bad = tmp_path / "s-03.tar"
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes(content)
    with DataLoader(dataset, 4, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(3)][-1] == [8, 9, 10, 11]
        with pytest.raises(error, match=r"^(shard )?\S*s-03\.tar"):  # not a traceback first
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_missing_url_is_a_shard_not_found_error(server, num_workers):
    """A URL that answers 404 is a ShardNotFoundError that names it, which is FileNotFoundError."""
    dataset = TarDataset(f"{server}/absent.tar")
    with (
        DataLoader(dataset, 4, num_workers=num_workers) as loader,
        pytest.raises(ShardNotFoundError, match=r"absent\.tar") as caught,
    ):
        next(iter(loader))
    assert isinstance(caught.value, FileNotFoundError)


def test_bad_arguments_are_config_errors(pattern, tmp_path):
    """No URL, an unknown option or a missing local shard are told at once."""
    for nothing in ([], "", [""]):
        with pytest.raises(ConfigError, match="no shard URL"):
            TarDataset(nothing)
    for wrong in (None, 3, [None], f"{tmp_path}/{{0..1.tar"):
        with pytest.raises(ConfigError, match=r"urls=.* give a path or URL"):
            TarDataset(wrong)
    with pytest.raises(ConfigError, match="shuffle_window"):
        TarDataset(pattern, shuffle_window=0)
    with pytest.raises(ConfigError, match="decode"):
        TarDataset(pattern, decode="all")
    with pytest.raises(ConfigError, match="image"):
        TarDataset(pattern, image="bgr")
    with pytest.raises(ShardNotFoundError, match=r"2 of 2 .*a-0\.tar"):
        TarDataset(f"{tmp_path}/a-{{0,1}}.tar")


def test_data_set_without_any_sample_is_an_error(shards):
    """Shards that hold nothing at all are a ConfigError, not an empty epoch."""
    with pytest.raises(ConfigError, match="no sample"):
        next(iter(DataLoader(TarDataset(str(shards / "s-01.tar")), 4)))


def single(tmp_path, members):
    """Return a data set of one shard with one sample."""
    path = tmp_path / "one.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def test_decode_options(tmp_path):
    """Images, pickles and tensors decode as asked; pickles only when allowed."""
    png, pth = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (3, 2), (255, 0, 0)).save(png, "PNG")
    torch.save(torch.arange(3), pth)
    members = {"a.png": png.getvalue(), "a.pth": pth.getvalue(), "a.pkl": pickle.dumps([1])}
    path = single(tmp_path, members)
    assert TarDataset(path, decode=None)[0]["pkl"] == pickle.dumps([1])
    with pytest.raises(DecodeError, match=r"a\.pkl.*allow_pickle"):
        TarDataset(path)[0]
    sample = TarDataset(path, allow_pickle=True)[0]
    assert sample["pkl"] == [1]
    assert sample["png"].size == (3, 2)
    assert sample["pth"].tolist() == [0, 1, 2]
    image, tensor = TarDataset(path, fields=["jpg;png", "pth"], image="torchrgb8")[0]
    assert image.shape == (3, 2, 3)
    assert image[0].min() == 255
    assert tensor.tolist() == [0, 1, 2]
    with pytest.raises(DecodeError, match="no field jpg"):
        TarDataset(path, fields=["jpg"])[0]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a.txt.gz": b"\x1f\x8b"}, r"a\.txt\.gz.*compressed"),
        ({"a.json": b"{"}, r"a\.json.*JSONDecodeError"),
        ({"a.png": b"no image"}, r"a\.png.*UnidentifiedImageError"),
    ],
)
def test_member_that_cannot_be_decoded_is_named(tmp_path, members, says):
    """A DecodeError names member, shard and reason."""
    with pytest.raises(DecodeError, match=says):
        TarDataset(single(tmp_path, members))[0]


def test_pickles_small_and_works_after(pattern):
    """What is sent to a worker carries no maps; indexing goes on in the copy."""
    dataset = TarDataset(pattern, decode=identify)
    dataset.count(0)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.known_count(0) == 5
    assert random.Random(0).random() != copy[7]
    assert copy[7] == 7
