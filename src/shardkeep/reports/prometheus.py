"""
Metrics of saves and loads for Prometheus.

    sk.on_event(Prometheus())    # then prometheus_client.start_http_server(...), if nothing serves them yet
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkeep.errors import import_optional
from shardkeep.events import Event, SaveCommitted
from shardkeep.reports.metrics import BUCKETS_S, METRICS, failed_call, metrics_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_UNITS = {"s": "seconds", "By": "bytes", "GBy/s": "gigabytes_per_second"}


class Prometheus:
    """
    A callback for `on_event`: metrics of this rank.

    Times are histograms (`shardkeep_save_blocked_seconds`, ...), bytes and speed those of the last call, as gauges.
    `shardkeep_save_failures_total` counts failures, and `shardkeep_last_save_timestamp_seconds` is what to be alarmed by:
    when a checkpoint was last committed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """
        Register the metrics; once in a registry.

        Args:
            registry: By default the one that prometheus_client serves.

        Raises:
            PackageMissing: prometheus-client is not installed.
            ValueError: the registry has them already.

        """
        client = import_optional("prometheus_client", package="prometheus-client", wanted_by="the Prometheus report")
        to = {"registry": client.REGISTRY if registry is None else registry}
        self._seconds: dict[str, Any] = {
            each.name: client.Histogram(_metric(each.name, each.unit), each.text, buckets=BUCKETS_S, **to)
            for each in METRICS
            if each.unit == "s"
        }
        self._last: dict[str, Any] = {
            each.name: client.Gauge(_metric(each.name, each.unit), each.text, **to)
            for each in METRICS
            if each.unit != "s"
        }
        self._failures = {
            call: client.Counter(f"shardkeep_{call}_failures", f"Failures of {call}s.", **to)
            for call in ("save", "load")
        }
        self._saves = client.Counter("shardkeep_saves", "Checkpoints committed.", **to)
        self._last_save = client.Gauge(
            "shardkeep_last_save_timestamp_seconds", "When a checkpoint was last committed.", **to
        )

    def __call__(self, event: Event) -> None:
        """Take the figures of an event, if it has any."""
        for name, value in metrics_of(event).items():
            if name in self._seconds:
                self._seconds[name].observe(value)
            else:
                self._last[name].set(value)
        if failed := failed_call(event):
            self._failures[failed].inc()
        if isinstance(event, SaveCommitted):
            self._saves.inc()
            self._last_save.set(event.time_s)


def _metric(name: str, unit: str) -> str:
    """Return a name as Prometheus wants it: "save/blocked_s" is shardkeep_save_blocked_seconds."""
    call, _, what = name.partition("/")
    bare = {"seconds": "", "bytes": "", "gb_per_s": "speed"}.get(what, what.removesuffix("_s"))
    return "_".join(filter(None, ("shardkeep", call, bare, _UNITS[unit])))
