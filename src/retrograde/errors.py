"""The errors that users see. Each message names the parameter or argument, the rank, the cause and the fix."""


class RetrogradeError(RuntimeError):
    """The base class of all errors that retrograde raises."""


class InternalsChanged(RetrogradeError):
    """This torch or this Python is built otherwise than retrograde assumes; raised before anything is computed."""


class ShardingError(RetrogradeError, ValueError):
    """`shard()` was called with a model, argument or process group it cannot use."""


class UnsupportedError(RetrogradeError, TypeError):
    """Something was asked for that torch allows on a plain module and that has no meaning on a sharded one."""


class StateError(RetrogradeError, ValueError):
    """A saved optimizer state does not belong to this rank's pieces."""


class CheckpointError(RetrogradeError, ValueError):
    """A checkpoint could not be written, or is not what was saved, or does not fit; raised on every rank alike."""


class DivergenceError(RetrogradeError):
    """Ranks did things that cannot be reconciled; raised on every rank that takes part."""


class ScheduleError(RetrogradeError, ValueError):
    """A pipeline schedule cannot be read, is incomplete, or would not run to its end."""


class PipelineError(RetrogradeError):
    """A pipeline could not be built, or a step failed on some rank; raised on every rank of the pipeline."""
