"""Spans of Ray Serve and of vLLM on their way to an OpenTelemetry collector."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helm.live import SpanCollector
from tests.serving.conftest import (
    MODEL,
    ROOT,
    Server,
    clean_environment,
    start_up_command,
    wait_until,
)

PATIENCE_S = 4
NUM_CHOICES, MAX_TOKENS = 128, 900
"""Far more than any engine makes in that time."""

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


def test_serve_accepts_the_exporter_and_its_spans_arrive() -> None:
    collector = SpanCollector()
    try:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=clean_environment(
                OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, PYTHONPATH=str(ROOT)
            ),
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        collector.stop()
    assert result.returncode == 0, result.stderr
    # What is left is sent when the process ends.
    assert "a step" in {name for _, name, _ in collector.spans}


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    running = SpanCollector()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def traced_server(
    collector: SpanCollector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A deployment that sends its spans away, and is the only impatient one."""
    running = start_up_command(
        tmp_path_factory.mktemp("traced") / "up.log",
        {"engine.extra.otlp_traces_endpoint": collector.url, "replicas.max": 1},
        RAY_SERVE_LLM_ROUTER_HTTP_TIMEOUT=str(PATIENCE_S),
    )
    yield running
    running.command.end()


@pytest.mark.ray
@pytest.mark.slow
def test_vllm_sends_a_span_of_every_request(
    traced_server: Server, collector: SpanCollector
) -> None:
    with traced_server.client() as client:
        client.completions.create(model=MODEL, prompt="one two", max_tokens=4)
    wait_until(lambda: "llm_request" in {name for _, name, _ in collector.spans}, 120)


@pytest.mark.ray
@pytest.mark.slow
def test_a_request_that_takes_too_long_is_not_generated_to_its_end(
    traced_server: Server,
) -> None:
    def count(name: str) -> float:
        return traced_server.total(f"ray_vllm_{name}")

    body = {"model": MODEL, "prompt": "one two three", "ignore_eos": True}
    body |= {"n": NUM_CHOICES, "max_tokens": MAX_TOKENS}
    response = traced_server.post("/v1/completions", json=body)
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "RequestTimeoutError"
    # Metrics are a second or two behind.
    wait_until(lambda: count("num_requests_waiting") == 0, 10)
    wait_until(lambda: count("num_requests_running") == 0, 10)
    assert count("generation_tokens_total") < NUM_CHOICES * MAX_TOKENS / 2
