"""The parts of the GPU benchmark that need no GPU."""

from __future__ import annotations

import random
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.plan import Cell
from loadtest.engine_bench.workloads import Requests
from loadtest.gpu_bench import parcels, transfer
from loadtest.gpu_bench.__main__ import main
from loadtest.gpu_bench.draft_times import DraftTimes
from loadtest.gpu_bench.plan import (
    ARMS,
    CELLS,
    DEPTH,
    LAW_ARM,
    MAX_NUM_SEQS,
    PARTS,
    depth_table,
    env_of,
    llm_args,
)
from loadtest.gpu_bench.results import Results, copy_results
from loadtest.gpu_bench.run import LAW_TOKENS
from loadtest.gpu_bench.sampling_law import (
    agreement,
    compare_laws,
    compare_samples,
)
from loadtest.gpu_bench.table import SIGNIFICANT, write_report
from loadtest.gpu_bench.time_limit import FIRST_GUESS_S, MARGIN, TimeLimit
from loadtest.gpu_bench.verification_work import VerificationWork
from loadtest.gpu_bench.waits import count_waits


def write(folder: Path, name: str, num_bytes: int) -> Path:
    """Write a file of noise."""
    file = folder / name
    file.write_bytes(random.Random(name).randbytes(num_bytes))
    return file


def test_files_come_out_of_their_parcels_as_they_went_in(tmp_path: Path) -> None:
    files = [write(tmp_path, "a.whl", 2500), write(tmp_path, "b.whl", 1000)]
    made = parcels.split_files(files, tmp_path / "pieces", piece_bytes=1000)
    assert [len(parcel.pieces) for parcel in made] == [3, 1]
    joined = parcels.join_files(tmp_path / "pieces", tmp_path / "out")
    assert [file.name for file in joined] == ["a.whl", "b.whl"]
    for before, after in zip(files, joined, strict=True):
        assert after.read_bytes() == before.read_bytes()


def test_pieces_may_arrive_in_several_loads(tmp_path: Path) -> None:
    pieces = tmp_path / "pieces"
    made = parcels.split_files([write(tmp_path, "a.whl", 2500)], pieces, 1000)
    loads = parcels.plan_loads(made, pieces, max_bytes=2000)
    assert loads == [["a.whl.000", "a.whl.001"], ["a.whl.002"]]
    there = tmp_path / "there"
    there.mkdir()
    for number, load in enumerate(loads):
        for name in (parcels.MANIFEST, *load):
            (there / name).write_bytes((pieces / name).read_bytes())
        assert bool(parcels.find_missing(there)) == (number == 0)
        if number == 0:
            with pytest.raises(BenchError, match=r"1 pieces are missing: a\.whl\.002"):
                parcels.join_files(there, there)
    assert parcels.join_files(there, there)[0].stat().st_size == 2500


