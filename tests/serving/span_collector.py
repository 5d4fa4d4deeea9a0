"""Where a deployment under test sends its spans."""

import concurrent.futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """The receiving end of OTLP over gRPC: keeps the name of every span."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Keep the names."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(None)
