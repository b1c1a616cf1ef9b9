"""Sinks, with the real packages."""

import sys

import pytest

import shardkeep as sk
from shardkeep.errors import PackageMissing
from shardkeep.events import LoadFinished, SaveCommitted
from shardkeep.reports.metrics import METRICS
from shardkeep.reports.opentelemetry import OpenTelemetry
from shardkeep.reports.prometheus import Prometheus
from shardkeep.reports.tensorboard import TensorBoard
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import HeldStore
from tests.reports import scene
from tests.warm.python import warm_python


def some_calls(folder):
    """Two saves, a load, a failed save and load, and a cancelled save; return the events of the first three."""
    with scene.heard(kinds=[SaveCommitted, LoadFinished]) as events:
        sk.save(scene.state(), folder / "a", step=10)
        sk.async_save(scene.state(), folder / "b", step=20).result()
        sk.load(scene.state(), folder / "b")
        with pytest.raises(sk.StorageFull):
            sk.save(scene.state(), FaultyStore(sk.MemoryStore(), "full", at=0, verbs={"write_at"}), step=30)
        with pytest.raises(sk.CheckpointNotFound):
            sk.load(scene.state(), folder / "c")
        store = HeldStore(sk.MemoryStore(), "create")
        handle = sk.async_save(scene.state(), store)
        assert store.reached.wait(60)
        handle.cancel()
        store.release.set()
        sk.finish_saves()
    return events


def read_board(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = reader.EventAccumulator(str(folder))
    board.Reload()
    return {
        tag: [(each.step, each.value, each.wall_time) for each in board.Scalars(tag)] for tag in board.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("own_writer", [False, True])
def test_tensorboard_reads_what_was_told(tmp_path, own_writer):
    """Every figure is a curve over steps, at the time of the event; failures are counted, cancelled saves are not."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    to = SummaryWriter(tmp_path / "board") if own_writer else tmp_path / "board"
    sink = TensorBoard(to)
    with sk.on_event(sink):
        first, second, loaded = some_calls(tmp_path)
    sink.close()
    if own_writer:
        to.add_scalar("mine", 1.0, 0)  # still open
        to.close()
    curves = read_board(tmp_path / "board")
    assert set(curves) - {"mine"} == {
        *(f"checkpoint/{figure.name}" for figure in METRICS),
        "checkpoint/save/failures",
        "checkpoint/load/failures",
    }
    blocked = curves["checkpoint/save/blocked_s"]
    assert [step for step, _, _ in blocked] == [10, 20]
    assert [value for _, value, _ in blocked] == pytest.approx([first.blocked_s, second.blocked_s])
    assert [at for _, _, at in blocked] == pytest.approx([first.time_s, second.time_s])
    assert [value for _, value, _ in curves["checkpoint/save/bytes"]] == [scene.ROWS * 65536] * 2
    assert [(step, value) for step, value, _ in curves["checkpoint/load/bytes"]] == [(20, loaded.bytes_read)]
    assert [(step, value) for step, value, _ in curves["checkpoint/save/failures"]] == [(30, 1.0)]
    assert [(step, value) for step, value, _ in curves["checkpoint/load/failures"]] == [(0, 1.0)]


def board_of_ranks(where, board):
    with sk.on_event(TensorBoard(board)) as listening:
        sk.save(scene.state(), where, step=1)
        listening.stop()


def test_tensorboard_hears_rank_0_alone(rank_pool, tmp_path):
    pytest.importorskip("tensorboard")
    rank_pool.run(2, board_of_ranks, str(tmp_path / "ck"), str(tmp_path / "board"))
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert len(read_board(tmp_path / "board")["checkpoint/save/seconds"]) == 1


def test_prometheus_serves_what_was_told(tmp_path):
    """Times are histograms, bytes those of the last call, failures are counted, and the last commit has its time."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    with sk.on_event(Prometheus(registry)):
        first, second, loaded = some_calls(tmp_path)
    value = registry.get_sample_value
    assert value("shardkeep_save_seconds_count") == 2
    assert value("shardkeep_save_seconds_sum") == pytest.approx(first.seconds + second.seconds)
    assert value("shardkeep_save_blocked_seconds_sum") == pytest.approx(first.blocked_s + second.blocked_s)
    assert value("shardkeep_save_staged_seconds_count") == value("shardkeep_save_written_seconds_count") == 2
    assert value("shardkeep_save_bytes") == scene.ROWS * 65536
    assert value("shardkeep_save_speed_gigabytes_per_second") == second.gb_per_s
    assert value("shardkeep_load_bytes") == loaded.bytes_read
    assert value("shardkeep_save_failures_total") == value("shardkeep_load_failures_total") == 1
    assert value("shardkeep_saves_total") == 2
    assert value("shardkeep_last_save_timestamp_seconds") == second.time_s
    assert b"shardkeep_load_speed_gigabytes_per_second" in client.generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):  # a second sink would count everything twice
        Prometheus(registry)


def test_opentelemetry_exports_what_was_told(tmp_path):
    """The SDK's own reader finds every metric, with its unit, this rank as an attribute, and failures by class."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    with sk.on_event(OpenTelemetry(provider.get_meter("test"))):
        first, second, loaded = some_calls(tmp_path)
    [resource] = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    provider.shutdown()
    assert {metrics[f"shardkeep.{each.name.replace('/', '.')}"].unit for each in METRICS} == {"s", "By", "GBy/s"}
    [blocked] = metrics["shardkeep.save.blocked_s"].data.data_points
    assert (blocked.count, dict(blocked.attributes)) == (2, {"shardkeep.rank": 0})
    assert blocked.sum == pytest.approx(first.blocked_s + second.blocked_s)
    assert blocked.explicit_bounds[0] == 0.01
    [last] = metrics["shardkeep.save.gb_per_s"].data.data_points
    assert last.value == second.gb_per_s
    [read] = metrics["shardkeep.load.bytes"].data.data_points
    assert read.value == loaded.bytes_read
    [failures] = metrics["shardkeep.save.failures"].data.data_points
    assert (failures.value, failures.attributes["error.type"]) == (1, "StorageFull")


def test_opentelemetry_uses_the_global_provider_by_default():
    """Without a provider of the application it costs nothing and fails nothing."""
    pytest.importorskip("opentelemetry.metrics")
    sink = OpenTelemetry()
    with sk.on_event(sink), scene.logged() as lines:
        sk.save(scene.state(), sk.MemoryStore())
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [
        (lambda: TensorBoard("board"), "torch.utils.tensorboard", "tensorboard"),
        (Prometheus, "prometheus_client", "prometheus-client"),
        (OpenTelemetry, "opentelemetry.metrics", "opentelemetry-api"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, make, module, package):
    """The error is an ImportError of ours, made at once and not at the first save, and says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PackageMissing, match=f"pip install {package}") as caught:
        make()
    assert isinstance(caught.value, ImportError)


SCRIPT = """
import sys, tempfile, torch
import shardkeep as sk

with sk.show_progress(), sk.trace(tempfile.mkdtemp() + "/t"), sk.on_event(print, kinds=[]):
    sk.async_save({"w": torch.ones(4)}, tempfile.mkdtemp() + "/a").result()
wanted = ("rich", "tensorboard", "prometheus_client", "opentelemetry")
print([name for name in wanted if name in sys.modules])
"""


def test_reports_import_nothing_that_is_not_used():
    found = warm_python("-c", SCRIPT)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
