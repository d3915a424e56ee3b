"""The reasoning_gym task: its prompts, its scores, what it refuses; and the registry that finds it."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from echo.config import TaskConfig
from echo.errors import ConfigError, TaskError
from producers.tasks.base import Task
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool
from tests.fakes.scorers import ScorerTask

SPELL = {"dataset": "spell_backward", "dataset_params": {"max_word_len": 4}, "prompt": "{metadata[word]}="}


def _task(**params: Any) -> Task:
    return make_task(TaskConfig(params={**SPELL, **params}))


def _scores(task: Task, *pairs: tuple[str, str]) -> list[tuple[float, dict[str, float]]]:
    """Rewards and components of (word, completion) pairs, scored as a producer does."""
    pool = ScorerPool(task, timeout_s=10, memory_mib=1024)
    try:
        items = [(text, {"question": "", "answer": word[::-1], "metadata": {"word": word}}) for word, text in pairs]
        return [(score.reward, score.components) for score in pool.score(items)]
    finally:
        pool.close()


def test_prompts_are_formatted_from_question_and_metadata() -> None:
    prompt = next(_task().prompts(3))
    word = prompt.reference["metadata"]["word"]
    assert prompt.text == f"{word}="
    assert prompt.reference["answer"] == word[::-1]
    asked = next(_task(prompt="Q: {question}\nA:").prompts(3))
    assert asked.text == f"Q: {prompt.reference['question']}\nA:"


def test_the_stream_has_no_end_and_depends_on_nothing_but_its_seed() -> None:
    """Also beyond the first short set that it is made of; prompt ids do not repeat."""
    first, again, other = (list(itertools.islice(_task().prompts(seed), 1200)) for seed in (7, 7, 8))
    assert first == again
    assert len({prompt.prompt_id for prompt in first}) == 1200
    assert not {prompt.prompt_id for prompt in first} & {prompt.prompt_id for prompt in other}
    assert len({prompt.text for prompt in first[:500]} ^ {prompt.text for prompt in first[500:1000]}) > 100


def test_a_prompt_is_found_by_its_index_in_any_order() -> None:
    stream = list(itertools.islice(_task().prompts(7), 1200))
    task = _task()
    assert [task.prompt(7, index) for index in (1100, 3, 499, 500, 0)] == [stream[index] for index in (1100, 3, 499, 500, 0)]


def test_a_prompt_id_is_enough_to_find_the_prompt_again() -> None:
    import reasoning_gym

    prompt = next(itertools.islice(_task().prompts(1), 700, None))
    dataset, seed, index = prompt.prompt_id.split("/")
    item = reasoning_gym.create_dataset(dataset, seed=int(seed), size=int(index) + 1, max_word_len=4)[int(index)]
    assert item["metadata"] == prompt.reference["metadata"]


def test_without_threshold_the_reward_is_the_library_s_own_score() -> None:
    right, half, wrong = _scores(_task(), ("stop", "pots"), ("stop", "poxx"), ("stop", "wrong!"))
    assert right == (1.0, {"score": 1.0})
    assert half == (0.5, {"score": 0.5})
    assert wrong[0] == 0.0


def test_with_a_threshold_the_reward_is_binary_and_the_score_is_kept() -> None:
    task = _task(threshold=1.0)
    assert _scores(task, ("stop", " pots\n"), ("stop", "potx")) == [(1.0, {"score": 1.0}), (0.0, {"score": 0.75})]
    assert _scores(_task(threshold=0.75), ("stop", "potx"), ("stop", "poxx")) == [(1.0, {"score": 0.75}), (0.0, {"score": 0.5})]


def test_an_exact_answer_ends_where_it_ends() -> None:
    assert _scores(_task(answer="exact", threshold=1.0), ("stop", "pots"), ("stop", "pots ")) == [
        (1.0, {"score": 1.0}),
        (0.0, {"score": 0.8}),
    ]


def test_an_answer_in_a_tag_is_the_last_one() -> None:
    text = "<answer>no</answer> or <answer> pots </answer>."
    assert _scores(_task(answer="tag", threshold=1.0), ("stop", text), ("stop", "pots"))[0][0] == 1.0
    assert _scores(_task(answer="tag", threshold=1.0), ("stop", "pots"))[0][0] == 0.0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"dataset": "spell_backwards"},
            "task.params.dataset: unknown data set 'spell_backwards': did you mean spell_backward?",
        ),
        ({"datasett": "x"}, "unknown key task.params.datasett: did you mean dataset?"),
        ({"dataset_params": {"max_len": 4}}, "task.params.dataset_params: spell_backward refuses them: .*max_len"),
        ({"dataset_params": {"min_word_len": 9, "max_word_len": 4}}, "max_word_len must be >= min_word_len"),
        ({"dataset_params": {"seed": 4}}, "task.params.dataset_params.seed can't be set"),
        ({"prompt": "{metadata[words]}"}, r"task.params.prompt: KeyError\('words'\).*word_len"),
        ({"prompt": "{answer}"}, "task.params.prompt"),
        ({"threshold": 1.5}, "task.params.threshold: Input should be less than or equal to 1"),
        ({"answer": "line"}, "task.params.answer: Input should be 'text', 'exact' or 'tag'"),
    ],
)
def test_wrong_params_are_named_with_a_remedy(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _task(**params)


def test_an_item_that_lacks_what_the_prompt_names_is_named_with_a_remedy() -> None:
    """Only the first item can be looked at before the run; syllogism's have the premise in one of two of their forms."""
    task = _task(dataset="syllogism", dataset_params={}, prompt="{question} {metadata[selected_premise]}")
    with pytest.raises(TaskError, match=r"item syllogism/\d+/\d+ gives no prompt: KeyError: 'selected_premise'; change task"):
        list(itertools.islice(task.prompts(3), 500))


def test_a_missing_dataset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.params\.dataset is missing"):
        make_task(TaskConfig(params={}))


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'reasoning-gym': did you mean reasoning_gym\?"):
        make_task(TaskConfig(name="reasoning-gym"))


@pytest.fixture(scope="module")
def any_dataset() -> Iterator[ScorerPool]:
    pool = ScorerPool(ScorerTask("tests.fakes.gym_scorer:score"), timeout_s=30, memory_mib=2048)
    yield pool
    pool.close()


# A data file that a library of reasoning-gym's leaves open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_every_data_set_scores_in_a_worker_as_the_library_does(any_dataset: ScorerPool) -> None:
    """The right answer of each gets what the library itself gives: nothing is lost on the way, and no verifier needs more than
    its item. (Data sets whose items have no single answer are scored with a wrong one.)"""
    import reasoning_gym

    items, expected = [], []
    for name in sorted(set(DATASETS) - {"composite"}):
        prompt = next(make_task(TaskConfig(params={"dataset": name})).prompts(5))
        answer = prompt.reference["answer"]
        text = answer.strip() if isinstance(answer, str) else "no"
        items.append((text, {"dataset": name, "item": prompt.reference}))
        expected.append(
            (name, reasoning_gym.create_dataset(name, seed=1, size=1).score_answer(text, entry=dict(prompt.reference)))
        )
    scores = any_dataset.score(items)
    assert len(scores) > 100
    found = [(name, score.reward) for (name, _), score in zip(expected, scores, strict=True)]
    assert found == expected
    assert {score.outcome for score in scores} == {"ok"}
