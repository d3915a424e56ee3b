"""The canary: trainer and engine must say the same about a fixed text, or the version is refused and the old one serves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.learner import Learner
from echo.errors import EngineError, ManifestError
from echo.trajectory import Sampling
from echo.weights import canary as canaries
from echo.weights import manifest as manifests
from echo.weights.manifest import Canary
from echo.weights.store import WeightStore
from producers.engines.base import Adapter, Policy
from producers.engines.transformers import TransformersEngine
from tests.tiny import VOCABULARY, as_policy, save_tiny, tiny_model
from tests.unit.test_learner import make_batch, make_model, make_run

GREEDY = Sampling(max_tokens=12, top_k=1)
PROMPTS = [[3, 4, 5], [7]]


pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@torch.inference_mode()
def canary_of(model: Any) -> Canary:
    token_ids = canaries.token_ids(VOCABULARY, None)
    ids = torch.tensor(token_ids)
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])
    return Canary(token_ids=token_ids, logprobs=tuple(logprobs.flatten().tolist()))


def policy(seed: int, version: int, canary_seed: int | None = None) -> Policy:
    model = tiny_model(seed)
    canary = canary_of(model if canary_seed is None else tiny_model(canary_seed))
    return as_policy(model, version)._replace(canary=canary)


def test_the_right_canary_lets_a_policy_serve(folder: str) -> None:
    """And changes nothing about what is sampled."""
    engine, plain = (TransformersEngine(folder, dtype="float32", device="cpu") for _ in range(2))
    engine.load(policy(1, 5))
    plain.load(as_policy(tiny_model(1), 5))
    assert engine.policy_version == 5
    assert engine.generate(PROMPTS, GREEDY) == plain.generate(PROMPTS, GREEDY)


def test_a_wrong_canary_leaves_the_old_policy_serving(folder: str) -> None:
    """Bit for bit: the refused weights were in place for a moment, and nothing of them is left. The next version serves."""
    engine = TransformersEngine(folder, dtype="float32", device="cpu")
    engine.load(policy(1, 5))
    before = engine.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineError, match=r"policy 6 is refused: its canary differs from the trainer's by .* nats a token"):
        engine.load(policy(2, 6, canary_seed=3))
    assert engine.policy_version == 5
    assert engine.generate(PROMPTS, GREEDY) == before
    with pytest.raises(EngineError, match="policy 7 is refused"):
        engine.generate(PROMPTS, GREEDY, take_policy=lambda: policy(2, 7, canary_seed=3))
    assert engine.generate(PROMPTS, GREEDY) == before
    engine.load(policy(2, 8))
    assert engine.policy_version == 8
    assert engine.generate(PROMPTS, GREEDY) != before


def test_without_an_old_policy_nothing_serves(folder: str) -> None:
    """A first policy that is wrong is never sampled from."""
    engine = TransformersEngine(folder, dtype="float32", device="cpu")
    with pytest.raises(EngineError, match="policy 0 is refused"):
        engine.load(policy(2, 0, canary_seed=3))
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="no policy is loaded"):
        engine.generate(PROMPTS, GREEDY)
    engine.load(policy(2, 1))
    assert engine.policy_version == 1


def test_a_canary_of_another_vocabulary_is_refused(folder: str) -> None:
    """Before it is computed: an index out of range would take a GPU with it."""
    engine = TransformersEngine(folder, dtype="float32", device="cpu")
    canary = Canary(token_ids=(1, VOCABULARY), logprobs=(-1.0,))
    with pytest.raises(EngineError, match="token ids outside this model's vocabulary of 19"):
        engine.load(as_policy(tiny_model(1), 0)._replace(canary=canary))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learners_canary_is_what_the_engine_says(tmp_path: Path, dtype: str) -> None:
    """Whole policies and adapters, in both precisions, at every step; and the engine then serves the learner's policy."""
    model = make_model(tmp_path / "model")
    learner = Learner(make_run(model, published=dtype, lora={"rank": 4, "alpha": 12}))
    whole, adapted = (TransformersEngine(model, dtype=dtype, device="cpu") for _ in range(2))
    base = {one.name: one for one in learner.base_tensors()}
    for step in range(3):
        canary = learner.canary()
        assert canary is not None
        whole.load(Policy(step, {one.name: one for one in learner.host_tensors()}, canary=canary))
        adapter = Adapter(base, learner.adapter_config)
        adapted.load(Policy(step, {one.name: one for one in learner.adapter_tensors()}, adapter, canary))
        if dtype == "float32":
            assert whole.generate(PROMPTS, GREEDY) == adapted.generate(PROMPTS, GREEDY)
        learner.step(make_batch(step), step)
    assert whole.policy_version == adapted.policy_version == 2
    state = [engine._model.state_dict()["model.layers.0.mlp.up_proj.weight"] for engine in (whole, adapted)]
    torch.testing.assert_close(*state)
    assert not torch.equal(state[0].float(), learner_base(base, dtype))


