"""The error tree. Everything that Echo raises on purpose derives from `EchoError`.

    EchoError
    ├── ConfigError          a run file, an override or topics.yaml is wrong (also a ValueError)
    ├── RecordError          a trajectory record can't be used (also a ValueError)
    │   ├── SchemaError      its major schema version is unknown
    │   └── CorruptRecordError   its bytes are not a valid record
    ├── ControlError         a control, request or heartbeat message can't be read (also a ValueError)
    ├── TopicError           a topic is missing, was made anew in mid-run, or differs from what topics.yaml promises
    ├── BrokerError          the broker refused or did not answer; `retriable` says whether trying again may help
    │   ├── FencedError      another trainer of the same run has taken over
    │   ├── UnknownTopicError   the cluster has no such topic or partition
    │   ├── OtherClusterError   the address leads to another cluster than before
    │   └── NoSuchOffsetError   the partition does not hold the offset that reading should begin or resume at
    ├── WeightsError         weights could not be stored or pulled; `retriable` as above
    │   ├── ManifestError    a manifest is missing, foreign, or does not match its digest
    │   ├── ChunkError       a chunk is missing or does not match its digest
    │   ├── DeltaError       a delta is damaged, or was made from another tensor
    │   └── PullCancelled    the caller gave up a pull: a newer version was announced, or it stops
    ├── EngineError          an inference engine failed
    ├── TaskError            a task can't be built or scored
    ├── CheckpointError      a checkpoint is incomplete, damaged, or belongs to another run
    ├── TrainingError        the run can't go on: its steps are not finite any more
    ├── RankError            another rank of the trainer is gone
    ├── AgreementError       the trainer and this producer were given run files or models that differ
    ├── StoppedError         a stop was asked for before there was anything to drain: no failure
    └── BackgroundError      a thread of this process ended that should not have

A message names the place (file, key, topic, partition, offset, URL) and says what to do.
"""


class EchoError(Exception):
    """Base of every error that Echo raises on purpose."""

    retriable = False


class ConfigError(EchoError, ValueError):
    """A run file, an override or a topic file is wrong."""


class RecordError(EchoError, ValueError):
    """A trajectory record can't be used."""


class SchemaError(RecordError):
    """The record's major schema version is unknown to this reader."""


class CorruptRecordError(RecordError):
    """The bytes are not a valid record."""


class ControlError(EchoError, ValueError):
    """A control, request or heartbeat message can't be read."""


class TopicError(EchoError):
    """A topic is missing, was made anew in mid-run, or differs from its specification."""


class BrokerError(EchoError):
    """The broker refused a request or did not answer in time."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class FencedError(BrokerError):
    """Another trainer of the same run has taken over the control topic."""


class UnknownTopicError(BrokerError):
    """The cluster has no such topic or partition."""


class OtherClusterError(BrokerError):
    """The address leads to another cluster than before: a memory-only broker that was replaced has lost everything."""


class NoSuchOffsetError(BrokerError):
    """The partition does not hold this offset: retention deleted it, or the topic was made anew."""


class WeightsError(EchoError):
    """Weights could not be stored or pulled."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class ManifestError(WeightsError):
    """A manifest is missing, belongs to another run, or does not match its digest."""


class ChunkError(WeightsError):
    """A chunk is missing or does not match its digest."""


class DeltaError(WeightsError):
    """A delta is damaged, or was made from another tensor."""


class PullCancelled(WeightsError):
    """The caller gave up a pull."""


class EngineError(EchoError):
    """An inference engine failed."""


class TaskError(EchoError):
    """A task can't be built, or its scorer failed."""


class CheckpointError(EchoError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class TrainingError(EchoError):
    """Step after step is not finite: going on would train nothing."""


class RankError(EchoError):
    """Another rank of this trainer is gone, or does not answer."""


class AgreementError(EchoError):
    """The trainer and this producer were given run files or models that differ in what both must have alike."""


class StoppedError(EchoError):
    """A planned stop was asked for while the process was starting: it ends with status 0."""


class BackgroundError(EchoError):
    """A thread of this process ended that should not have."""
