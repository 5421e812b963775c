"""Reading `.metadata`: what every supported Python writes, and nothing else."""

from __future__ import annotations

import io
import os
import pickle

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from trainpath.checkpoint.reader import _MetadataUnpickler


class ByName:
    """Pickles as `getattr(owner, name)`, as Python 3.11.0 to 3.11.3 do with enumerations."""

    def __init__(self, owner, name):
        self.call = getattr, (owner, name)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enumerations_from_an_older_python(protocol):
    """A memory format that Python 3.11.2 wrote is read."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    data = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, member.name), protocol=protocol)

    assert _MetadataUnpickler(io.BytesIO(data)).load() is member


def test_functions_cannot_be_reached():
    """A pickle that names a function of the system is refused."""
    with pytest.raises(pickle.UnpicklingError, match="system"):
        _MetadataUnpickler(io.BytesIO(pickle.dumps(os.system))).load()


def test_getattr_on_a_trusted_class_that_is_no_enumeration():
    """The look-up by name is for enumerations, whichever module the class is from."""
    from torch.distributed.checkpoint.metadata import Metadata

    data = pickle.dumps(ByName(Metadata, "__init__"))

    with pytest.raises(pickle.UnpicklingError, match="no enumeration"):
        _MetadataUnpickler(io.BytesIO(data)).load()