def learner_base(base: Any, dtype: str) -> torch.Tensor:
    held = base["model.layers.0.mlp.up_proj.weight"]
    return torch.frombuffer(held.data, dtype=getattr(torch, dtype)).reshape(held.shape).float()


def test_adapters_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """Before anything was changed."""
    model = make_model(tmp_path / "model")
    learner = Learner(make_run(model, lora={"rank": 4, "alpha": 12}))
    base = {one.name: one for one in learner.base_tensors()}
    tensors = {one.name: one for one in learner.adapter_tensors()}
    engine = TransformersEngine(model, dtype="float32", device="cpu")
    engine.load(Policy(0, base))
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    config = learner.adapter_config
    for bad, settings, complaint in (
        ({name: tensors[name]}, config, f"{name} is no half"),
        ({**tensors, "base_model.model.nowhere.lora_B.weight": tensors[name]}, config, "nowhere.lora_B.weight is no half"),
        (tensors, {**config, "r": 5}, "have shapes"),
        (tensors, {**config, "use_dora": True}, "adapters with use_dora are not known"),
        (tensors, {**config, "peft_type": "IA3"}, "adapters are LoRA's"),
        (tensors, {}, "adapters are LoRA's"),
    ):
        with pytest.raises(EngineError, match=complaint):
            engine.load(Policy(1, bad, Adapter(base, settings)))
        assert engine.policy_version == 0
    with pytest.raises(EngineError, match="is missing"):
        engine.load(Policy(1, tensors, Adapter(dict(list(base.items())[1:]), config)))


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [
        ([-1.0, -2.0], None),
        ([-1.01, -2.02], None),
        ([-1.0, -2.05], r"differs from the trainer's by 0\.025 nats a token \(0\.02 are allowed in float32\)"),
        ([float("nan"), -2.0], "differs from the trainer's by nan"),
        ([float("-inf"), -2.0], "differs from the trainer's by inf"),
        ([-1.0], "1 logprobs of the canary instead of 2"),
    ],
)
def test_what_is_too_far(measured: list[float], complaint: str | None) -> None:
    """By the mean over tokens; a narrow precision is allowed more."""
    canary = Canary(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0))
    found = canaries.problem(canary, measured, "float32")
    if complaint is None:
        assert found is None
        return
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(found)
    if "0.025" in str(found):
        assert canaries.problem(canary, measured, "bfloat16") is None


def test_the_text_is_fixed_and_fits() -> None:
    """The same for every model of a size, inside its vocabulary and positions, and from all over it."""
    assert canaries.token_ids(1000, None) == canaries.token_ids(1000, 4096)
    for vocabulary in (2, 19, 151_936):
        ids = canaries.token_ids(vocabulary, None)
        assert len(ids) == 32
        assert 0 <= min(ids) <= vocabulary / 10
        assert vocabulary * 0.9 - 1 <= max(ids) < vocabulary
    assert len(canaries.token_ids(19, 5)) == 5
    assert len(canaries.token_ids(19, 1)) == 2


def test_the_canary_travels_in_the_manifest(tmp_path: Path) -> None:
    """Exactly; a malformed one is refused with the place named."""
    store = WeightStore(tmp_path)
    canary = Canary(token_ids=(1, 2, 3), logprobs=(-1.25, -0.1))
    tensors = list(as_policy(tiny_model(0), 0).tensors.values())
    published = store.publish("run", 0, 0, tensors, chunk_bytes=2**20, keep=2, created=1.5, canary=canary)
    assert manifests.decode(published.path.read_bytes(), where="x").canary == canary
    for bad in (b"[-1.25]", b"[]"):
        raw = published.path.read_bytes().replace(b"[-1.25,-0.1]", bad)
        with pytest.raises(ManifestError, match="here: its canary has"):
            manifests.decode(raw, where="here")


def test_an_unsound_policy_has_no_canary(tmp_path: Path) -> None:
    """What is not a number can't travel; the engine refuses such weights itself."""
    learner = Learner(make_run(make_model(tmp_path / "model")))
    with torch.no_grad():
        next(iter(learner._parameters.values()))[:] = torch.nan
    assert learner.canary() is None
