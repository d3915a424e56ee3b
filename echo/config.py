"""One run file for both sides, `echo-produce run.yaml` and `echo-train run.yaml`: its keys, their defaults and bounds.

Refuses unknown keys, and keeps secrets out of every printed form. Knows no file: `echo/run_file.py` reads and writes them.
JSON Schema: `python -m echo.config`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from echo.addresses import check_host, http_url, is_wildcard
from echo.errors import ConfigError
from echo.trajectory import MAX_TEMPERATURE, MIN_TEMPERATURE

# Settings of librdkafka whose values are secret, by part of their name.
_SECRET_PARTS = ("password", "secret", "jaas", "key.pem", "token", "oauthbearer.config")


def _hide_secrets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name, item in value.items():
        # Else a password that was left empty would be "None".
        if item is None or isinstance(item, dict | list):
            raise ValueError(f"{name} takes one value: give it, or leave the key out")
    return {
        name: SecretStr(str(item))
        if any(part in str(name) for part in _SECRET_PARTS) and not isinstance(item, SecretStr)
        else item
        for name, item in value.items()
    }


Setting = bool | int | float | str | SecretStr
ClientSettings = Annotated[dict[str, Setting], BeforeValidator(_hide_secrets)]
Host = Annotated[str, AfterValidator(check_host)]
Strict = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class _Section(BaseModel):
    model_config = Strict


class ModelConfig(_Section):
    path: str = Field(min_length=1)
    """A Hugging Face model folder or hub id: architecture, tokenizer, and the initial policy (version 0)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the learner computes in; the dtype that is published is `weights.dtype`."""


class TaskConfig(_Section):
    name: str = "reasoning_gym"
    """A task of producers/tasks."""
    params: dict[str, Any] = {}
    """What that task takes; it refuses what it does not know."""
    chat: bool = False
    """Put each prompt into the tokenizer's chat template, as a user's message."""
    seed: int = 0
    """Seeds the order of prompts; every producer incarnation draws its own stream from it."""
    scorer_timeout_s: float = Field(default=5.0, gt=0)
    """Wall-clock limit for scoring one completion."""
    scorer_memory_mib: int = Field(default=2048, ge=64)
    """Address space limit of the scoring process."""


class BrokerConfig(_Section):
    settings: ClientSettings = {}
    """librdkafka settings, passed through as they are: bootstrap.servers, security.protocol, sasl.*, ssl.*, ..."""
    apache_home: Path | None = None
    """A Kafka home for an embedded Apache Kafka, where `bootstrap.servers` is not set. Else KAFKA_HOME, else Tansu."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for every question to the broker at start."""


class TopicsConfig(_Section):
    file: Path | None = None
    """topics.yaml; None takes the one that ships with Echo."""
    prefix: str = ""
    """Goes before every topic name of topics.yaml, e.g. "team-a."."""


class SamplingConfig(_Section):
    group_size: int = Field(default=8, ge=1)
    """Trajectories per prompt."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 keeps the whole vocabulary."""
    max_tokens: int = Field(default=256, ge=1)
    """Completion tokens at most."""


class ProducerConfig(_Section):
    engine: str = "transformers"
    """An engine of producers/engines."""
    engine_params: dict[str, Any] = {}
    """What that engine takes; it refuses what it does not know."""
    groups_per_call: int = Field(default=8, ge=1)
    """Groups sampled together in one batch, window permitting."""
    logprob_dtype: Literal["float32", "float16"] = "float32"
    """On the wire."""
    queue_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Trajectories waiting for the broker's acknowledgement, bytes; when full, sampling waits."""
    flush_timeout_s: float = Field(default=60.0, gt=0)
    """How long a stopping producer waits for the last acknowledgements."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    threads: int = Field(default=0, ge=0)
    """Torch threads of the transformers engine; 0 leaves torch's own choice."""
    seed: int | None = None
    """Seeds sampling; None draws fresh entropy per incarnation."""


