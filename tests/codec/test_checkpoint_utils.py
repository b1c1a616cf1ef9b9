"""The helpers of torch's tests: the example extension byte for byte, and the decorators on one and on several ranks."""

import io
import logging
import os
import warnings

import pytest

import shardkeep.testing
from shardkeep.testing.checkpoint_utils import (
    Rot13Example,
    get_test_extension_registry,
    with_checkpoint_logging,
    with_temp_dir,
)

EVERY_BYTE = bytes(range(256)) * 3


def theirs():
    from torch.testing._internal.distributed import checkpoint_utils

    return checkpoint_utils


def test_the_names_are_at_the_front_door():
    """`shardkeep.testing` has them, and says so when asked for another."""
    for name in shardkeep.testing.__all__:
        assert getattr(shardkeep.testing, name) is globals().get(name, getattr(shardkeep.testing, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardkeep.testing.nothing


def test_every_byte_is_changed_as_torch_changes_it():
    """Both write the same, both read what the other wrote, and a buffer is changed only as far as asked."""
    for writer, reader in [(Rot13Example, theirs().Rot13Example), (theirs().Rot13Example, Rot13Example)]:
        raw = io.BytesIO()
        stream = writer().transform_to(raw)
        assert stream.write(EVERY_BYTE) == len(EVERY_BYTE)
        stream.flush()
        assert raw.getvalue() == EVERY_BYTE.swapcase()
        raw.seek(0)
        assert reader().transform_from(raw).read() == EVERY_BYTE
    ours, torchs = bytearray(EVERY_BYTE), bytearray(EVERY_BYTE)
    Rot13Example._rot13bytes(ours, 99)
    theirs().Rot13Example._rot13bytes(torchs, 99)
    assert ours == torchs


def test_its_reader_goes_to_any_place():
    """Seeking, telling and reading into a buffer, over files with and without `readinto`."""

    class OnlyRead:
        def __init__(self, data):
            self.read = io.BytesIO(data).read

    reader = Rot13Example().transform_from(io.BytesIO(b"abcDEF"))
    assert reader.seekable()
    assert reader.readable()
    assert (reader.seek(2), reader.read(3), reader.tell()) == (2, b"Cde", 5)
    held = bytearray(4)
    assert Rot13Example().transform_from(OnlyRead(b"ab")).readinto(held) == 2
    assert held == b"AB\0\0"
    writer = Rot13Example().transform_to(io.BytesIO())
    assert writer.writable()
    assert writer.writeable()


def test_it_is_known_by_its_descriptor():
    """The descriptor is torch's, and another version is refused with torch's type of error."""
    assert Rot13Example().get_descriptor() == theirs().Rot13Example().get_descriptor()
    [made] = get_test_extension_registry().from_descriptor_list(["stream.rot13/1.2"])
    assert type(made) is Rot13Example
    for kind in (Rot13Example, theirs().Rot13Example):
        with pytest.raises(ValueError, match="Unknown extension version='2'"):
            kind.from_descriptor("2")


class Case:
    """As a test case is."""

    @with_temp_dir
    def use(self, fail=False):
        """Write to the folder; fail if asked to."""
        assert os.listdir(self.temp_dir) == []
        with open(os.path.join(self.temp_dir, "file"), "w") as file:
            file.write("x")
        if fail:
            raise KeyError("x")
        return self.temp_dir

    @with_temp_dir
    def meet(self, rank, fail):
        """Each rank leaves a file; the last ones look for all of them long after the first rank left."""
        import time

        import torch.distributed as dist

        open(os.path.join(self.temp_dir, str(rank)), "w").close()
        dist.barrier()
        if rank == fail:
            raise KeyError("x")
        time.sleep(0.2 * rank)
        return self.temp_dir, sorted(os.listdir(self.temp_dir))


@pytest.mark.parametrize("fail", [False, True])
def test_a_folder_for_one_process(fail):
    """It is empty at first, and gone afterwards, whether the test passed or not."""
    case = Case()
    if fail:
        with pytest.raises(KeyError):
            case.use(fail=True)
    else:
        assert case.use() == case.temp_dir
    assert not os.path.exists(case.temp_dir)
    assert Case.use.__name__ == "use"


def meet(fail):
    import torch.distributed as dist

    try:
        return Case().meet(dist.get_rank(), fail)
    except KeyError:
        return "failed"


@pytest.mark.parametrize("fail", [None, 1])
def test_a_folder_for_all_ranks(rank_pool, fail):
    """It is one folder, there until the last rank is done with it; a rank that fails does not hold the others."""
    found = rank_pool.run(3, meet, fail)
    places = {each[0] for each in found if each != "failed"}
    assert len(places) == 1
    assert [each[1] for each in found if each != "failed"] == [["0", "1", "2"]] * (3 if fail is None else 2)
    assert not os.path.exists(os.path.dirname(places.pop()))


def test_a_level_for_one_test():
    logger = logging.getLogger("torch.distributed.checkpoint")

    def look(self, fail=False):
        if fail:
            raise KeyError("x")
        return logger.level

    before = logger.level
    assert with_checkpoint_logging(look, level=17)(None) == 17
    with pytest.raises(KeyError):
        with_checkpoint_logging(look, level=17)(None, fail=True)
    assert logger.level == before


@pytest.mark.parametrize("decorator", ["with_temp_dir", "with_checkpoint_logging"])
def test_decorators_called_with_nothing(decorator):
    """Brackets without a function are an AssertionError, as in torch."""
    with warnings.catch_warnings():
        for module in (shardkeep.testing, theirs()):
            with pytest.raises(AssertionError):
                getattr(module, decorator)()
