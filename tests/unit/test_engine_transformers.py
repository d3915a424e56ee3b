"""The transformers engine beyond the contract: its own decode loop against transformers' `generate`, and its edges."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from echo.config import RunConfig
from echo.errors import ConfigError, EngineError
from echo.trajectory import Sampling
from producers.engines.base import Policy
from producers.engines.registry import make_engine
from producers.engines.transformers import TransformersEngine, draw
from tests.tiny import END_IDS, POSITIONS, VOCABULARY, as_policy, host_tensors, reference_logprobs, save_tiny, tiny_model

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]]
GREEDY = Sampling(max_tokens=20, top_k=1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: str) -> TransformersEngine:
    return TransformersEngine(folder, dtype="float32", device="cpu")


def test_greedy_is_what_transformers_generates(engine: TransformersEngine) -> None:
    """Also with rows that end early and leave the batch, and with both end tokens of the generation config."""
    ends = set()
    for seed in range(6):
        model = tiny_model(seed)
        engine.load(as_policy(model, seed))
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=list(END_IDS),
                pad_token_id=0,
            )
            assert completion.token_ids == output[0, len(prompt) :].tolist()
            assert completion.logprobs == [0.0] * len(completion.token_ids)
            ends.add(completion.token_ids[-1] if completion.finish_reason == "stop" else None)
    assert ends == {*END_IDS, None}


def test_left_padding_changes_nothing(engine: TransformersEngine) -> None:
    """A prompt gets the same greedy tokens and the same distributions alone as beside longer ones."""
    engine.load(as_policy(tiny_model(7), 0))
    together = engine.generate(PROMPTS, Sampling(max_tokens=10, top_k=1, temperature=2.0))
    alone = [engine.generate([prompt], Sampling(max_tokens=10, top_k=1, temperature=2.0))[0] for prompt in PROMPTS]
    assert together == alone


def test_tokens_are_drawn_with_the_probabilities_that_are_recorded() -> None:
    """20,000 draws: each token's share is within five standard errors of its probability."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])
    sampling = Sampling(max_tokens=1, temperature=1.5, top_k=4)
    tokens, logprobs = draw(logits.expand(20_000, -1), sampling, torch.Generator().manual_seed(0))
    counts = Counter(tokens.tolist())
    assert set(counts) == {0, 1, 2, 3}
    for token, count in counts.items():
        p = logprobs[tokens == token][0].exp().item()
        assert abs(count / 20_000 - p) < 5 * (p * (1 - p) / 20_000) ** 0.5


def test_a_cut_by_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)
    kept = {draw(logits, Sampling(max_tokens=1, top_p=0.6), generator)[0].item() for _ in range(200)}
    assert kept == {0, 1}
    kept = {draw(logits, Sampling(max_tokens=1, top_p=1e-9), generator)[0].item() for _ in range(50)}
    assert kept == {0}


def test_without_any_end_token_completions_run_to_their_length(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"eos_token_id": 1', '"eos_token_id": null'))
    engine = TransformersEngine(folder, dtype="float32", device="cpu")
    engine.load(as_policy(tiny_model(7), 0))
    completions = engine.generate(PROMPTS * 4, Sampling(max_tokens=9, seed=0))
    assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(9, "length")}


@pytest.mark.parametrize(
    "named", [("model.embed_tokens.weight",), ("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")]
)
def test_tied_embeddings_may_come_under_either_name_or_both(tmp_path: Path, named: tuple[str, ...]) -> None:
    """And the output layer follows: greedy tokens are the new model's."""
    engine = TransformersEngine(save_tiny(tmp_path, tied=True), dtype="float32", device="cpu")
    engine.load(as_policy(tiny_model(1, tied=True), 0))
    model = tiny_model(2, tied=True)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    tensors = {k: v for k, v in as_policy(model, 1).tensors.items() if k not in tied or k in named}
    engine.load(Policy(1, tensors))
    completion = engine.generate([[3, 4]], GREEDY)[0]
    assert completion.token_ids == reference_logprobs(model, [3, 4], completion.token_ids).argmax(-1).tolist()