class BatchConfig(_Section):
    groups_per_step: int = Field(default=32, ge=1)
    """Groups of one optimiser step."""
    buffer_bytes: int = Field(default=2**30, ge=2**20)
    """Complete and incomplete groups held by the trainer, bytes; when full, its partitions are paused."""
    group_deadline_s: float = Field(default=120.0, gt=0)
    """A group that is still incomplete so long after its first member was read is decided: trained from `min_group_size`
    members on, else dropped. A later member is dropped."""
    min_group_size: int | None = Field(default=None, ge=2)
    """Members that make an overdue group trainable, advantages normalised over what is there; None: complete groups only."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Prompt and completion tokens that a trajectory may have; a longer one is dropped with its whole group, whatever its
    worth. None: as many as the model has positions."""
    request_deadline_s: float = Field(default=120.0, gt=0)
    """Sequential mode: a producer that delivers nothing for so long of what it was asked for is slow, and others are asked for
    that, too. It should be longer than an engine call."""
    producer_dead_s: float = Field(default=30.0, gt=0)
    """Without a heartbeat for so long a producer is dead and its window goes to the others."""


OnStale = Literal["drop", "mask"]
Advantage = Literal["grpo", "dr_grpo", "rloo"]
ObjectiveName = Literal["ppo", "cispo", "gspo", "dpo"]
Correction = Literal["token_tis", "sequence_tis", "icepop", "trust_region", "tapered", "none"]
Judgement = Literal["grpo", "dr_grpo", "rloo", "preference"]
Normalization = Literal["token_mean", "sequence_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]


class LoraConfig(_Section):
    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """An adapter counts by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the linear layers that get an adapter, like [q_proj, v_proj]; all-linear: each but the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """merged: whole policies, which any engine takes. adapter: the base once, then adapters alone, in float32."""


class LearnerConfig(_Section):
    steps: int = Field(default=100, ge=0)
    """Optimiser steps of the run."""
    lr: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How lr goes after the warm-up: it stays, or it falls to 0 at the last of `steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which lr rises from 0 to its value, in equal parts; the first of them is at 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    advantage: Advantage = "grpo"
    """What a reward counts within its group. grpo: its distance from the mean in standard deviations. dr_grpo: its distance
    from the mean (with normalization fixed_length this is Dr. GRPO). rloo: its distance from the mean of the others."""
    objective: ObjectiveName = "ppo"
    """ppo: a ratio per token, clipped. gspo: one ratio per completion, clipped (its bounds are near 3e-4; take normalization
    sequence_mean). cispo: the ratio is a capped weight, and no token's gradient is stopped. dpo: each group's best completion
    is preferred to its worst, against a reference policy; of the objective's keys below only dpo_beta acts."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """How far from the reference a preference may take the policy: the larger, the nearer it stays."""
    clip_low: float = Field(default=0.2, ge=0)
    """ppo and gspo keep the ratio above 1 - clip_low where the advantage is negative."""
    clip_high: float = Field(default=0.2, ge=0)
    """ppo and gspo keep the ratio below 1 + clip_high where the advantage is positive; cispo caps it there."""
    correction: Correction = "tapered"
    """How a token counts that another policy drew (docs/objectives.md). none: PPO as it stands, clipped around the behaviour
    policy. token_tis, sequence_tis: a truncated importance weight per token or per completion. icepop: a weight per token, 0
    outside the band. trust_region: token_tis, and a token's gradient stops where new / behaviour has left the band in the
    direction of its advantage. tapered: what was good counts in full, what was bad only as far as the learner would still do
    it."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Upper bound of a truncated importance weight."""
    band_low: float = Field(default=0.5, ge=0, le=1)
    """Lower end of the band of icepop (proximal / behaviour) and trust_region (new / behaviour)."""
    band_high: float = Field(default=2.0, ge=1)
    """Upper end of that band."""
    off_policy_mask: float | None = Field(default=None, ge=0)
    """Leaves out completions of negative advantage whose mean log(behaviour / new) per token is above this, in nats."""
    normalization: Normalization = "token_mean"
    """What the loss is a mean of: token_mean, all trained tokens of a batch; sequence_mean, its completions, each the mean of
    its tokens; fixed_length, its completions, each the sum of its tokens over sampling.max_tokens."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL from the reference policy."""
    kl_estimator: KlEstimator = "k3"
    """k1 is taken off the advantage; k2 and k3 are added to the loss."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Padded tokens of one forward pass; the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Compute the insides of layers a second time on the way back instead of keeping them: less memory, a third more time."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen base instead of all weights (needs the extra `lora`); {} takes the defaults."""
    sharding: Literal["none", "full"] = "none"
    """With several ranks (`accelerate launch`). none: each holds all and gradients are averaged (DDP). full: weights, gradients
    and optimiser are split over them (FSDP)."""
    rank_timeout_s: float = Field(default=50.0, gt=0)
    """How long a rank waits for the others before it takes them for dead."""
    max_skipped: int = Field(default=5, ge=1)
    """So many steps in a row without a finite gradient end the run."""
    threads: int = Field(default=0, ge=0)
    """Torch threads; 0 leaves torch's own choice."""
    publish_every: int = Field(default=1, ge=1)
    """kappa: learner steps per published version."""

    @property
    def judgement(self) -> Judgement:
        """What is made of a group's rewards: advantages of one kind, or one pair of which a completion is preferred."""
        return "preference" if self.objective == "dpo" else self.advantage

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a frozen one."""
        return self.objective == "dpo" or self.kl_coefficient > 0


class CheckpointConfig(_Section):
    dir: Path = Path("checkpoints")
    every: int = Field(default=10, ge=1)
    """Learner steps between checkpoints; one is always written at the end."""
    keep: int = Field(default=2, ge=1)
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: go on from the newest whole checkpoint in `dir`, if there is one. never: start over, from version 0's weights. A
    folder (`.../step-0000010`): go on from that checkpoint of this run. What is newer than the start is removed from `dir`."""
    accept_lost: bool = False
    """Resume although records were deleted before they were read (by retention, or with their topic): reading begins at the
    first offset that is there, and those between are counted as lost, in journal and reports. Without it, that is an error."""


class WeightsConfig(_Section):
    dir: Path = Path("weights")
    """The store: chunks and manifests."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What is published and sampled from."""
    serve: bool = True
    """echo-train starts `echo-weights serve` on the store; False where one is already running."""
    host: Host = "127.0.0.1"
    """Where the weight server listens: a name or an address; 0.0.0.0 is every one of IPv4, `::` every one of both kinds."""
    port: int = Field(default=9103, ge=0, le=65535)
    """0 takes a free port."""
    url: str | None = None
    """Where producers reach the server; None is http(s)://host:port."""
    token: SecretStr | None = None
    """Bearer token, asked of every puller."""
    chunk_bytes: int = Field(default=8 * 2**20, ge=4096)
    keep: int | None = Field(default=None, ge=2)
    """Versions kept at least; None is max_staleness + 2."""
    delta_chain: int = Field(default=4, ge=0)
    """How many versions a producer can be behind and still pull deltas instead of whole tensors; these versions are kept.
    0 makes no deltas."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    read_timeout_s: float = Field(default=60.0, gt=0)
    pull_deadline_s: float = Field(default=600.0, gt=0)
    """One pull, retries included."""
    tls_cert: Path | None = None
    """PEM certificate (with its chain) of the weight server, and of peers; with `tls_key` they serve https."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    tls_ca: Path | None = None
    """PEM certificates that pullers trust for https; None: those of the system."""
    accel_redirect: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9._/-]*$")
    """Prefix of an internal nginx location over the store's `chunks` folder: chunks are then answered with X-Accel-Redirect."""
    max_egress_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bound of the chunk bytes that the weight server sends, over all pullers together, and that each peer sends."""
    peers: bool = False
    """Producers serve the chunks that they hold to each other, so that the weight server sends each about once."""
    peer_host: Host = "127.0.0.1"
    """Where a producer listens for its peers."""
    peer_port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port."""
    peer_url: str | None = None
    """Where its peers reach this producer; None is http(s)://peer_host:port."""

    def url_at(self, port: int) -> str:
        """Where producers reach a weight server that listens on `host` and `port`. Raises ConfigError where they can't."""
        if self.url is not None:
            return self.url
        if is_wildcard(self.host):
            raise ConfigError(f"weights.host is {self.host!r}, which producers can't reach: set weights.url as well")
        return http_url(self.host, port, is_tls=self.tls_cert is not None)


