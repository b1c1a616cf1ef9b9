"""Extensions of many kinds, and the data they are tried on."""

import io
import random

from shardkeep.codecs.stream_extensions import ExtensionRegistry, StreamTransformExtension, ZStandard

NOISE = random.Random(4).randbytes(3 << 20)
DATA = {"empty": b"", "one byte": b"x", "words": b"The quick brown Fox. " * 40, "zeros": bytes(5 << 20), "noise": NOISE}


class Named(StreamTransformExtension):
    """An extension whose name is its class's."""

    @classmethod
    def registry_name(cls):
        return f"stream.{cls.__name__.lower()}@tests"

    @classmethod
    def from_descriptor(cls, version):
        if version != "1":
            raise ValueError(version)
        return cls()

    def get_descriptor(self):
        return f"{self.registry_name()}/1"


class Xor(Named):
    """Adds each byte's place to it: does not commute with anything that moves bytes."""

    class Stream(io.BufferedIOBase):
        def __init__(self, other):
            self.other, self.at = other, 0

        def change(self, data):
            moved = bytes(byte ^ (place * 7 & 0xFF) for place, byte in enumerate(bytes(data), self.at))
            self.at += len(moved)
            return moved

        def write(self, data):
            self.other.write(self.change(data))  # says nothing about how much

        def read(self, size=-1):
            return self.change(self.other.read(size))

    def transform_to(self, output):
        return self.Stream(output)

    def transform_from(self, source):
        return self.Stream(source)


class Tail(Named):
    """Writes everything when it is closed, backwards, then how long it was: nothing may be lost or closed twice."""

    class Writer(io.RawIOBase):
        def __init__(self, output):
            self.output, self.held = output, bytearray()

        def writeable(self):
            return True

        def write(self, data):
            self.held += bytes(data)
            return 3  # a lie

        def close(self):
            if not self.closed:
                self.output.write(bytes(reversed(self.held)))
                self.output.write(len(self.held).to_bytes(8, "little"))
            super().close()

    def transform_to(self, output):
        return self.Writer(output)

    def transform_from(self, source):
        data = source.read()
        assert len(data) - 8 == int.from_bytes(data[-8:], "little")
        return io.BytesIO(bytes(reversed(data[:-8])))


class Cascade(Named):
    """Turns bits over; closes what is beneath, twice."""

    class Writer(io.RawIOBase):
        def __init__(self, output):
            self.output = output

        def write(self, data):
            return self.output.write(bytes(255 - byte for byte in bytes(data)))

        def close(self):
            super().close()
            self.output.close()
            self.output.close()

    class Reader(io.RawIOBase):
        """Gives little at a time."""

        def __init__(self, source):
            self.input = source

        def readable(self):
            return True

        def readinto(self, b):
            view = memoryview(b)[:1000]
            count = self.input.readinto(view)
            view[:count] = bytes(255 - byte for byte in view[:count])
            return count

    def transform_to(self, output):
        return self.Writer(output)

    def transform_from(self, source):
        return self.Reader(source)


def registry():
    known = ExtensionRegistry()
    for kind in (Xor, Tail, Cascade):
        known.register(kind)
    return known


KINDS = [Xor, Tail, Cascade, ZStandard]


class Raw(io.BytesIO):
    """A file that is looked at after its user closed it, or tried to."""

    def __init__(self, data=b""):
        super().__init__(data)
        self.closes = 0

    def close(self):
        self.closes += 1
