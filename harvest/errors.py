"""Every error that harvest raises on purpose, and the exit code of each.

    HarvestError                 1   the run failed
    ├── RequestError             2   the request cannot be run as it stands; nothing was started
    │   ├── PromptsError         2   a prompts file, a line of it, or one prompt
    │   ├── ModelError           2   no such model, or one whose residual stream cannot be read
    │   └── FolderError          2   the run folder holds something else
    ├── StreamError              1   the model did not hand out the stream as expected
    │   └── ValueRangeError      1   a value that the stored type cannot hold
    ├── DeviceError              1   the device has no memory left, or failed
    ├── StorageError             1   a file could not be written
    ├── DownloadError            1   a file could not be fetched by its link
    ├── CompareError             2   two runs that cannot be compared
    └── NotARunError             1   what was opened is no run, no shard, or not whole
    CancelledError             130   stopped by Ctrl-C or `harvest cancel`
    ├── TerminatedError        143   stopped by SIGTERM
    └── RequeuedError           75   stopped by SIGTERM, to be started again: --on-term requeue

The command shows a HarvestError as one message, without a traceback. Anything else is a bug and keeps its traceback.
"""


class HarvestError(Exception):
    """Base of every error that harvest raises on purpose; its text says what was given, what is allowed and what to do."""

    exit_code = 1


class RequestError(HarvestError):
    """The request cannot be run as it stands. Raised before the model is loaded."""

    exit_code = 2


class PromptsError(RequestError):
    """A prompts file, a line of it, or one prompt is not what was expected."""


class ModelError(RequestError):
    """There is no such model, or it has no single residual stream that could be read."""


class FolderError(RequestError):
    """The run folder belongs to another request."""


class StreamError(HarvestError):
    """A forward pass did not hand out the residual stream as expected, so nothing of it was kept."""


class ValueRangeError(StreamError):
    """The stream holds a value that the stored type cannot hold."""


class DeviceError(HarvestError):
    """The device has no memory left, or failed. What was published before stays."""


class StorageError(HarvestError):
    """A file of the run could not be written. What was published before stays."""


class DownloadError(HarvestError):
    """A file of a job could not be fetched by its link. What was fetched before stays."""


class CompareError(HarvestError):
    """Two runs cannot be compared: one cannot be read, or they have no prompts, contents or layers in common."""

    exit_code = 2


class NotARunError(HarvestError):
    """What was opened is no run of harvest, no shard, or not whole."""


class CancelledError(HarvestError):
    """The run was stopped by Ctrl-C or by `harvest cancel`; its published shards stay."""

    exit_code = 130


class TerminatedError(CancelledError):
    """The run was stopped by SIGTERM, as schedulers send it; its published shards stay."""

    exit_code = 143


class RequeuedError(CancelledError):
    """The run was stopped by SIGTERM and will be started again, as --on-term requeue says; its published shards stay."""

    # EX_TEMPFAIL of sysexits.h: a failure that another attempt mends.
    exit_code = 75
