"""What programs that know nothing of us see of a model while an export replaces it: the old one, the new one, or no model."""

import itertools
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors

import shardkeep as sk
from shardkeep.layouts import safetensors_publish
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import InjectedCrash
from tests.engine.samples import bits
from tests.support.stores import BeforeStore

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST = {1: 1e9, 2: 330, 4: 180}
"""How large a file may be so that there are so many."""


PAIRS = list(itertools.product(MOST, MOST))


def state_of(k):
    return {f"l{i}": torch.full((40,), 10.0 * k + i) for i in range(4)}


@pytest.fixture(scope="module")
def sources():
    made = [MemoryStore(), MemoryStore()]
    for k, store in enumerate(made):
        sk.save(state_of(k), store)
    return made


def seen(get):
    """Load a model as transformers does: which one it is, "mixed", or None where it cannot be loaded."""
    try:
        if (alone := get(SINGLE)) is not None:
            found = load_safetensors(alone)
        else:
            weights = json.loads(get(INDEX) or b"{}").get("weight_map", {})
            files = {name: load_safetensors(get(name) or b"") for name in set(weights.values())}
            found = {key: files[name][key] for key, name in weights.items()}
    except Exception:  # noqa: BLE001 - whatever the library raises is a clear failure
        return None
    which = {int(tensor[0]) // 10 for tensor in found.values()}
    return "mixed" if len(which) > 1 else next(iter(which), None)


def reading(path):
    return lambda name: Path(path, name).read_bytes() if Path(path, name).exists() else None


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_in_a_directory(tmp_path, sources, monkeypatch, before, after):
    """Between any two steps of a replacement there is the old model, the new one, or clearly none."""
    sk.export(sources[0], tmp_path, max_shard_bytes=MOST[before])
    get = reading(tmp_path)
    views = [seen(get)]
    monkeypatch.setattr(safetensors_publish, "os", Watched(after=lambda _: views.append(seen(get))))
    report = sk.export(sources[1], tmp_path, max_shard_bytes=MOST[after], overwrite=True)
    assert len(report.files) == after
    assert len(views) > 2
    assert "mixed" not in views
    found = [view for view in views if view is not None]
    assert found == sorted(found)
    assert [views[0], views[-1]] == [0, 1]


class Watched:
    """The functions of a system, with something that one thread does before or after each that changes names."""

    def __init__(self, *, before=lambda: None, after=lambda _: None):
        self._before, self._after = before, after
        self._step, self._thread = itertools.count(), threading.get_ident()

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in {"replace", "unlink"} or threading.get_ident() != self._thread:
            return real

        def watched(*args):
            self._before()
            real(*args)
            self._after(next(self._step))

        return watched


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1)])
def test_another_that_begins_in_the_middle(tmp_path, sources, monkeypatch, before, after):
    """An export that begins before any step of another one waits; both end well, and the model is whole."""
    for at in itertools.count():
        path = tmp_path / str(at)
        sk.export(sources[0], path, max_shard_bytes=MOST[before])
        steps, others, ended = itertools.count(), [], []

        def begin(path=path, ended=ended):
            ended.append(sorted(safetensors_publish.prepare_directory(LocalStore(path)).files))

        def first(at=at, steps=steps, others=others, begin=begin):
            if next(steps) == at:
                others.append(threading.Thread(target=begin))
                others[0].start()
                others[0].join(0.2)  # as long as it would take, if it did not wait

        with monkeypatch.context() as patch:
            patch.setattr(safetensors_publish, "os", Watched(before=first))
            report = sk.export(sources[1], path, max_shard_bytes=MOST[after], overwrite=True)
        if not others:
            break
        others[0].join()
        assert ended == [sorted(report.files)]
        assert seen(reading(path)) == 1
        assert bits(sk.open(path).to_dict()) == bits(state_of(1))
    assert at > 2


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 4), (1, 2), (2, 1)])
def test_in_a_directory_after_a_death(tmp_path, sources, monkeypatch, before, after):
    """After a death at any step we open the new model, others see one or none, and the next writer completes it."""

    def die(step):
        if step == last:
            raise InjectedCrash

    def die_at_once(_):
        raise InjectedCrash

    for last in itertools.count():
        path = tmp_path / str(last)
        sk.export(sources[0], path, max_shard_bytes=MOST[before])
        steps = [0]
        with monkeypatch.context() as patch:
            patch.setattr(safetensors_publish, "os", Watched(after=die))
            try:
                sk.export(sources[1], path, max_shard_bytes=MOST[after], overwrite=True)
            except InjectedCrash:
                steps.append(1)
        get = reading(path)
        assert seen(get) in (0, 1, None)
        assert bits(sk.open(path).to_dict()) == bits(state_of(1))
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(safetensors_publish, "os", Watched(after=die_at_once))
                with suppress(InjectedCrash):
                    safetensors_publish.prepare_directory(LocalStore(path))
            assert seen(get) in (0, 1, None)
        safetensors_publish.prepare_directory(LocalStore(path))
        assert seen(get) == 1
        if len(steps) == 1:
            break
    assert last > 2


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_in_a_store(sources, before, after):
    """Before each request of a replacement the store holds the old model or the new one, and never less."""
    store = MemoryStore()
    sk.export(sources[0], store, max_shard_bytes=MOST[before])
    views = []

    def look(verb, name):
        names = {info.name for info in store.list()}
        views.append(seen(lambda each: store.get(each, limit=1 << 20) if each in names else None))

    sk.export(sources[1], BeforeStore(store, look), max_shard_bytes=MOST[after], overwrite=True)
    assert set(views) == {0, 1}
    assert views == sorted(views)