class MetricsConfig(_Section):
    host: Host = "127.0.0.1"
    """Where trainer and producers listen; of a wildcard, heartbeats and the log show the name of the machine instead."""
    train_port: int = Field(default=9101, ge=0, le=65535)
    produce_port: int = Field(default=9102, ge=0, le=65535)
    """0 takes a free port; the start-up line says which."""


class LimitsConfig(_Section):
    record_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest record; the same in topic, producer and fetch, checked at start."""
    waiting_s: float = Field(default=30.0, gt=0)
    """After so long without progress a process says what it waits for."""


class RunConfig(_Section):
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run in every record, message, manifest and metric."""
    mode: Literal["async", "sequential"] = "async"
    """async: producers sample all the time, and what they sample is trained up to `max_staleness`. sequential: the trainer asks
    for each step's groups, producers take up its newest policy before they sample them, and staleness is 0."""
    refresh: Literal["always", "if_behind"] = "if_behind"
    """Sequential mode: pull the policy's weights for every request, or only where those served are older than it asks for."""
    max_staleness: int = Field(default=4, ge=0)
    """S: a trajectory is trained while newest announced version - its oldest version <= S. Sequential mode takes 0."""
    on_stale: OnStale = "drop"
    """What becomes of a group with tokens that are too old. drop: nothing of it is trained. mask: those tokens are not, others
    are, as long as each member has one that is new enough: for completions so long that weights change under way."""
    seed: int = 0
    model: ModelConfig
    task: TaskConfig = TaskConfig()
    broker: BrokerConfig = BrokerConfig()
    topics: TopicsConfig = TopicsConfig()
    sampling: SamplingConfig = SamplingConfig()
    producer: ProducerConfig = ProducerConfig()
    batch: BatchConfig = BatchConfig()
    learner: LearnerConfig = LearnerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    metrics: MetricsConfig = MetricsConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfig":
        if self.batch.min_group_size is not None and self.batch.min_group_size > self.sampling.group_size:
            raise ValueError(
                f"batch.min_group_size is {self.batch.min_group_size}, more than sampling.group_size = "
                f"{self.sampling.group_size}"
            )
        if self.weights.keep is not None and self.weights.keep < self.max_staleness + 2:
            raise ValueError(f"weights.keep is {self.weights.keep}, less than max_staleness + 2 = {self.max_staleness + 2}")
        if (self.weights.tls_cert is None) != (self.weights.tls_key is None):
            raise ValueError("weights.tls_cert and weights.tls_key go together")
        return self

    @property
    def staleness_bound(self) -> int:
        """The largest staleness that is trained, by mode."""
        return 0 if self.mode == "sequential" else self.max_staleness

    @property
    def versions_kept(self) -> int:
        return self.weights.keep if self.weights.keep is not None else self.max_staleness + 2

    @property
    def weights_url(self) -> str:
        """Where producers reach a weight server that the trainer does not start. Raises ConfigError where they can't."""
        if self.weights.url is None and self.weights.port == 0:
            raise ConfigError("weights.port is 0: set the port of the weight server, or weights.url")
        return self.weights.url_at(self.weights.port)


if __name__ == "__main__":
    import json
    import sys

    json.dump(RunConfig.model_json_schema(), sys.stdout, indent=2)
