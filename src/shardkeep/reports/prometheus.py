"""
Metrics of saves and loads for Prometheus.

    sk.on_event(Prometheus())    # and prometheus_client.start_http_server(...), unless the program serves metrics already
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardkeep.codecs.base import require_module
from shardkeep.events import Event, SaveCommitted
from shardkeep.reports.metrics import BUCKETS_S, METRICS, failed_call, metrics_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_UNITS = {"s": "seconds", "By": "bytes", "GBy/s": "gigabytes_per_second"}


class Prometheus:
    """
    A callback for `on_event`: metrics of this rank.

    Times are histograms (`shardkeep_save_blocked_seconds`, ...). Bytes and throughput are gauges with the values of the
    last call. `shardkeep_save_failures_total` counts failures. Set an alert on `shardkeep_last_save_timestamp_seconds`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register the metrics, by default in the global registry, which takes them once; needs prometheus-client."""
        client = require_module("prometheus_client", package="prometheus-client", wanted_by="the Prometheus report")
        to = {"registry": client.REGISTRY if registry is None else registry}
        self._record: dict[str, Callable[[float], None]] = {}
        for each in METRICS:
            name = _metric(each.name, each.unit)
            if each.unit == "s":
                self._record[each.name] = client.Histogram(name, each.text, buckets=BUCKETS_S, **to).observe
            else:
                self._record[each.name] = client.Gauge(name, each.text, **to).set
        self._failures = {
            call: client.Counter(f"shardkeep_{call}_failures", f"Failures of {call}s.", **to)
            for call in ("save", "load")
        }
        self._saves = client.Counter("shardkeep_saves", "Checkpoints committed.", **to)
        self._last_save = client.Gauge(
            "shardkeep_last_save_timestamp_seconds", "When a checkpoint was last committed.", **to
        )

    def __call__(self, event: Event) -> None:
        for name, value in metrics_of(event).items():
            self._record[name](value)
        if failed := failed_call(event):
            self._failures[failed].inc()
        if isinstance(event, SaveCommitted):
            self._saves.inc()
            self._last_save.set(event.time_s)


def _metric(name: str, unit: str) -> str:
    """Return a name in Prometheus' style: "save/blocked_s" becomes shardkeep_save_blocked_seconds."""
    call, _, what = name.partition("/")
    bare = {"seconds": "", "bytes": "", "gb_per_s": "speed"}.get(what, what.removesuffix("_s"))
    return "_".join(filter(None, ("shardkeep", call, bare, _UNITS[unit])))
