"""Why credentials are not accepted."""


class Refused(Exception):
    """Credentials are not accepted. The message is one word, for the log and the metrics; callers never see it."""