def test_a_damaged_piece_is_noticed_and_nothing_half_made_stays(tmp_path: Path) -> None:
    pieces = tmp_path / "pieces"
    parcels.split_files([write(tmp_path, "a.whl", 2500)], pieces, 1000)
    (pieces / "a.whl.001").write_bytes(b"x" * 1000)
    with pytest.raises(BenchError, match="damaged on the way"):
        parcels.join_files(pieces, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_split_or_joined_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no such file: .*nothing\.whl"):
        parcels.split_files([tmp_path / "nothing.whl"], tmp_path, 1000)
    with pytest.raises(BenchError, match="two files of one name"):
        parcels.split_files([tmp_path / "a", tmp_path / "b" / "a"], tmp_path, 1000)
    with pytest.raises(BenchError, match=r"has no parcels\.json"):
        parcels.join_files(tmp_path, tmp_path)


def test_parts_keep_to_ten_minutes_each_and_twenty_five_in_all() -> None:
    limits = [part.limit_s for part in PARTS.values()]
    assert max(limits) < 600
    assert sum(one.limit_s for one in PARTS.values() if not one.is_extra) <= 25 * 60


def test_every_arm_is_measured_at_both_sizes_the_larger_and_ours_first() -> None:
    assert list(ARMS)[:3] == ["goodput", "vllm-adaptive", "none"]
    assert list(ARMS)[3:] == ["fixed-4", "fixed-2", "fixed-6"]
    assert [name for name in PARTS if "8b" in name] == ["models-8b", "8b", "8b-fixed"]
    assert list(PARTS).index("8b-fixed") < list(PARTS).index("models-1b")
    for pair in ("1b", "8b"):
        arms = [
            arm
            for part in PARTS.values()
            if part.pair.name == pair
            for arm in part.arms
        ]
        assert {arm.name for arm in arms} == set(ARMS)
        assert [arm.name for arm in arms] == list(ARMS)
    assert {cell.concurrency for cell in CELLS} == {1, 16, 64, 256}
    assert {cell.temperature for cell in CELLS} == {0.0, 1.0}
    assert {cell.workload for cell in CELLS} == {"mixed", "drift-context"}
    assert max(cell.concurrency for cell in CELLS) == MAX_NUM_SEQS
    # Results are kept by name.
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_arms_differ_in_nothing_but_speculation() -> None:
    args = {
        name: llm_args(arm, Path("target"), Path("draft")) for name, arm in ARMS.items()
    }
    own = {"speculative_config", "scheduler_cls", "worker_cls", "additional_config"}
    shared = [{k: v for k, v in one.items() if k not in own} for one in args.values()]
    assert all(one == shared[0] for one in shared)
    assert not own & args["none"].keys()
    sizes = shared[0]["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    for depth in (0, 2, 4, DEPTH):
        for cell in CELLS:
            num_tokens = cell.concurrency * (depth + 1)
            assert any(num_tokens <= size <= 1.3 * num_tokens for size in sizes)
    assert shared[0]["kv_cache_memory_bytes"] > 0
    assert "gpu_memory_utilization" not in shared[0]
    assert args["fixed-4"]["speculative_config"]["num_speculative_tokens"] == 4
    assert args["vllm-adaptive"]["speculative_config"]["enable_adaptive_verification"]
    assert "scheduler_cls" not in args["vllm-adaptive"]
    table = args["goodput"]["speculative_config"][
        "num_speculative_tokens_per_batch_size"
    ]
    assert table == depth_table(DEPTH)
    assert [row[2] for row in table] == list(range(1, DEPTH + 1))


def test_the_classes_named_by_path_exist() -> None:
    from importlib.util import find_spec

    args = llm_args(ARMS["goodput"], Path("target"), Path("draft"))
    for key in ("scheduler_cls", "worker_cls"):
        module, _, name = args[key].rpartition(".")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert f"class {name}(" in Path(spec.origin).read_text("utf-8")


def test_the_smoke_part_lets_vllm_watch_for_waits_and_no_other_does() -> None:
    watched = [n for n, part in PARTS.items() if "VLLM_GPU_SYNC_CHECK" in env_of(part)]
    assert watched == ["smoke"]
    assert env_of(PARTS["smoke"])["VLLM_GPU_SYNC_CHECK"] == "warn"


def test_waits_are_counted_by_place() -> None:
    wait = "UserWarning: called a synchronizing CUDA operation (Triggered internally)"
    copy = "UserWarning: Tensor.to: a non_blocking H2D copy that may be silently sync"
    log = (
        f"/x/site-packages/vllm/v1/a.py:10: {wait}\n  code()\n"
        f"/x/site-packages/vllm/v1/a.py:10: {wait}\n  code()\n"
        f"/opt/serving/engine/b.py:7: {copy}hronous (not pinned).\n"
        "/x/vllm/c.py:3: UserWarning: something else\n"
    )
    assert count_waits(log) == {"vllm/v1/a.py:10": 2, "serving/engine/b.py:7": 1}


def test_samples_of_the_law_come_from_drafts_that_are_drawn_and_cut() -> None:
    args = llm_args(LAW_ARM, Path("target"), Path("draft"))
    assert args["speculative_config"]["draft_sample_method"] == "probabilistic"
    policy = args["additional_config"]["tetris"]
    assert policy["policy"] == "tetris"
    assert policy["draft_tokens"] < policy["max_draft_tokens"] == DEPTH
    assert LAW_TOKENS >= 16
    assert [arm.name for arm in PARTS["smoke"].arms if arm == LAW_ARM]
    assert not any(LAW_ARM in p.arms for n, p in PARTS.items() if n != "smoke")


class StandInEvent:
    """A mark on a clock that moves by a millisecond a mark."""

    clock = 0.0

    def record(self) -> None:
        StandInEvent.clock += 1.0
        self.time = StandInEvent.clock

    def query(self) -> bool:
        return self.time < 5.0

    def elapsed_time(self, end: StandInEvent) -> float:
        return end.time - self.time


def test_drafts_are_timed_around_the_drafter() -> None:
    StandInEvent.clock = 0.0
    speculator = SimpleNamespace(propose=lambda depth: [7] * depth)
    times = DraftTimes(speculator, StandInEvent)
    assert times.take_mean_ms() is None
    assert [speculator.propose(depth) for depth in (1, 2, 3)] == [
        [7],
        [7, 7],
        [7, 7, 7],
    ]
    # The third has not been passed yet.
    assert times.take_mean_ms() == 1.0
    assert times.take_mean_ms() is None
    assert DraftTimes(None).take_mean_ms() is None


def test_a_time_limit_learns_how_long_things_take() -> None:
    now_s = 0.0
    limit = TimeLimit(100.0, lambda: now_s)
    assert limit.fits("start")
    limit.note("start", 95.0)
    assert not limit.fits("start")
    assert limit.fits("cell")
    now_s = 100.0 - MARGIN["cell"] * FIRST_GUESS_S["cell"] + 0.1
    assert not limit.fits("cell")
    now_s = 120.0
    assert limit.left_s() == 0.0


def test_shares_of_a_time_limit_are_equal_and_pass_on_what_is_left() -> None:
    now_s = 0.0
    limit = TimeLimit(90.0, lambda: now_s)
    first = limit.share(3)
    assert first.left_s() == 30.0
    first.note("cell", 20.0)
    now_s = 10.0
    second = limit.share(2)
    assert second.left_s() == 40.0
    now_s = 30.0
    assert not second.fits("cell")


def test_results_survive_being_cut_short(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.append("1b", "none", "law", {"digests": ["a"]})
    with (tmp_path / "measurements.jsonl").open("a") as file:
        file.write('{"pair": "1b", "ar')
    results.append("1b", "none", "law", {"digests": ["b"]})
    assert [one["digests"] for one in results.read().values()] == [["b"]]


def draw_kinds(seed: int, chances: list[float], count: int) -> list[int]:
    """Draw outcomes of a law."""
    return random.Random(seed).choices(range(len(chances)), chances, k=count)


def test_two_samples_of_one_law_pass_and_of_two_laws_do_not() -> None:
    fair, biased = [0.25] * 4, [0.31, 0.25, 0.25, 0.19]
    p_values = [
        compare_laws(
            draw_kinds(2 * seed, fair, 1500), draw_kinds(2 * seed + 1, fair, 1500)
        )[0]
        for seed in range(100)
    ]
    # Uniform: about 10 of 100 fall below .1, and about as many lie above .9.
    assert 2 < sum(p < 0.1 for p in p_values) < 22
    assert 2 < sum(p > 0.9 for p in p_values) < 22
    p_value, num_kinds = compare_laws(
        draw_kinds(1, fair, 1500), draw_kinds(2, biased, 1500)
    )
    assert p_value < 1e-3
    assert num_kinds == 4


def test_rare_outcomes_are_told_apart_from_nothing() -> None:
    assert compare_laws([], ["a"]) == (1.0, 1)
    assert compare_laws(["a"] * 9, ["a"] * 9) == (1.0, 1)
    many = [str(index) for index in range(100)]
    assert compare_laws(many, many) == (1.0, 1)


def test_replies_are_compared_position_by_position() -> None:
    rng = random.Random(0)

    def draw(weights: list[float]) -> list[list[int]]:
        return [rng.choices(range(4), weights, k=16) for _ in range(600)]

    fair = draw([1, 1, 1, 1])
    p_value, num_comparisons = compare_samples(fair, draw([1, 1, 1, 1]))
    assert p_value > SIGNIFICANT
    assert num_comparisons == 2 * 16
    # One position of all.
    biased = draw([1, 1, 1, 1])
    for reply in biased:
        reply[9] = rng.choices(range(4), [1.6, 1, 1, 0.4])[0]
    assert compare_samples(fair, biased)[0] < SIGNIFICANT
    assert compare_samples([[1, 2]] * 9, [[1, 2]] * 9) == (1.0, 0)
    assert compare_samples([[1]] * 90, [[1, 2]] * 90)[0] < SIGNIFICANT
    assert compare_samples([], []) == (1.0, 0)


def test_agreement_is_the_share_of_equal_outputs() -> None:
    assert agreement(["a", "b", "c"], ["a", "x", "c"]) == pytest.approx(2 / 3)
    assert agreement([], []) is None


def test_what_vllms_own_verification_leaves_out_is_counted() -> None:
    output = SimpleNamespace(
        total_num_scheduled_tokens=9,
        scheduled_spec_decode_tokens={"a": [-1] * 4, "b": [-1] * 3},
    )
    scheduler = SimpleNamespace(schedule=lambda: output)
    manager = SimpleNamespace(get_num_tokens=lambda *_: 5)
    work = VerificationWork(scheduler, manager)
    before = work.read()
    for _ in range(2):
        scheduled = scheduler.schedule()
        drafts = scheduled.scheduled_spec_decode_tokens
        manager.get_num_tokens({"a": 5, "b": 4}, drafts)
    counts = work.since(before)
    assert counts["offered_per_step"] == 7.0
    assert counts["verified_per_step"] == 3.0
    assert counts["sizing_us"] is not None
    assert work.since(work.read()) == {}


def test_without_a_manager_all_that_is_offered_is_verified() -> None:
    output = SimpleNamespace(
        total_num_scheduled_tokens=5, scheduled_spec_decode_tokens={"a": [-1] * 4}
    )
    scheduler = SimpleNamespace(schedule=lambda: output)
    work = VerificationWork(scheduler, None)
    before = work.read()
    scheduler.schedule()
    assert work.since(before) == {
        "offered_per_step": 4.0,
        "verified_per_step": 4.0,
        "sizing_us": None,
    }


@dataclass
class StandInMaker:
    """Makes request lists without a tokenizer."""

    made: list[str] = field(default_factory=list)
    eos_token_id: int = 2

    def make(self, cell: Cell, round_number: int) -> Requests:
        self.made.append(cell.name)
        return Requests(((1, 2, 3),) * cell.concurrency)

    def make_warm_up(self, concurrency: int) -> Requests:
        self.made.append("warm-up")
        return Requests(((1, 2),) * concurrency)

    def render(self, messages: Any, with_tools: bool) -> list[int]:
        return [5, 6]


@dataclass
class StandInEngines:
    """Engines that answer at once, or fail."""

    failing: str = ""
    started: list[str] = field(default_factory=list)
    closed: int = 0
    messages: list[Any] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)

    def start(self, arm: Any, timeout_s: float) -> Any:
        self.started.append(arm.name)
        self.timeouts_s.append(timeout_s)
        if arm.name == self.failing:
            raise BenchError("no such GPU")
        return self

    def run(self, message: Any, timeout_s: float) -> dict[str, Any]:
        self.messages.append(message)
        return {
            "output_tokens_per_s": 100.0,
            "digests": ["a", "b"],
            "acceptance_length": 2.5,
            "phases": {"before": 110.0, "after": 90.0},
        }

    def close(self) -> None:
        self.closed += 1


def measure(
    engines: StandInEngines,
    results: Results,
    part: str = "8b-fixed",
    limit_s: float = 1e4,
    maker: StandInMaker | None = None,
    ended: list[str] | None = None,
) -> tuple[bool, list[str]]:
    """Measure a part on stand-in engines."""
    from loadtest.gpu_bench.run import RequestLists, measure_part

    said: list[str] = []
    names: list[str] = [] if ended is None else ended
    complete = measure_part(
        PARTS[part],
        RequestLists(maker or StandInMaker()),  # type: ignore[arg-type]
        engines.start,
        results,
        TimeLimit(limit_s),
        said.append,
        lambda arm: names.append(arm.name),
    )
    return complete, said


def test_a_part_measures_all_its_cells_and_a_second_time_nothing(
    tmp_path: Path,
) -> None:
    engines, results = StandInEngines(), Results(tmp_path)
    assert measure(engines, results)[0]
    assert engines.started == ["fixed-4", "fixed-2", "fixed-6"]
    assert engines.closed == 3
    assert len(results.read()) == 3 * len(CELLS)
    assert measure(engines, results)[0]
    assert len(engines.started) == 3


def test_an_interrupted_part_goes_on_where_it_was(tmp_path: Path) -> None:
    engines, results = StandInEngines(), Results(tmp_path)
    for cell in CELLS[:-1]:
        results.append("8b", "fixed-4", cell.name, {"output_tokens_per_s": 1.0})
    assert measure(engines, results)[0]
    # Warm-up and the missing cell; then two whole arms.
    assert len(engines.messages) == 2 + 2 * (len(CELLS) + 1)


def test_request_lists_are_made_once_for_all_arms_and_temperatures(
    tmp_path: Path,
) -> None:
    maker = StandInMaker()
    assert measure(StandInEngines(), Results(tmp_path), maker=maker)[0]
    assert len(maker.made) == len(set(maker.made))
    assert len(maker.made) == 1 + len({(c.workload, c.concurrency) for c in CELLS})


def test_the_smoke_part_samples_the_law_with_its_control(tmp_path: Path) -> None:
    engines, results = StandInEngines(), Results(tmp_path)
    ended: list[str] = []
    assert measure(engines, results, "smoke", ended=ended)[0]
    assert ended == ["goodput", LAW_ARM.name, "none", "vllm-adaptive"]
    found = results.read()
    laws = [key for key in found if key[2].startswith("law")]
    assert laws == [
        ("demo", LAW_ARM.name, "law"),
        ("demo", "none", "law"),
        ("demo", "none", "law-control"),
    ]
    sampled = [one for one in engines.messages if one.get("keeps_tokens")]
    assert [one["temperature"] for one in sampled] == [1.0, 1.0, 1.15]
    assert all(one["max_tokens"] == LAW_TOKENS for one in sampled)


def test_no_arm_gets_more_than_its_share_of_the_time(tmp_path: Path) -> None:
    engines = StandInEngines()
    assert measure(engines, Results(tmp_path), limit_s=600.0)[0]
    assert engines.timeouts_s[0] == pytest.approx(200.0, abs=5.0)
    # What the first left over is the others'.
    assert engines.timeouts_s[1] == pytest.approx(300.0, abs=5.0)


def test_an_arm_that_fails_is_left_out_and_named(tmp_path: Path) -> None:
    engines = StandInEngines(failing="fixed-4")
    complete, said = measure(engines, Results(tmp_path))
    assert not complete
    assert "fixed-4 is left out: no such GPU" in said
    assert engines.closed == 2


def test_a_part_without_time_starts_nothing(tmp_path: Path) -> None:
    engines = StandInEngines()
    complete, said = measure(engines, Results(tmp_path), limit_s=5.0)
    assert not complete
    assert engines.started == []
    assert all("no time left to start" in text for text in said)


@pytest.fixture
def measured(tmp_path: Path) -> Results:
    """Ours against two others in two cells, with what the table needs."""
    results = Results(tmp_path)
    rates = {"none": 100.0, "fixed-2": 120.0, "vllm-adaptive": 150.0, "goodput": 165.0}
    for arm, rate in rates.items():
        for cell in ("mixed-t0-c64", "drift-context-t0-c64"):
            results.append(
                "1b",
                arm,
                cell,
                {
                    "output_tokens_per_s": rate,
                    "digests": ["a", "b", "c", arm[:1]],
                    "acceptance_length": 2.5,
                    "verified_per_step": 80.25,
                    "offered_per_step": 384.0,
                    "step_time_error": 0.031 if arm == "goodput" else None,
                    "selector_us": 140.0,
                    "draft_ms": 1.234,
                    "itl_p99_ms": 9.5,
                    "phases": {"before": rate, "after": rate / 2},
                },
            )
        results.append("1b", arm, "waits", {"places": {"vllm/a.py:1": 3}})
    sample = [[1, 2]] * 300 + [[2, 1]] * 300
    counters = {"num_cut_tokens": {"budget": 400}, "num_verified_tokens": 200}
    law = {"tokens": sample, "counters": counters}
    results.append("1b", "none", "law", law)
    results.append("1b", LAW_ARM.name, "law", law)
    results.append("1b", "none", "law-control", {"tokens": [[1, 2]] * 600})
    return results


def test_the_report_holds_ratios_inner_figures_and_losslessness(
    measured: Results,
) -> None:
    report = write_report(measured.read())
    rows = [
        [part.strip() for part in line.strip("|").split("|")]
        for line in report.splitlines()
        if line.startswith("|")
    ]
    [throughput] = [row for row in rows if row[0] == "mixed-t0-c64" and len(row) == 11]
    assert throughput[1:7] == ["165", "150", "100", "-", "120", "-"]
    assert throughput[7:] == ["1.65", "1.38", "1.10", "1.10"]
    [after] = [row for row in rows if row[0] == "drift-context-t0-c64, after"]
    assert after[-1] == "1.10"
    [inner] = [row for row in rows if row[:2] == ["mixed-t0-c64", "goodput"]]
    assert inner[2:] == ["2.50", "80.2", "384.0", "1.23", "3.1 %", "140", "9.5"]
    [equal] = [row for row in rows if row[0] == "mixed-t0-c64: outputs equal to none's"]
    assert equal[1:] == ["75.0 %", "75.0 %", "100.0 %", "-", "75.0 %", "-"]
    [law] = [row for row in rows if row[0].startswith(LAW_ARM.name)]
    assert law[3:] == ["200", "400", "the same law"]
    [control] = [row for row in rows if row[0].startswith("control")]
    assert control[5] == "told apart"
    waits = [row for row in rows if row[-1] == "vllm/a.py:1 (3)"]
    assert [row[1:3] for row in waits] == [["1", "0"]] * 4


def test_a_comparison_of_laws_that_shows_nothing_says_so(measured: Results) -> None:
    law = measured.read()["1b", LAW_ARM.name, "law"]
    uncut = {**law, "counters": {"num_cut_tokens": {}, "num_verified_tokens": 9}}
    measured.append("1b", LAW_ARM.name, "law", uncut)
    measured.append("1b", "none", "law-control", {"tokens": law["tokens"]})
    report = write_report(measured.read())
    assert "the same law: NOTHING WAS CUT, which shows nothing |" in report
    assert "the same law: WRONG |" in report


def test_results_are_copied_whole(measured: Results, tmp_path: Path) -> None:
    logs = measured.folder / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("said")
    (measured.folder / "report.md").write_text("report")
    copy_results(measured.folder, tmp_path / "copy")
    assert sorted(file.name for file in (tmp_path / "copy").iterdir()) == [
        "logs.tar.gz",
        "measurements.jsonl",
        "report.md",
    ]
    with tarfile.open(tmp_path / "copy" / "logs.tar.gz") as archive:
        assert "logs/a.log" in archive.getnames()


def test_what_is_printed_is_short_enough_for_its_end_to_be_handed_back() -> None:
    from loadtest.gpu_bench.__main__ import _shorten

    assert _shorten("short") == "short"
    shortened = _shorten("a" * 20_000 + "z" * 20_000)
    assert len(shortened) < 11_000
    assert shortened.startswith("a")
    assert shortened.endswith("z")


def test_an_empty_folder_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Nothing has been measured yet.")


def test_wheels_are_those_that_the_other_machine_lacks() -> None:
    pins = transfer.read_pins(transfer.GPU_LOCK.read_text())
    all_wheels = transfer.choose_wheels(pins, {})
    assert "torch===2.13.0" in all_wheels
    assert f"vllm==={pins['vllm']}" in all_wheels
    assert {one.partition("===")[0] for one in all_wheels} >= set(transfer.CUDA)
    # The server's own needs, and what other models would need.
    names = {one.partition("===")[0] for one in all_wheels}
    assert not names & {"ray", "locust", "pyarrow", "flashinfer-python", "tilelang"}
    present = transfer.read_pins(
        f"numpy=={pins['numpy']}\ntorch==2.11.0\nnvidia-cublas==13.1.0.3\n"
        "nvidia-cudnn-cu13==9.19.0.56\n"
    )
    fewer = transfer.choose_wheels(pins, present)
    left_out = {one.partition("===")[0] for one in {*all_wheels} - {*fewer}}
    assert left_out == {"numpy", "nvidia-cublas"}


def test_loads_fit_beside_the_working_tree_and_are_made_once(tmp_path: Path) -> None:
    wheels = [write(tmp_path, f"{n}-1-py3.whl", (12 << 20) + n) for n in range(3)]
    output, most = tmp_path / "out", 10 << 20
    loads = transfer.make_loads(wheels, output, most)
    assert 4 <= len(loads) <= 5
    times = [file.stat().st_mtime_ns for load in loads for file in load.iterdir()]
    for load in loads:
        assert sum(file.stat().st_size for file in load.iterdir()) <= most
        assert (load / parcels.MANIFEST).exists()
    assert transfer.make_loads(wheels, output, most) == loads
    again = [file.stat().st_mtime_ns for load in loads for file in load.iterdir()]
    assert again == times
    assert len(transfer.make_loads(wheels[:1], output, most)) == 2
    # What all the commands over there do, before `install` puts it together.
    there = tmp_path / "there"
    there.mkdir()
    for load in transfer.make_loads(wheels, output, most):
        for file in load.iterdir():
            file.rename(there / file.name)
    joined = parcels.join_files(there, tmp_path / "wheels")
    assert [file.read_bytes() for file in joined] == [w.read_bytes() for w in wheels]
    with pytest.raises(BenchError, match="the working tree leaves 3 MiB"):
        transfer.make_loads(wheels, output, 3 << 20)


def test_the_commands_for_over_there_move_install_and_measure(tmp_path: Path) -> None:
    loads = [tmp_path / "load-01", tmp_path / "load-02"]
    commands = transfer.list_commands(loads, tmp_path)
    assert [carried for carried, _ in commands[:3]] == ["load-01", "load-02", ""]
    assert all("mv -f load-0" in command for _, command in commands[:2])
    assert " install " in commands[2][1]
    measured = [command.split(" run ")[1].split()[0] for _, command in commands[3:]]
    assert measured == ["smoke", "models-8b", "8b", "8b-fixed"]
    assert all(len(command) < 2000 for _, command in commands)


def write_wheel(folder: Path, version: str) -> Path:
    """Write a wheel of a module that knows its version."""
    info = f"tiny_gpu-{version}.dist-info"
    file = folder / f"tiny_gpu-{version}-py3-none-any.whl"
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_gpu.py", f"version = {version!r}\n")
        metadata = f"Metadata-Version: 2.1\nName: tiny-gpu\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return file


def test_wheels_are_installed_over_there_in_front_of_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels.split_files([write_wheel(tmp_path, "2.13.0")], tmp_path / "pieces", 200)
    # NumPy is the machine's own.
    monkeypatch.setattr(transfer, "CHECK", "import tiny_gpu, numpy; tiny_gpu.version")
    python = transfer.install(tmp_path / "pieces", tmp_path / "place")
    assert python.exists()
    # Again, as after an interruption.
    assert transfer.install(tmp_path / "pieces", tmp_path / "place") == python
    monkeypatch.setattr(transfer, "CHECK", "import no_such_module")
    with pytest.raises(BenchError, match="failed"):
        transfer.install(tmp_path / "pieces", tmp_path / "place")


def test_prepare_downloads_splits_and_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(wanted: list[str], folder: Path) -> list[Path]:
        assert "numpy" not in {one.partition("===")[0] for one in wanted}
        return [write(tmp_path, "vllm-0.32.0-x.whl", 9 << 20)]

    pins = transfer.read_pins(transfer.GPU_LOCK.read_text())
    (tmp_path / "have.txt").write_text(f"numpy=={pins['numpy']}\n")
    monkeypatch.setattr(transfer, "download", download)
    monkeypatch.setattr(transfer, "ROOT", tmp_path)
    monkeypatch.setattr(transfer, "measure_tree", lambda: 20 << 20)
    listed: list[Path] = []
    monkeypatch.setattr(
        transfer, "list_commands", lambda loads: [*map(listed.append, loads)] and []
    )
    command = ["prepare", "--have", str(tmp_path / "have.txt")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert "1 wheels, 9 MiB in 1 transfers." in capsys.readouterr().out
    assert [folder.name for folder in listed] == ["load-01"]


def test_missing_models_are_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = str(tmp_path / "nothing")
    command = ["run", "smoke", "--target", nothing, "--output", str(tmp_path)]
    assert main(command) == 1
    assert "--target" in capsys.readouterr().err
