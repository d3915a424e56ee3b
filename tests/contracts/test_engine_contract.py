"""What every engine promises, whatever it is made of: `producers.engines.base.Engine`, checked against full forward passes.

An engine joins by adding a builder to ENGINES. Tolerances are for float32.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from echo.errors import EngineError
from echo.trajectory import Sampling, span_problems
from producers.engines.base import Completion, Engine, Policy
from tests.tiny import END_IDS, POSITIONS, VOCABULARY, as_policy, reference_logprobs, save_tiny, tiny_model

TOLERANCE = 1e-5
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [3, 4, 5], [13, 14]]


def _transformers(model: str) -> Engine:
    from producers.engines.transformers import TransformersEngine

    return TransformersEngine(model, dtype="float32", device="cpu")


ENGINES: dict[str, tuple[str, Callable[[str], Engine]]] = {"transformers": ("transformers", _transformers)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest, folder: str) -> Iterator[Engine]:
    module, build = ENGINES[request.param]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    torch.set_num_threads(1)
    engine = build(folder)
    yield engine
    engine.close()


def _assert_sound(completion: Completion, max_tokens: int) -> None:
    assert 1 <= len(completion.token_ids) <= max_tokens
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(0 <= token < VOCABULARY for token in completion.token_ids)
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert not span_problems(completion.spans, len(completion.token_ids))
    assert not set(completion.token_ids[:-1]) & set(END_IDS)
    ended = completion.token_ids[-1] in END_IDS
    assert completion.finish_reason == ("stop" if ended else "length")
    assert ended or len(completion.token_ids) == max_tokens


def test_it_names_itself_and_serves_nothing_before_the_first_policy(engine: Engine) -> None:
    """The model folder's own weights are never sampled from."""
    assert engine.identity
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="no policy"):
        engine.generate(PROMPTS, Sampling(max_tokens=4))


def test_completions_come_in_order_of_their_prompts_with_the_logprobs_that_drew_them(engine: Engine) -> None:
    """Each logprob is the one that a full forward pass over that prompt and completion gives, after temperature."""
    model = tiny_model(7)
    engine.load(as_policy(model, 3))
    assert engine.policy_version == 3
    prompts = PROMPTS * 4
    completions = engine.generate(prompts, Sampling(max_tokens=8, temperature=1.3, seed=5))
    assert len(completions) == len(prompts)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for prompt, completion in zip(prompts, completions, strict=True):
        _assert_sound(completion, 8)
        assert completion.spans == ((0, 3),)
        hot = (reference_logprobs(model, prompt, completion.token_ids) * 1.3**-1).log_softmax(-1)
        expected = hot.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_the_same_seed_gives_the_same_completions_and_another_seed_others(engine: Engine) -> None:
    engine.load(as_policy(tiny_model(7), 0))
    first, again, other = (engine.generate(PROMPTS, Sampling(max_tokens=16, seed=seed)) for seed in (1, 1, 2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert [c.token_ids for c in first] != [c.token_ids for c in other]
    unseeded = [engine.generate(PROMPTS, Sampling(max_tokens=16)) for _ in range(2)]
    assert [c.token_ids for c in unseeded[0]] != [c.token_ids for c in unseeded[1]]


def test_a_seeded_call_depends_on_no_call_before_it(engine: Engine) -> None:
    """What a producer is asked for in sequential mode must not depend on who it is, and what else it has sampled."""
    engine.load(as_policy(tiny_model(8), 0))
    engine.generate(PROMPTS, Sampling(max_tokens=16))
    engine.load(as_policy(tiny_model(7), 1))
    seeded = Sampling(max_tokens=16, seed=2**62 + 1)
    first = engine.generate(PROMPTS, seeded)
    engine.generate(PROMPTS[:2], Sampling(max_tokens=4, seed=3))
    torch.manual_seed(5)
    assert engine.generate(PROMPTS, seeded) == first


def test_members_of_a_group_differ(engine: Engine) -> None:
    """A repeated prompt is sampled anew each time, with a seed too."""
    engine.load(as_policy(tiny_model(7), 0))
    completions = engine.generate([PROMPTS[0]] * 8, Sampling(max_tokens=16, seed=3))
    assert len({tuple(c.token_ids) for c in completions}) > 4


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (4, 0.5)])
def test_excluded_tokens_are_never_drawn_and_logprobs_are_renormalised(engine: Engine, top_k: int, top_p: float) -> None:
    """What top-k and top-p leave sums to 1, and only that is drawn."""
    model = tiny_model(7)
    engine.load(as_policy(model, 0))
    sampling = Sampling(max_tokens=8, top_k=top_k, top_p=top_p, seed=1)
    for prompt, completion in zip(PROMPTS * 8, engine.generate(PROMPTS * 8, sampling), strict=True):
        full = reference_logprobs(model, prompt, completion.token_ids).exp()
        for token, logprob, distribution in zip(completion.token_ids, completion.logprobs, full, strict=True):
            kept = sorted(range(VOCABULARY), key=lambda t: -distribution[t].item())[: top_k or VOCABULARY]
            mass = sum(distribution[t].item() for t in kept)
            before = list(itertools.accumulate((distribution[t].item() / mass for t in kept), initial=0.0))
            kept = [t for t, below in zip(kept, before, strict=False) if below < top_p]
            assert token in kept
            expected = (distribution[token] / sum(distribution[t] for t in kept)).log().item()
            assert logprob == pytest.approx(expected, abs=TOLERANCE)


