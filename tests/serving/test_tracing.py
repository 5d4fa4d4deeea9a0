"""Spans of Ray Serve and of vLLM on their way to an OpenTelemetry collector."""

import sys

import pytest

from tests.conftest import run
from tests.serving.conftest import ROOT, clean_environment, wait_until
from tests.serving.span_collector import SpanCollector

# In a process of its own: OpenTelemetry's provider can be set once only.
PROGRAM = """
from ray.serve._private.common import ServeComponentType
from ray.serve._private.tracing_utils import get_tracer, setup_tracing
from ray.serve.schema import TracingConfig

config = TracingConfig(
    enabled=True,
    exporter_import_path="serving.tracing:build_span_processors",
    sampling_ratio=1.0,
)
assert setup_tracing(
    component_name="demo",
    component_id="1",
    component_type=ServeComponentType.REPLICA,
    tracing_config=config,
)
with get_tracer().start_as_current_span("a step"):
    pass
"""


def test_serve_accepts_the_exporter_and_its_spans_arrive():
    collector = SpanCollector()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PYTHONPATH": str(ROOT)}
    run(sys.executable, "-c", PROGRAM, env=clean_environment(**env))
    collector.stop()
    # What is left is sent when the process ends.
    assert "a step" in collector.names


@pytest.mark.ray
def test_vllm_sends_a_span_of_every_request(server, collector):
    num_before = collector.names.count("llm_request")
    assert server.complete(max_tokens=4).is_success
    wait_until(lambda: collector.names.count("llm_request") > num_before, 120)
