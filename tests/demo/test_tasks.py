"""The demo's tasks: answers that are right, splits that never meet, everything the same every time."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from ram_trl.recipe import RECIPES, Task, load_function

TASKS = ["tool", "code", "mem"]


def shared(name: str):
    return load_function(f"tasks/common.py:{name}", RECIPES)


def task(name: str) -> Task:
    return load_function(f"tasks/{name}.py:{name}", RECIPES)()


def examples(name: str, count: int = 300) -> list:
    draw, generator = load_function(f"tasks/{name}.py:draw", RECIPES), random.Random(0)
    return [draw(generator) for _ in range(count)]


def right_tool(prompt: str) -> str:
    tools = {"way": "map", "route": "map", "headlines": "news", "stories": "news", "ride": "cab", "lift": "cab"}
    tools |= {"order": "buy", "get": "buy"}
    words = prompt.removeprefix("T:").removesuffix(">").split()
    return f"{tools[words[0]]}({words[-1]})"


def right_code(prompt: str) -> str:
    function, argument = re.fullmatch(r"C:(\w+)\((\w+)\)=", prompt).groups()
    letters = list(argument)
    if function == "rev":
        letters.reverse()
    elif function == "rot":
        letters.append(letters.pop(0))
    elif function == "end":
        del letters[:-2]
    elif function == "swp":
        letters[0], letters[-1] = letters[-1], letters[0]
    return "".join(letters)


def right_mem(prompt: str) -> str:
    letters, position = re.fullmatch(r"M:(.*)\?(\d)=", prompt).groups()
    assert len(letters.split()) == 5
    return letters.split()[int(position) - 1]


@pytest.mark.parametrize(("name", "right"), [("tool", right_tool), ("code", right_code), ("mem", right_mem)])
def test_answers_are_right_and_slips_are_wrong(name: str, right) -> None:
    for example in examples(name):
        assert example.answer == right(example.prompt)
        assert example.slip != example.answer


@pytest.mark.parametrize("name", TASKS)
def test_the_tokenizer_spells_everything(name: str) -> None:
    tokenizer = shared("make_tokenizer")()
    for example in examples(name):
        for text in (example.prompt, example.answer, example.slip):
            tokens = tokenizer(text)["input_ids"]
            assert len(tokens) == len(text)
            assert tokenizer.unk_token_id not in tokens
            assert tokenizer.decode(tokens) == text


def test_the_tokenizer_can_be_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = shared("make_tokenizer")()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("T:way to oslo>")["input_ids"] == tokenizer("T:way to oslo>")["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize("name", TASKS)
def test_no_prompt_is_in_two_splits(name: str) -> None:
    made = task(name)
    train, dev, test = set(made.train["prompt"]), {r.prompt for r in made.rows("dev", 400)}, made.rows("test", 400)
    assert len(dev) == 400
    assert len({row.prompt for row in test}) == 400
    assert not train & dev
    assert not (train | dev) & {row.prompt for row in test}


def test_the_warm_up_of_the_base_sees_train_prompts_only() -> None:
    draw_train, split_of = load_function("tasks/base.py:draw_train", RECIPES), shared("split_of")
    generator = random.Random(0)
    prompts = {draw_train(generator).prompt for _ in range(5000)}
    assert {split_of(prompt) for prompt in prompts} == {"train"}
    for name in TASKS:
        held_out = {row.prompt for split in ("dev", "test") for row in task(name).rows(split, 1000)}
        assert not prompts & held_out
        assert any(prompt[0] == name[0].upper() for prompt in prompts)


def test_the_splits_have_their_shares() -> None:
    split_of = shared("split_of")
    found = [split_of(example.prompt) for example in examples("mem", 5000)]
    assert found.count("test") / 5000 == pytest.approx(0.1, abs=0.02)
    assert found.count("dev") / 5000 == pytest.approx(0.1, abs=0.02)


def test_a_prompt_never_changes_its_split() -> None:
    prompts = ["T:stories on cats>", "M:a b c d e?3=", "M:a b c d e?4=", "C:swp(abc)="]
    assert [shared("split_of")(prompt) for prompt in prompts] == ["test", "dev", "train", "train"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_the_same_every_time(name: str) -> None:
    one, two = task(name), task(name)
    assert one.train.to_dict() == two.train.to_dict()
    assert one.rows("test", 50) == two.rows("test", 50)
    assert one.rows("test", 80)[:50] == one.rows("test", 50), "more prompts keep the first ones"
    assert one.rows("test", 50) != one.rows("dev", 50)


@pytest.mark.parametrize("name", TASKS)
def test_the_reward_is_for_the_right_answer_alone(name: str) -> None:
    made = task(name)
    (reward,) = made.rewards
    batch = made.train.select(range(4)).to_dict()
    answers = batch["answer"]
    completions = [answers[0], answers[1] + "a", "", answers[3] + " "]
    given = reward(completions=completions, completion_ids=None, prompts=batch["prompt"], **batch)
    assert given == [1.0, 0.0, 0.0, 0.0]


def test_the_corpus_is_careless_where_it_should_be() -> None:
    corpus_row = load_function("tasks/base.py:corpus_row", RECIPES)
    generator = random.Random(0)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for example in examples("code", 3000):
        row = corpus_row(example, (0.3, 0.65), generator)
        assert row.prompt == example.prompt
        assert row.answer in (example.answer, example.slip)
        right[example.often_right].append(row.answer == example.answer)
        assert corpus_row(example, (1.0, 1.0), generator).answer == example.answer
    assert sum(right[False]) / len(right[False]) == pytest.approx(0.3, abs=0.05)
    assert sum(right[True]) / len(right[True]) == pytest.approx(0.65, abs=0.05)


def test_the_base_depends_on_its_seed_alone() -> None:
    make = load_function("tasks/base.py:tiny_qwen3", RECIPES)
    short = {"learning_steps": 3, "careless_steps": 1}
    calls: list[tuple[int, int]] = []
    one, tokenizer = make(seed=3, progress=lambda done, total: calls.append((done, total)), **short)
    torch.rand(5), random.random()
    two, _ = make(seed=3, progress=lambda done, total: None, **short)
    other, _ = make(seed=4, progress=lambda done, total: None, **short)
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.num_parameters() == pytest.approx(77_000, rel=0.02)
    assert one.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(("learned", "steps"), [(0.0, 31), (100.1, 41)])
def test_the_base_learns_until_it_knows_the_skills(learned: float, steps: int) -> None:
    calls: list[tuple[int, int]] = []
    make = load_function("tasks/base.py:tiny_qwen3", RECIPES)
    make(seed=0, progress=lambda *told: calls.append(told), learning_steps=40, careless_steps=1, learned=learned)
    assert [done for done, _ in calls] == list(range(1, steps + 1))
    assert calls[-1] == (steps, steps)
