"""Metrics of saves and loads for OpenTelemetry: `sk.on_event(OpenTelemetry())`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardkeep.codecs.base import require_module
from shardkeep.events import Event
from shardkeep.reports.metrics import BUCKETS_S, METRICS, failed_call, metrics_of

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class OpenTelemetry:
    """
    A callback for `on_event`: metrics of this rank, each with the attribute "shardkeep.rank".

    Times are histograms (shardkeep.save.seconds, shardkeep.save.blocked_s, ...). Bytes and throughput are gauges with the
    values of the last call. Failures are counters (shardkeep.save.failures, with the error class as "error.type").
    """

    def __init__(self, meter: Meter | None = None) -> None:
        """Create the instruments of a meter, by default of one of the global provider; needs opentelemetry-api."""
        metrics = require_module(
            "opentelemetry.metrics", package="opentelemetry-api", wanted_by="the OpenTelemetry report"
        )
        meter = metrics.get_meter("shardkeep") if meter is None else meter
        self._record: dict[str, Callable[..., None]] = {}
        for each in METRICS:
            about: dict[str, Any] = {"unit": each.unit, "description": each.text}
            name = f"shardkeep.{each.name.replace('/', '.')}"
            if each.unit == "s":  # the default buckets are for milliseconds
                histogram = meter.create_histogram(name, **about, explicit_bucket_boundaries_advisory=BUCKETS_S)
                self._record[each.name] = histogram.record
            else:
                self._record[each.name] = meter.create_gauge(name, **about).set
        self._failures: dict[str, Any] = {
            call: meter.create_counter(f"shardkeep.{call}.failures", description=f"Failures of {call}s.")
            for call in ("save", "load")
        }

    def __call__(self, event: Event) -> None:
        attributes = {"shardkeep.rank": event.rank}
        for name, value in metrics_of(event).items():
            self._record[name](value, attributes)
        if failed := failed_call(event):
            self._failures[failed].add(1, {**attributes, "error.type": getattr(event, "kind", "")})
