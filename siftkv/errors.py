"""Errors a caller can act on. Every one of them is a `SiftKVError`; messages say what is wrong and what to do."""


class SiftKVError(Exception):
    """Base class. The command line prints its message on one line and exits with code 2."""


class ModelError(SiftKVError):
    """A model cannot be found, fetched, read or run (unsupported architecture, corrupt or missing file)."""


class PolicyError(SiftKVError, ValueError):
    """A `kv` setting is unknown, malformed or contradictory."""


class FormatError(SiftKVError, ValueError):
    """A storage format is unknown, or is not one of those that the pool was opened with."""


class RequestError(SiftKVError, ValueError):
    """A request is invalid: empty prompt, too long, sampling value out of range, token id out of the vocabulary."""


class NumericsError(SiftKVError):
    """NaN or infinity reached the KV cache of a request."""


class PromptFailed(SiftKVError):
    """A pass over a prompt ended in an error that nobody foresaw: memory ran out, or a policy's own code raised."""


class StepFailed(SiftKVError):
    """A decode step, the choice of who takes part, a trigger before it, or what was made of its result ended in an
    error that nobody foresaw.
    """


class LibraryFailed(SiftKVError):
    """A tokenizer or a grammar broke one of its own assertions, or panicked."""


class DeviceLost(SiftKVError):
    """The GPU has failed for good: nothing can be computed until the process is started again."""


class OutOfPages(SiftKVError):
    """The page pool cannot hold what was asked for. Nothing was taken."""


class IntegrityError(SiftKVError):
    """`check_integrity()` found a page owned twice, leaked, or a length outside its pages. Always a bug."""
