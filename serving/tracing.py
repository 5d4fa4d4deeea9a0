"""OpenTelemetry spans of Ray Serve, sent where vLLM's go.

Serve wants a function that makes its span processors; its own default writes to files.
Endpoint, protocol headers and service name come from OpenTelemetry's usual variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def build_span_processors() -> "list[SpanProcessor]":
    """Make the processors of one Serve process.

    For `tracing_config.exporter_import_path` in a Serve config file:
    `serving.tracing:build_span_processors`.

    Returns:
        One processor, which sends spans in batches by OTLP over gRPC.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]