def test_weights_swapped_in_mid_generation_draw_the_tokens_after_them(engine: Engine) -> None:
    """Spans say which version drew each token, and its logprob is that version's over the whole prefix."""
    models = {version: tiny_model(version) for version in (4, 5, 9)}
    engine.load(as_policy(models[4], 4))
    arrivals = {3: 5, 6: 9}
    calls = itertools.count()

    def take_policy() -> Policy | None:
        version = arrivals.get(next(calls))
        return None if version is None else as_policy(models[version], version)

    prompts = PROMPTS * 6
    completions = engine.generate(prompts, Sampling(max_tokens=12, seed=11), take_policy=take_policy)
    assert engine.policy_version == 9
    assert {len(c.spans) for c in completions} >= {1, 3}
    for prompt, completion in zip(prompts, completions, strict=True):
        _assert_sound(completion, 12)
        starts = [start for start, _ in completion.spans] + [len(completion.token_ids)]
        for (start, version), end in zip(completion.spans, starts[1:], strict=True):
            full = reference_logprobs(models[version], prompt, completion.token_ids)
            expected = full.gather(-1, torch.tensor(completion.token_ids)[:, None])[start:end, 0]
            given = torch.tensor(completion.logprobs[start:end])
            torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=0)


def test_a_policy_that_does_not_fit_leaves_the_old_one_serving(engine: Engine) -> None:
    """Missing, unknown and mis-shaped tensors are refused by name, before anything was changed."""
    good = as_policy(tiny_model(7), 2)
    engine.load(good)
    before = engine.generate(PROMPTS, Sampling(max_tokens=8, seed=1))
    newer = dict(as_policy(tiny_model(8), 3).tensors)
    name = sorted(newer)[-1]
    held = newer[name]
    missing = {k: v for k, v in newer.items() if k != name}
    unknown = newer | {"model.surplus": held._replace(name="model.surplus")}
    flat = newer | {name: held._replace(shape=(1, *held.shape))}
    short = newer | {name: held._replace(data=held.data[:-4])}
    for broken, word in ((missing, "missing"), (unknown, "unknown"), (flat, "shape"), (short, "bytes")):
        with pytest.raises(EngineError, match=word):
            engine.load(Policy(3, broken))
        assert engine.policy_version == 2
        assert engine.generate(PROMPTS, Sampling(max_tokens=8, seed=1)) == before


def test_a_bad_policy_in_mid_generation_ends_the_call_and_nothing_else(engine: Engine) -> None:
    good = as_policy(tiny_model(7), 2)
    engine.load(good)
    with pytest.raises(EngineError, match="missing"):
        engine.generate(PROMPTS, Sampling(max_tokens=8), take_policy=lambda: Policy(3, {}))
    assert engine.policy_version == 2
    assert len(engine.generate(PROMPTS, Sampling(max_tokens=8))) == len(PROMPTS)


def test_a_version_is_never_reused_and_never_goes_back(engine: Engine) -> None:
    engine.load(as_policy(tiny_model(7), 5))
    for version in (5, 4):
        with pytest.raises(EngineError, match="does not come after"):
            engine.load(as_policy(tiny_model(8), version))
    assert engine.policy_version == 5


@pytest.mark.parametrize(
    ("prompts", "sampling", "word"),
    [
        ([[3], []], Sampling(max_tokens=4), "no tokens"),
        ([[VOCABULARY]], Sampling(max_tokens=4), "vocabulary"),
        ([[3] * 10], Sampling(max_tokens=POSITIONS), "positions"),
        ([[3]], Sampling(max_tokens=4, temperature=0.0), "temperature"),
        ([[3]], Sampling(max_tokens=4, logprob_mode="raw"), "processed"),
    ],
)
def test_what_can_not_be_sampled_is_refused(engine: Engine, prompts: list[list[int]], sampling: Sampling, word: str) -> None:
    engine.load(as_policy(tiny_model(7), 0))
    with pytest.raises(EngineError, match=word):
        engine.generate(prompts, sampling)


def test_no_prompts_give_no_completions(engine: Engine) -> None:
    engine.load(as_policy(tiny_model(7), 0))
    assert engine.generate([], Sampling(max_tokens=4)) == []


def test_the_saved_folder_is_what_a_learner_publishes(engine: Engine, folder: str) -> None:
    """Weights read back from a model folder make a policy."""
    from safetensors.torch import load_file

    from tests.tiny import host_tensors

    engine.load(Policy(0, host_tensors(load_file(Path(folder) / "model.safetensors"))))
    assert engine.policy_version == 0
