"""What is around fronts and replicas fails under streams: Serve, logs, collectors."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path

import psutil
import pytest

from loadtest.compare.processes import find_processes
from tests.serving.conftest import find_log_folder, read_logs, wait_until
from tests.serving.fleet import check_equal, processes, run_all, when_both_are_ready

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

# FAULTS.md promises these, on a machine like the one it was measured on.
CONTROLLER_BACK_S = 30
PROXY_BACK_S = 15
# Others take several times as long for the imports of a new process.
SLOW = 4

WRITERS = ("controller", "proxy", "proxy's manager", "front", "replica", "engine")


def test_streams_go_on_while_serves_controller_restarts(fleet, undisturbed):
    """It starts and ends replicas; who answers whom is known without it."""
    when_both_are_ready(fleet)
    (controller,) = processes(fleet, "controller")
    check_equal(run_all(fleet, controller.kill), undisturbed)
    check_equal(run_all(fleet), undisturbed)
    # Which it has just told a front.
    running = (200, {"status": "ok", "running_replicas": 2})
    wait_until(lambda: fleet.health() == running, CONTROLLER_BACK_S * SLOW)
    assert processes(fleet, "controller") not in ([], [controller])


def test_a_proxy_that_is_killed_takes_its_connections_and_another_comes(
    fleet, undisturbed
):
    """Which is the controller's work, that of the test above included."""
    when_both_are_ready(fleet)
    # One that was replaced, for fronts came or went, stays for its connections.
    proxy = max(processes(fleet, "proxy"), key=psutil.Process.create_time)
    streams = run_all(fleet, proxy.kill, once=any)
    # Short ones had ended before.
    whole = [one.is_whole for one in streams]
    assert not all(whole)
    assert [one.is_cut for one in streams] == [not one for one in whole]
    check_equal([*compress(streams, whole)], [*compress(undisturbed, whole)])
    wait_until(lambda: fleet.health()[0] == 200, PROXY_BACK_S * SLOW)
    wait_until(lambda: fleet.total("ray_vllm_num_requests_running") == 0, 60)
    check_equal(run_all(fleet), undisturbed)


@contextmanager
def no_room_for_files(victims: list[psutil.Process]) -> Iterator[None]:
    """Let every write to a file fail, as on a full disk.

    By a limit on the size of files: the error is EFBIG instead of ENOSPC.
    """

    def limit(size: int) -> None:
        for process in victims:
            # One that has ended writes nothing.
            with suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))

    limit(0)
    try:
        yield
    finally:
        limit(psutil.RLIM_INFINITY)


def test_streams_go_on_where_no_log_can_be_written(fleet, undisturbed):
    """And are logged again as soon as there is room."""
    when_both_are_ready(fleet)
    folder = find_log_folder(fleet) / "serve"
    family = find_processes(fleet.command.process.pid)
    with no_room_for_files([one for role, one in family if role in WRITERS]):
        before = size_of(folder)
        check_equal(run_all(fleet), undisturbed)
        assert size_of(folder) == before
    assert fleet.complete(max_tokens=1).is_success
    wait_until(lambda: size_of(folder) > before, 10)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_spans_that_nobody_receives_disturb_nobody(fleet, undisturbed):
    """The collector's name does not resolve, in any test of this deployment."""
    check_equal(run_all(fleet), undisturbed)

    failure = "exporting traces to collector.invalid"
    wait_until(lambda: failure in read_logs(fleet, "*.*"), 60, period_s=1)


def test_without_its_gcs_a_deployment_ends_whole_and_says_why(ending_fleet):
    """Ray keeps there what it knows of the cluster, and this one keeps no copy."""
    up = ending_fleet.command
    family = up.descendants()
    (gcs,) = processes(ending_fleet, "gcs")
    gcs.kill()
    assert up.process.wait(120) == 1
    assert "error: Ray's gcs_server has died" in up.output
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []
