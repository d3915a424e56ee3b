"""Makes a tiny policy that can learn on a CPU: a Qwen3 model of 0.3 million parameters with a character tokenizer.

    python -m producers.tiny_policy --task-file run.yaml --out DIR --seed 0

It starts from random weights and is warmed up, supervised with the task's own answers, until about one sample in ten is right:
enough for rewards to differ within a group, and far from solved. It says so, and writes it to DIR/warm_up.json.
Refuses to be a model for anything but demonstrations and tests. The folder is an ordinary Hugging Face model folder; the
same seed on the same machine gives the same weights.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import structlog
import torch
import typer
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo.config import RunConfig
from echo.errors import ConfigError, EchoError, TaskError
from echo.process import configure_logging, end_with_asking_parent
from echo.run_file import load
from echo.waiting import Watch
from producers.tasks.base import Prompt, Task
from producers.tasks.registry import make_task
from producers.tasks.scoring import ScorerPool

log = structlog.get_logger("tiny-policy")

_PAD, _END, _UNKNOWN = "<pad>", "<eos>", "<unk>"
# Printable ASCII without capitals, and the line feed.
_CHARACTERS = [*(chr(code) for code in range(32, 127) if not chr(code).isupper()), "\n"]

_POSITIONS = 512
_BATCH = 64
_LEARNING_RATE = 1e-3
_STEPS_BETWEEN_SAMPLES = 5
_SAMPLES = 256


class WarmUp(NamedTuple):
    """How a policy was made: supervised steps, and the share of its samples that are right after them."""

    seed: int
    steps: int
    sampled_right: float
    parameters: int


def make_tiny_policy(run: RunConfig, out: Path, seed: int, *, until: float = 0.1, most_steps: int = 5000) -> WarmUp:
    """Write the model folder `out` for the run's task, warmed up until the share `until` of samples is right.

    Raises TaskError where the task's prompts name no answer as text or leave no room for completions, where its scorer
    does not take answers as this policy writes them, or where the share is not reached within `most_steps`; ConfigError where
    `out` holds a model or can't be written.
    """
    if (out / "config.json").exists():
        raise ConfigError(f"{out} holds a model already: choose another --out")
    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    model = build(tokenizer)
    task = make_task(run.task)
    _check_answers(task, tokenizer, run, seed)
    examples = _examples(task, tokenizer, run, seed)
    warm_up = _warm_up(model, tokenizer, examples, run, seed, until, most_steps)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "warm_up.json").write_text(json.dumps(warm_up._asdict(), indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} can't be written: {error}: free space there, remove it, or choose another --out") from None
    return warm_up


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, capitals taken as small letters; any other character is unknown."""
    vocabulary = {token: number for number, token in enumerate([_PAD, _END, _UNKNOWN, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN, clean_up_tokenization_spaces=False
    )


def build(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The model with random weights, float32."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=_POSITIONS,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


class _Example(NamedTuple):
    prompt: list[int]
    answer: list[int]


def _answer(task: Task, prompt: Prompt) -> str:
    answer = prompt.reference.get("answer")
    if not isinstance(answer, str):
        raise TaskError(f"task {task.name}: prompt {prompt.prompt_id} has no answer in text, so it can't warm up a policy")
    return answer


def _check_answers(task: Task, tokenizer: PreTrainedTokenizerFast, run: RunConfig, seed: int) -> None:
    """Raise TaskError where an answer that lost its capitals, or characters beyond ASCII, is no right answer any more: samples
    would be counted as right here, and none would ever be rewarded."""
    changed: list[tuple[Prompt, str, str]] = []
    for prompt in itertools.islice(task.prompts(seed), _BATCH):
        answer = _answer(task, prompt)
        written = cast("str", tokenizer.decode(tokenizer.encode(answer), skip_special_tokens=True))
        if written != answer:
            changed.append((prompt, answer, written))
    if not changed:
        return
    scorer = ScorerPool(task, timeout_s=run.task.scorer_timeout_s, memory_mib=run.task.scorer_memory_mib)
    try:
        as_given = scorer.score([(answer, prompt.reference) for prompt, answer, _ in changed])
        as_written = scorer.score([(written, prompt.reference) for prompt, _, written in changed])
    finally:
        scorer.close()
    for (prompt, answer, written), given, got in zip(changed, as_given, as_written, strict=True):
        if got.reward < given.reward:
            raise TaskError(
                f"task {task.name}: prompt {prompt.prompt_id} wants {answer[:80]!r}; this policy writes no capitals and no "
                f"characters beyond ASCII, and {written[:80]!r} is rewarded {got.reward:g}: take another data set"
            )


def _examples(task: Task, tokenizer: PreTrainedTokenizerFast, run: RunConfig, seed: int) -> Iterator[_Example]:
    for prompt in task.prompts(seed):
        example = _Example(tokenizer.encode(prompt.text), [*tokenizer.encode(_answer(task, prompt)), tokenizer.eos_token_id])
        if len(example.prompt) + max(len(example.answer), run.sampling.max_tokens) > _POSITIONS:
            raise TaskError(
                f"task {task.name}: prompt {prompt.prompt_id} has {len(example.prompt)} characters and its answer "
                f"{len(example.answer) - 1}; with sampling.max_tokens {run.sampling.max_tokens} that is beyond this policy's "
                f"{_POSITIONS} positions: lower sampling.max_tokens, or shorten the prompt (task.params)"
            )
        yield example


def _warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterator[_Example],
    run: RunConfig,
    seed: int,
    until: float,
    most_steps: int,
) -> WarmUp:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    right, step = 0.0, 0
    watch = Watch(
        f"{until:.0%} of samples to be right",
        lambda: f"{right:.1%} after {step} of {most_steps} supervised steps",
        limit_s=run.limits.waiting_s,
    )
    for step in range(1, most_steps + 1):
        watch.check()
        batch = list(itertools.islice(examples, _BATCH))
        loss = model(**_supervised(batch, tokenizer.pad_token_id)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _STEPS_BETWEEN_SAMPLES == 0:
            right = _sampled_right(model, tokenizer, list(itertools.islice(examples, _SAMPLES)), run)
            if right >= until:
                log.info("policy warmed up, supervised", steps=step, sampled_right=right, parameters=parameters)
                return WarmUp(seed, step, right, parameters)
    raise TaskError(
        f"after {most_steps} supervised steps {right:.1%} of samples are right, not {until:.0%}: take an easier task"
    )


def _supervised(batch: Sequence[_Example], pad: int) -> dict[str, torch.Tensor]:
    """Right-padded inputs whose labels are the answers only."""
    width = max(len(one.prompt) + len(one.answer) for one in batch)
    ids = torch.full((len(batch), width), pad)
    labels = torch.full((len(batch), width), -100)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, one in enumerate(batch):
        begin, end = len(one.prompt), len(one.prompt) + len(one.answer)
        ids[row, :end] = torch.tensor(one.prompt + one.answer)
        labels[row, begin:end] = ids[row, begin:end]
        mask[row, :end] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.inference_mode()
def _sampled_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[_Example], run: RunConfig
) -> float:
    width = max(len(one.prompt) for one in examples)
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(examples):
        ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
        mask[row, width - len(one.prompt) :] = 1
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": run.sampling.temperature,
        "top_k": run.sampling.top_k,
        "top_p": run.sampling.top_p,
        "max_new_tokens": run.sampling.max_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sampled = cast("Any", model).generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    return sum(row[: len(one.answer)] == one.answer for row, one in zip(sampled, examples, strict=True)) / len(examples)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    task_file: Annotated[Path, typer.Option(help="A run file: its task and sampling sections are used.")],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    seed: Annotated[int, typer.Option(help="Seeds weights, examples and samples.")] = 0,
    until: Annotated[float, typer.Option(help="Share of right samples at which the warm-up ends.", min=0, max=1)] = 0.1,
) -> None:
    """Make a tiny policy, warmed up for the task of a run file."""
    end_with_asking_parent()
    configure_logging()
    torch.set_num_threads(1)
    try:
        made = make_tiny_policy(load(task_file), out, seed, until=until)
    except EchoError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(
        f"{out}: {made.parameters:,} parameters, warmed up in {made.steps} steps, {made.sampled_right:.0%} of samples right"
    )


if __name__ == "__main__":
    app()