def test_tied_embeddings_that_differ_are_refused(tmp_path: Path) -> None:
    engine = TransformersEngine(save_tiny(tmp_path, tied=True), dtype="float32", device="cpu")
    model = tiny_model(1, tied=True)
    other = host_tensors({"lm_head.weight": model.lm_head.weight + 1})
    with pytest.raises(EngineError, match="ties them"):
        engine.load(Policy(0, dict(as_policy(model, 0).tensors) | other))
    assert engine.policy_version == -1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_policies_are_sampled_in_their_own_precision(folder: str, dtype: str) -> None:
    """Logprobs agree with a full pass in the same precision as far as that precision goes."""
    engine = TransformersEngine(folder, dtype=dtype, device="cpu")
    model = tiny_model(7, dtype=getattr(torch, dtype))
    engine.load(as_policy(model, 0))
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, Sampling(max_tokens=8, seed=2)), strict=True):
        full = reference_logprobs(model, prompt, completion.token_ids)
        expected = full.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.15, rtol=0)


def test_a_published_precision_is_converted(engine: TransformersEngine) -> None:
    model = tiny_model(7, dtype=torch.bfloat16)
    engine.load(as_policy(model, 0))
    completion = engine.generate([[3, 4]], GREEDY)[0]
    full = reference_logprobs(model.float(), [3, 4], completion.token_ids)
    assert completion.token_ids == full.argmax(-1).tolist()


def test_weights_that_are_not_sound_are_told_not_sampled(engine: TransformersEngine) -> None:
    model = tiny_model(7)
    model.model.norm.weight.data[0] = torch.nan
    engine.load(as_policy(model, 6))
    with pytest.raises(EngineError, match=r"policy 6 .*not sound"):
        engine.generate(PROMPTS, Sampling(max_tokens=4))


def test_the_run_file_chooses_the_engine(folder: str) -> None:
    run = RunConfig.model_validate({"run_id": "r", "model": {"path": folder}, "producer": {"engine_params": {"device": "cpu"}}})
    engine = make_engine(run)
    engine.load(as_policy(tiny_model(7), 0))
    assert engine.generate([[3]], GREEDY)[0].token_ids
    assert engine.identity.startswith("transformers ")


@pytest.mark.parametrize(
    ("producer", "said"),
    [
        ({"engine": "transformer"}, "did you mean transformers?"),
        ({"engine_params": {"devise": "cpu"}}, r"producer.engine_params.devise: did you mean device\?"),
        ({"engine_params": {"device": 3}}, "producer.engine_params.device: Input should be a valid string"),
    ],
)
def test_a_wrong_engine_or_parameter_is_a_config_error(folder: str, producer: dict[str, object], said: str) -> None:
    run = RunConfig.model_validate({"run_id": "r", "model": {"path": folder}, "producer": producer})
    with pytest.raises(ConfigError, match=said):
        make_engine(run)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=str(tmp_path)):
        TransformersEngine(str(tmp_path), dtype="float32", device="cpu")


def test_completions_beyond_the_models_positions_are_told_with_a_way_out(engine: TransformersEngine) -> None:
    engine.load(as_policy(tiny_model(7), 0))
    with pytest.raises(EngineError, match=r"max_tokens 64 .* 64 positions: lower sampling\.max_tokens"):
        engine.generate([[3]], Sampling(max_tokens=POSITIONS))


def test_token_ids_are_plain_integers(engine: TransformersEngine) -> None:
    """They go into records and messages."""
    engine.load(as_policy(tiny_model(7), 0))
    completion = engine.generate([[3]], Sampling(max_tokens=4))[0]
    assert {type(token) for token in completion.token_ids} == {int}
    assert {type(logprob) for logprob in completion.logprobs} == {float}
    assert max(completion.token_ids) < VOCABULARY
