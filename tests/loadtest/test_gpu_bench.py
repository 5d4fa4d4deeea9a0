"""The parts of the GPU benchmark that need no GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.engine_bench.errors import BenchError
from loadtest.engine_bench.plan import Cell
from loadtest.engine_bench.workloads import Requests
from loadtest.gpu_bench import parcels
from loadtest.gpu_bench.__main__ import main
from loadtest.gpu_bench.plan import (
    ARMS,
    CELLS,
    DEPTH,
    MAX_NUM_SEQS,
    PARTS,
    depth_table,
    env_of,
    llm_args,
)
from loadtest.gpu_bench.results import Results
from loadtest.gpu_bench.sampling_law import agreement, compare_laws
from loadtest.gpu_bench.table import write_report
from loadtest.gpu_bench.time_limit import FIRST_GUESS_S, MARGIN, TimeLimit
from loadtest.gpu_bench.verification_work import VerificationWork


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
        parcels.split_files([tmp_path / "nothing.whl"], tmp_path)
    with pytest.raises(BenchError, match="two files of one name"):
        parcels.split_files([tmp_path / "a", tmp_path / "b" / "a"], tmp_path)
    with pytest.raises(BenchError, match=r"has no parcels\.json"):
        parcels.join_files(tmp_path, tmp_path)


def test_parts_keep_to_ten_minutes_each_and_twenty_five_in_all() -> None:
    limits = [part.limit_s for part in PARTS.values()]
    assert max(limits) < 600
    assert sum(limits) <= 25 * 60


def test_every_arm_is_measured_at_both_sizes_under_every_condition() -> None:
    for pair in ("1b", "8b"):
        arms = [
            arm
            for part in PARTS.values()
            if part.pair.name == pair
            for arm in part.arms
        ]
        assert {arm.name for arm in arms} == set(ARMS)
        assert len(arms) == len(ARMS)
    assert {cell.concurrency for cell in CELLS} == {1, 16, 64, 128, 256}
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


def test_a_time_limit_learns_how_long_things_take() -> None:
    now_s = 0.0
    limit = TimeLimit(100.0, lambda: now_s)
    assert limit.fits("start")
    limit.note("start", 90.0)
    assert not limit.fits("start")
    assert limit.fits("cell")
    now_s = 100.0 - MARGIN * FIRST_GUESS_S["cell"] + 0.1
    assert not limit.fits("cell")
    now_s = 120.0
    assert limit.left_s() == 0.0


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


class StandInRequests:
    """Makes request lists without a tokenizer."""

    def make(self, cell: Cell, round_number: int) -> Requests:
        return Requests(((1, 2, 3),) * cell.concurrency)

    def make_warm_up(self, concurrency: int) -> Requests:
        return Requests(((1, 2),) * concurrency)


@dataclass
class StandInEngines:
    """Engines that answer at once, or fail."""

    failing: str = ""
    started: list[str] = field(default_factory=list)
    closed: int = 0
    messages: list[Any] = field(default_factory=list)

    def start(self, arm: Any, timeout_s: float) -> Any:
        self.started.append(arm.name)
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
) -> tuple[bool, list[str]]:
    """Measure a part on stand-in engines."""
    from loadtest.gpu_bench.run import measure_part

    said: list[str] = []
    complete = measure_part(
        PARTS[part],
        StandInRequests(),  # type: ignore[arg-type]
        engines.start,
        results,
        TimeLimit(limit_s),
        said.append,
    )
    return complete, said


def test_a_part_measures_all_its_cells_and_a_second_time_nothing(
    tmp_path: Path,
) -> None:
    engines, results = StandInEngines(), Results(tmp_path)
    assert measure(engines, results)[0]
    assert engines.started == ["fixed-2", "fixed-4", "fixed-6"]
    assert engines.closed == 3
    assert len(results.read()) == 3 * (len(CELLS) + 1)
    assert measure(engines, results)[0]
    assert len(engines.started) == 3


def test_an_interrupted_part_goes_on_where_it_was(tmp_path: Path) -> None:
    engines, results = StandInEngines(), Results(tmp_path)
    for cell in CELLS[:-1]:
        results.append("8b", "fixed-2", cell.name, {"output_tokens_per_s": 1.0})
    assert measure(engines, results)[0]
    # Warm-up, the missing cell, the law; then two whole arms.
    assert len(engines.messages) == 3 + 2 * (len(CELLS) + 2)


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
                    "itl_p99_ms": 9.5,
                    "phases": {"before": rate, "after": rate / 2},
                },
            )
        results.append("1b", arm, "law", {"digests": ["x"] * 30 + ["y"] * 30})
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
    assert throughput[1:7] == ["100", "120", "-", "-", "150", "165"]
    assert throughput[7:] == ["1.65", "1.38", "1.10", "1.10"]
    [after] = [row for row in rows if row[0] == "drift-context-t0-c64, after"]
    assert after[-1] == "1.10"
    [inner] = [row for row in rows if row[:2] == ["mixed-t0-c64", "goodput"]]
    assert inner[2:] == ["2.50", "80.2", "384.0", "3.1 %", "140", "9.5"]
    [equal] = [row for row in rows if row[0] == "mixed-t0-c64: outputs equal to none's"]
    assert equal[1:] == ["100.0 %", "75.0 %", "-", "-", "75.0 %", "75.0 %"]
    [law] = [row for row in rows if row[0].startswith("temperature 1: law")]
    # Equal counts: the cube-root tail is not quite 1 at a single degree of freedom.
    assert law[6].startswith("p=0.9")
    assert law[6].endswith("(2 kinds)")


def test_an_empty_folder_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Nothing has been measured yet.")


def test_the_command_splits_and_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "a.whl", (1 << 20) + 5)
    pieces, out = str(tmp_path / "pieces"), str(tmp_path / "out")
    assert main(["split", str(file), "--output", pieces, "--piece-mib", "1"]) == 0
    assert "load 1: parcels.json a.whl.000 a.whl.001" in capsys.readouterr().out
    assert main(["join", pieces, "--output", out]) == 0
    assert (tmp_path / "out" / "a.whl").read_bytes() == file.read_bytes()


def test_missing_models_are_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = str(tmp_path / "nothing")
    command = ["run", "smoke", "--target", nothing, "--output", str(tmp_path)]
    assert main(command) == 1
    assert "--target" in capsys.readouterr().err
