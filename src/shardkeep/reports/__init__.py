"""Ready-made listeners to events: traces, a progress bar, and sinks for TensorBoard, OpenTelemetry and Prometheus."""
