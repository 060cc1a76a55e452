"""One error of each class, for tests that must hold for all of them."""

from neuronpipe.core import errors
from neuronpipe.core.errors import NeuronpipeError

EVERY_ERROR: tuple[NeuronpipeError, ...] = (
    errors.InvalidInput("top_k", "5, the model has 4 labels"),
    errors.ModelNotFound("model 'm' is not served"),
    errors.WrongTask("model 'm' has another task"),
    errors.Overloaded("7 requests in flight, the limit is 7", 1.5),
    errors.DeadlineExceeded("the deadline passed"),
    errors.Cancelled("the caller left"),
    errors.Unavailable("the tokenizer cannot be reached"),
    errors.InternalError("internal error"),
    errors.Unauthenticated("no valid API key came with the call"),
    errors.JobNotFound("there is no such job"),
    errors.AlreadyExists("another job has this request_id"),
    errors.NotAllowed("tenant 'a' does not have the right manages_registry"),
    errors.ChangeRefused("version 2 is not approved"),
    errors.NotConfigured("this gateway takes no jobs: set --jobs-redis-url"),
)
