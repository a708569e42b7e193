"""What an error of an object store means, and what to do: by its words, since obstore passes on those of the store."""

import re
from collections.abc import Sequence

# Words of an error, the more telling ones first, and what to say to whom they are shown.
_ADVICE: Sequence[tuple[tuple[str, ...], str]] = (
    (("NoSuchBucket", "ContainerNotFound", "bucket does not exist"), "there is no bucket {bucket}; create it, or name another"),
    (
        ("169.254.169.254", "metadata.google.internal", "MissingCredentials", "Missing Account Key", "Account must be specified"),
        "no credentials were found; set those of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (("ExpiredToken", "TokenRefreshRequired"), "the temporary credentials have ended; get new ones, then run the same command again"),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "401 Unauthorized"),
        "the credentials are not those of the store; see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    ),
    (("403 Forbidden", "PermissionDenied"), "the credentials are not allowed to do this; they must list, read and write there"),
    (
        ("301 Moved", "PermanentRedirect", "AuthorizationHeaderMalformed", "region"),
        "the bucket lies in another region; set AWS_REGION to it",
    ),
    (
        ("error sending request", "timed out", "operation timed out", "Connect", "connection"),
        "the store cannot be reached; see that it is there, and AWS_ENDPOINT_URL where it is not Amazon's, then run the same command again",
    ),
    (("status code: 5",), "the store failed again and again; run the same command again later"),
)


def advice(text: str, bucket: str) -> str:
    """What went wrong and what to do, by the words of an error."""
    for words, text_for in _ADVICE:
        if any(word in text for word in words):
            return text_for.format(bucket=bucket)
    return "the store answers with an error; see what it says, then run the same command again"


def first_words(text: str) -> str:
    """An error of obstore in one line: without the dump of its source that follows, and the markup of the answer."""
    line = " ".join(re.sub(r"<[^>]*>", " ", text.split("\n\nDebug source:")[0]).split())
    return line if len(line) <= 300 else line[:300] + " …"
