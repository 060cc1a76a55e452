"""One error of each class, for tests that must hold for all of them."""

from neuronpipe.core.errors import (
    AlreadyExists,
    Cancelled,
    ChangeRefused,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    JobNotFound,
    ModelNotFound,
    NeuronpipeError,
    NotAllowed,
    NotConfigured,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WrongTask,
)

EVERY_ERROR: tuple[NeuronpipeError, ...] = (
    InvalidInput("top_k", "5, the model has 4 labels"),
    ModelNotFound("model 'm' is not served"),
    WrongTask("model 'm' has another task"),
    Overloaded("7 requests in flight, the limit is 7", 1.5),
    DeadlineExceeded("the deadline passed"),
    Cancelled("the caller left"),
    Unavailable("the tokenizer cannot be reached"),
    InternalError("internal error"),
    Unauthenticated("no valid API key came with the call"),
    JobNotFound("there is no such job"),
    AlreadyExists("another job has this request_id"),
    NotAllowed("tenant 'a' does not have the right manages_registry"),
    ChangeRefused("version 2 is not approved"),
    NotConfigured("this gateway takes no jobs: set jobs_redis_url"),
)
