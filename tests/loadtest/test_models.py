"""The demo pair: its tasks, its shipped weights and its padded copies."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.models.recipe import (
    DRAFT,
    DRAFT_DIR,
    TARGET,
    TARGET_DIR,
    VOCAB_SIZE,
    Phase,
    Recipe,
)
from loadtest.models.tasks import (
    TASKS,
    TOOLS,
    Task,
    draw,
    generate_chat,
    is_held_out,
    parse_call,
)

TASK_PARAMS = [pytest.param(task, id=name) for name, task in TASKS.items()]
EXACT_PARAMS = [
    pytest.param(task, id=name) for name, task in TASKS.items() if task.one_right_answer
]
FREE_PARAMS = [
    pytest.param(task, id=name)
    for name, task in TASKS.items()
    if not task.one_right_answer
]
needs_weights = pytest.mark.skipif(
    not (TARGET_DIR / "model.safetensors").exists(), reason="the pair is not trained"
)


@pytest.mark.parametrize("task", TASK_PARAMS)
def test_equal_seeds_draw_equal_exchanges(task: Task) -> None:
    drawn, again = (draw(task, random.Random(7)) for _ in range(2))

    assert drawn.messages == again.messages
    assert drawn.task == task.name


def test_equal_seeds_generate_equal_chats_and_other_seeds_others() -> None:
    tasks = tuple(TASKS.values())
    chats = [generate_chat(tasks, random.Random(seed)).messages for seed in (1, 1, 2)]

    assert chats[0] == chats[1] != chats[2]


@pytest.mark.parametrize("task", TASK_PARAMS)
def test_training_never_sees_a_held_out_prompt(task: Task) -> None:
    rng = random.Random(0)
    seen = {draw(task, rng).prompt for _ in range(300)}
    held_out = {draw(task, rng, held_out=True).prompt for _ in range(30)}

    assert not seen & held_out
    assert all(map(is_held_out, held_out))
    assert len(held_out) >= 5


@pytest.mark.parametrize("task", TASK_PARAMS)
def test_checkers_accept_the_reference_answer(task: Task) -> None:
    rng = random.Random(0)
    for _ in range(50):
        drawn = draw(task, rng)
        assert drawn.accepts(drawn.answer), drawn.prompt
        assert drawn.accepts(f"{drawn.answer}\n"), "outer white space does not matter"


@pytest.mark.parametrize("task", EXACT_PARAMS)
def test_checkers_reject_wrong_answers(task: Task) -> None:
    drawn = draw(task, random.Random(0))

    for wrong in ("", drawn.answer[: len(drawn.answer) // 2], "#" + drawn.answer[1:]):
        assert not drawn.accepts(wrong)


@pytest.mark.parametrize("task", FREE_PARAMS)
def test_checkers_of_free_tasks_accept_other_samples_and_reject_cut_ones(
    task: Task,
) -> None:
    drawn = draw(task, random.Random(0))

    assert not drawn.accepts(drawn.answer[: len(drawn.answer) // 2])
    assert not drawn.accepts("")


def test_every_difficulty_has_tasks_with_long_replies() -> None:
    for difficulty in ("easy", "mixed", "hard"):
        tasks = [task for task in TASKS.values() if task.difficulty == difficulty]
        rng = random.Random(0)
        longest = max(len(draw(t, rng).answer) for t in tasks for _ in range(20))
        assert longest > 150, difficulty


def test_tool_exchanges_occur_only_in_chats_that_list_the_tools() -> None:
    rng = random.Random(0)
    for _ in range(200):
        chat = generate_chat(tuple(TASKS.values()), rng)
        assert chat.tools or not any(x.needs_tools for x in chat.exchanges)


@pytest.mark.parametrize(
    "reply", ["", "no call", "<tool_call>\n{broken\n</tool_call>", '{"name": "x"}']
)
def test_text_without_a_valid_tool_call_parses_to_none(reply: str) -> None:
    assert parse_call(reply) is None


def test_tasks_need_only_the_standard_library() -> None:
    folder = Path(__file__).parents[2] / "loadtest" / "models" / "tasks"
    for file in folder.glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1].split(".")[0]
                assert module in {"", *__import__("sys").stdlib_module_names}


class TestAcceptance:
    """Replay of speculative decoding on a finished reply."""

    @pytest.mark.parametrize(
        ("matches", "draft_length", "sums", "rate", "length"),
        [
            # The first token is the prompt's; then blocks (T T F), (T), of length 3.
            ([True, True, True, False, True], 3, (4, 3, 2), 3 / 4, 1 + 3 / 2),
            ([True] * 13, 5, (10, 10, 2), 1.0, 6.0),
            ([False] * 5, 2, (7, 0, 4), 0.0, 1.0),
        ],
        ids=["a block ends at the first that differs", "perfect", "useless"],
    )
    def test_drafts_count_up_to_the_first_that_differs(
        self,
        matches: list[bool],
        draft_length: int,
        sums: tuple[int, int, int],
        rate: float,
        length: float,
    ) -> None:
        from loadtest.models.evaluate import Acceptance

        total = Acceptance()
        total.add(matches, draft_length)

        assert (total.drafted, total.accepted, total.blocks) == sums
        assert (total.rate, total.length) == (rate, length)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from loadtest.models.tokenizer import train_tokenizer

    return train_tokenizer(vocab_size=VOCAB_SIZE, num_chats=500, seed=1)


class TestTraining:
    """The trainer, on a recipe of a few steps."""

    @pytest.fixture(autouse=True)
    def _is_quick(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import torch

        from loadtest.models import train

        monkeypatch.setattr(train, "TOKENIZER_CHATS", 300)
        num_threads = torch.get_num_threads()
        # Threads of so small a model wait for each other all the time.
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(num_threads)

    @pytest.fixture
    def short(self) -> Recipe:
        return Recipe(
            name="target",
            shape={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
            },
            phases=(Phase(3, 2, 64, num_repeats=1), Phase(2, 2, 128)),
            peak_lr=1e-3,
            seed=1,
        )

    def test_rows_are_the_same_on_every_call_and_differ_between_steps(
        self, short: Recipe, tokenizer: Any
    ) -> None:
        from loadtest.models.train import ChatPacker

        first, again, other = (
            ChatPacker(tokenizer, short).batch(step) for step in (3, 3, 4)
        )

        assert first.token_ids.shape == (2, 129)
        assert first.weights.shape == (2, 128)
        assert first.token_ids.equal(again.token_ids)
        assert not first.token_ids.equal(other.token_ids)

    def test_the_loss_counts_replies_with_their_end_of_turn_fully(
        self, short: Recipe, tokenizer: Any
    ) -> None:
        from loadtest.models.train import ChatPacker

        chats = replace(short, phases=(Phase(1, 4, 512),))
        batch = ChatPacker(tokenizer, chats).batch(0)
        counted = batch.token_ids[:, 1:][batch.weights == 1.0]
        text = tokenizer.decode(counted)

        assert "<|im_end|>" in text
        assert "<|im_start|>" not in text
        assert "user" not in text

    def test_rates_warm_up_stay_and_fall_to_nearly_zero(self, short: Recipe) -> None:
        recipe = replace(short, phases=(Phase(1000, 1, 8),))
        rates = [recipe.learning_rate(step) for step in range(1000)]

        assert rates[0] == pytest.approx(short.peak_lr / 100)
        assert rates[99:600] == pytest.approx([short.peak_lr] * 501)
        assert rates[-1] == pytest.approx(short.peak_lr / 400)

    def test_muon_takes_the_matrices_of_layers_and_adam_the_rest(
        self, short: Recipe, tokenizer: Any
    ) -> None:
        import torch

        from loadtest.models.train import build_model, make_optimizer

        model = build_model(short, tokenizer)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = make_optimizer(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        # Too small a step for bfloat16 to show at once: the copies add it up.
        for _ in range(40):
            kept = {name: p.grad for name, p in model.named_parameters()}
            optimizer.step(1e-4)
            for name, parameter in model.named_parameters():
                parameter.grad = kept[name]

        moved = {
            name: (parameter - before[name]).float()
            for name, parameter in model.named_parameters()
        }
        # Adam moves every entry by its rate, Muon every matrix by .2 of its on average.
        adam = moved["model.embed_tokens.weight"].abs().mean().item()
        muon = moved["model.layers.0.mlp.up_proj.weight"].pow(2).mean().sqrt().item()
        assert adam == pytest.approx(40 * 0.3 * 1e-4, rel=0.2)
        assert muon == pytest.approx(40 * 0.2 * 1e-4, rel=0.3)

    def test_an_interrupted_run_continues_to_the_same_weights(
        self, short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from safetensors.torch import load_file

        from loadtest.models import train

        monkeypatch.setattr(train, "_SAVE_EVERY", 2)
        train.train(short, tmp_path / "whole", tmp_path / "a")

        class Interrupted(train.ChatPacker):
            def batch(self, step: int) -> train.Batch:
                if step == 3:
                    raise KeyboardInterrupt
                return super().batch(step)

        with monkeypatch.context() as patch:
            patch.setattr(train, "ChatPacker", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                train.train(short, tmp_path / "cut", tmp_path / "b")
        assert not (tmp_path / "cut").exists()
        train.train(short, tmp_path / "cut", tmp_path / "b")

        whole, cut = (
            load_file(tmp_path / name / "model.safetensors")
            for name in ("whole", "cut")
        )
        assert all(whole[name].equal(cut[name]) for name in whole)

    def test_a_checkpoint_of_other_settings_is_refused(
        self, short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from loadtest.models import train

        monkeypatch.setattr(train, "_SAVE_EVERY", 1)
        train.train(short, tmp_path / "out", tmp_path / "work")

        other = replace(short, peak_lr=0.5)
        with pytest.raises(ValueError, match="made with other settings"):
            train.train(other, tmp_path / "out", tmp_path / "work")

    def test_a_pair_is_trained_evaluated_and_described(
        self, short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from loadtest.models import __main__, evaluate

        monkeypatch.setattr(__main__, "TARGET", short)
        monkeypatch.setattr(__main__, "DRAFT", replace(short, name="draft", seed=2))
        monkeypatch.setattr(evaluate, "_MAX_NEW_TOKENS", 8)
        pair = [
            "--target",
            str(tmp_path / "target"),
            "--draft",
            str(tmp_path / "draft"),
        ]
        few = ["--prompts", "2", "--long-prompts", "1", "--tasks", "capital", "dice"]

        assert __main__.main(["train", *pair, "--work-dir", str(tmp_path)]) == 0
        assert __main__.main(["evaluate", *pair, *few]) == 0
        assert __main__.main(["card", *pair]) == 0

        logs = [
            json.loads((tmp_path / role / "training_log.json").read_text())
            for role in ("target", "draft")
        ]
        assert [one["loss"] for one in logs] == ["cross-entropy", "KL from the target"]
        assert all(one["num_tokens"] == short.num_tokens for one in logs)
        assert 0 < logs[0]["losses"]["5"] < 9
        card = (tmp_path / "target" / "README.md").read_text()
        assert "| tokens seen | 896 | 896 |" in card
        assert "| dice | hard | free |" in card

    @pytest.mark.parametrize("recipe", [TARGET, DRAFT], ids=lambda recipe: recipe.name)
    def test_untrained_models_already_look_for_what_followed_last_time(
        self, recipe: Recipe, tokenizer: Any
    ) -> None:
        import torch

        from loadtest.models.train import build_model

        model = build_model(recipe, tokenizer)
        model.set_attn_implementation("eager")
        once = torch.randperm(1500)[:20]
        output = model(input_ids=torch.cat([once, once])[None], output_attentions=True)
        one_back = output.attentions[0][0, 0].diagonal(-1)
        after_last_time = output.attentions[1][0, 0].diagonal(-19)

        assert one_back.mean() > 0.5
        assert after_last_time[1:].mean() > 0.5


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A random Llama of a few thousand parameters, as a model directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    path = tmp_path / "tiny"
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def greedy_tokens(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Decode greedily in float32, where kernels of other shapes hardly differ."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        outputs.append(output[0].tolist())
    return outputs


class TestPad:
    """Copies with the same function and more parameters."""

    def test_a_padded_random_model_writes_the_same_tokens(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        from loadtest.models.pad import pad_target

        shape = pad_target(tiny_llama, tmp_path / "padded", 300_000)

        prompts = [[1, 2, 3], [40, 5], list(range(60))]
        assert shape.num_layers > 2
        assert shape.intermediate_size > 48
        assert greedy_tokens(tmp_path / "padded", prompts, 20) == greedy_tokens(
            tiny_llama, prompts, 20
        )

    def test_the_copy_has_about_the_parameters_asked_for(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file

        from loadtest.models.pad import pad_target

        shape = pad_target(tiny_llama, tmp_path / "padded", 1_000_000)

        weights = load_file(tmp_path / "padded" / "model.safetensors")
        counted = sum(tensor.numel() for tensor in weights.values())
        assert counted == shape.num_parameters
        assert counted == pytest.approx(1_000_000, rel=0.05)

    @pytest.mark.parametrize("billions", [1, 8])
    def test_billions_of_parameters_get_ordinary_proportions(
        self, billions: int, tiny_llama: Path
    ) -> None:
        from loadtest.models.pad import padded_shape

        config = json.loads((tiny_llama / "config.json").read_text())
        shape = padded_shape(config | {"hidden_size": 256}, billions * 10**9)

        assert shape.num_parameters == pytest.approx(billions * 1e9, rel=0.01)
        assert 16 <= shape.num_layers <= 32

    def test_a_count_below_the_source_is_refused_with_the_smallest_possible(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        from loadtest.models.pad import pad_target

        with pytest.raises(ValueError, match="ask for at least that many"):
            pad_target(tiny_llama, tmp_path / "padded", 1000)

    def test_existing_weights_are_not_overwritten(
        self, tiny_llama: Path, tmp_path: Path
    ) -> None:
        from loadtest.models.pad import pad_target

        with pytest.raises(ValueError, match="already holds weights"):
            pad_target(tiny_llama, tiny_llama, 300_000)

    def test_a_missing_source_names_the_command_that_makes_it(
        self, tmp_path: Path
    ) -> None:
        from loadtest.models.pad import pad_target

        with pytest.raises(ValueError, match=r"models train"):
            pad_target(tmp_path, tmp_path / "padded", 300_000)

    @needs_weights
    def test_a_padded_demo_target_gives_the_same_replies(self, tmp_path: Path) -> None:
        from loadtest.models.pad import pad_target
        from loadtest.models.tokenizer import load_tokenizer, render

        shape = pad_target(TARGET_DIR, tmp_path / "padded", 20_000_000)

        tokenizer = load_tokenizer(TARGET_DIR)
        rng = random.Random(0)
        asked = [draw(TASKS[name], rng) for name in ("story", "add", "json_record")]
        prompts = [
            render(tokenizer, one.messages[:1], reply_follows=True) for one in asked
        ]
        assert shape.num_parameters == pytest.approx(20_000_000, rel=0.02)
        assert greedy_tokens(tmp_path / "padded", prompts, 48) == greedy_tokens(
            TARGET_DIR, prompts, 48
        )


@needs_weights
def test_an_untrained_copy_of_the_draft_has_its_shape_and_none_of_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from transformers import AutoTokenizer

    from loadtest.models.__main__ import main

    output = tmp_path / "untrained"
    command = ["untrained", "--output", str(output)]
    assert main(command) == 0
    with (
        safe_open(DRAFT_DIR / "model.safetensors", "pt") as draft,
        safe_open(output / "model.safetensors", "pt") as copy,
    ):
        assert set(copy.keys()) == set(draft.keys())
        name = "model.layers.0.mlp.up_proj.weight"
        assert copy.get_tensor(name).shape == draft.get_tensor(name).shape
        assert not copy.get_tensor(name).equal(draft.get_tensor(name))
    assert AutoTokenizer.from_pretrained(output).get_vocab()
    assert main(command) == 1
    assert "--output" in capsys.readouterr().err


class TestShippedPair:
    """The weights under configs/models."""

    def test_together_they_are_below_forty_megabytes(self) -> None:
        files = [f for path in (TARGET_DIR, DRAFT_DIR) for f in path.rglob("*")]

        assert sum(file.stat().st_size for file in files) < 40e6

    def test_they_share_vocabulary_tokenizer_and_template(self) -> None:
        sizes = {
            json.loads((path / "config.json").read_text())["vocab_size"]
            for path in (TARGET_DIR, DRAFT_DIR)
        }

        assert len(sizes) == 1
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (TARGET_DIR / name).read_bytes() == (DRAFT_DIR / name).read_bytes()

    def test_weights_are_bfloat16(self) -> None:
        import torch
        from safetensors.torch import load_file

        for path in (TARGET_DIR, DRAFT_DIR):
            weights = load_file(path / "model.safetensors")
            assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}

    def test_every_exact_task_is_right_on_95_of_100_held_out_prompts(self) -> None:
        evaluation = json.loads((TARGET_DIR / "evaluation.json").read_text())

        for name, task in TASKS.items():
            if task.one_right_answer:
                assert evaluation["tasks"][name]["right"] >= 0.95, name

    def test_their_card_says_what_their_logs_and_evaluation_say(
        self, tmp_path: Path
    ) -> None:
        from loadtest.models.evaluate import write_cards

        target, draft = tmp_path / "target", tmp_path / "draft"
        shutil.copytree(TARGET_DIR, target)
        shutil.copytree(DRAFT_DIR, draft)
        write_cards(target, draft)

        for made, shipped in ((target, TARGET_DIR), (draft, DRAFT_DIR)):
            assert (made / "README.md").read_text() == (
                shipped / "README.md"
            ).read_text()

    def test_the_target_answers_a_held_out_prompt(self) -> None:
        from loadtest.models.evaluate import greedy_replies
        from loadtest.models.tokenizer import load_tokenizer, render
        from loadtest.models.train import load_model

        tokenizer = load_tokenizer(TARGET_DIR)
        asked = draw(TASKS["count_up"], random.Random(0), held_out=True)
        prompt = render(tokenizer, asked.messages[:1], reply_follows=True)
        reply = greedy_replies(load_model(TARGET_DIR), [prompt], max_new_tokens=200)[0]

        assert asked.accepts(tokenizer.decode(reply, skip_special_tokens=True))


@needs_weights
class TestChatTemplate:
    """The template that ships with the tokenizer."""

    def test_text_parts_and_plain_strings_render_alike(self) -> None:
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer = load_tokenizer(TARGET_DIR)
        parts = [{"type": "text", "text": "Count "}, {"type": "text", "text": "on."}]

        assert render(tokenizer, [{"role": "user", "content": parts}]) == render(
            tokenizer, [{"role": "user", "content": "Count on."}]
        )

    def test_a_structured_tool_call_renders_like_the_text_of_training(self) -> None:
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer = load_tokenizer(TARGET_DIR)
        arguments = {"city": "Rome"}
        function = {"name": "get_weather", "arguments": arguments}
        text = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
        structured = [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": f}],
            }
            for f in (function, function | {"arguments": json.dumps(arguments)})
        ]

        spoken = render(tokenizer, [{"role": "assistant", "content": text}])
        assert [render(tokenizer, [one]) for one in structured] == [spoken] * 2

    def test_tools_are_listed_in_the_system_turn(self) -> None:
        from loadtest.models.tokenizer import load_tokenizer, render

        tokenizer = load_tokenizer(TARGET_DIR)
        text = tokenizer.decode(
            render(tokenizer, [{"role": "user", "content": "Hi"}], with_tools=True)
        )

        assert text.startswith("<|im_start|>system\n")
        for tool in TOOLS:
            assert json.dumps(tool) in text


class TestCommandLine:
    """Help and errors."""

    @pytest.mark.parametrize(
        "command", [[], ["train"], ["evaluate"], ["card"], ["pad"]]
    )
    def test_every_command_explains_itself(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        from loadtest.models.__main__ import main

        with pytest.raises(SystemExit) as stopped:
            main([*command, "--help"])

        assert stopped.value.code == 0
        assert "usage:" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["pad", "--parameters", "big", "--output", "x"],
                "--parameters: 'big' is not a count; write",
            ),
            (
                ["evaluate", "--prompts", "0"],
                "--prompts: '0' is no whole number from 1",
            ),
            (["train", "--scale", "-1"], "--scale: '-1' is no number above 0"),
        ],
    )
    def test_a_bad_number_names_argument_and_fix(
        self,
        arguments: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        from loadtest.models.__main__ import main

        with pytest.raises(SystemExit):
            main(arguments)

        assert message in capsys.readouterr().err

    def test_a_missing_evaluation_names_the_command_that_makes_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from loadtest.models.__main__ import main

        assert main(["card", "--target", str(tmp_path)]) == 1
        assert "loadtest.models train" in capsys.readouterr().err
