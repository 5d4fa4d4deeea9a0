"""Where a deployment under test sends its spans."""

import concurrent.futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class SpanCollector(TraceServiceServicer):
    """The receiving end of OTLP over gRPC: OpenTelemetry's service, in memory."""

    def __init__(self) -> None:
        """Listen on a port of the loopback interface."""
        self.spans: list[tuple[str, str, str]] = []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 - gRPC's name
        """Keep scope, name and trace of every span."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [
                    (scope.scope.name, span.name, span.trace_id.hex())
                    for span in scope.spans
                ]
        return ExportTraceServiceResponse()

    def stop(self) -> None:
        """Stop listening."""
        self._server.stop(None)
