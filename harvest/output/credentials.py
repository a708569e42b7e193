"""How an object store is reached, and until when its signed links work: by the environment, and for S3 by the files of Amazon's own tools.

obstore reads each cloud's variables itself (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS,
AZURE_STORAGE_ACCOUNT_NAME, …); here is what it leaves out.
"""

import configparser
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harvest.contract import utc_now

# The longest that Amazon's own temporary credentials last (GetSessionToken); an assumed role's end after 12 hours at most.
_LONGEST_SESSION = timedelta(hours=36)
_CLOCK = "%Y-%m-%d %H:%M UTC"
# The option of an endpoint, or of credentials, by its name in Amazon's files.
_FROM_FILES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def client_options(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of the HTTP client: an endpoint without TLS is allowed where a variable names one."""
    environment = os.environ if environment is None else environment
    ends = ("_ENDPOINT", "_ENDPOINT_URL", "_ENDPOINT_URL_S3")
    plain = any(value.startswith("http://") for name, value in environment.items() if name.endswith(ends))
    # Else obstore's own variable, AWS_ALLOW_HTTP, says.
    return {"allow_http": True} if plain or _endpoint_of_files(environment).startswith("http://") else {}


def credentials(scheme: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a store is to be opened with beside its variables: of S3, what the profile of ~/.aws has where no variable says it."""
    environment = os.environ if environment is None else environment
    if scheme != "s3":
        return {}
    found: dict[str, str] = {}
    if not environment.get("AWS_ACCESS_KEY_ID"):
        profile = _profile(environment, "credentials") | _profile(environment, "config")
        found |= {option: profile[name] for name, option in _FROM_FILES.items() if profile.get(name)}
    if not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        found["region"] = _profile(environment, "config").get("region", "us-east-1")
    if endpoint := _endpoint_of_files(environment):
        found["endpoint"] = endpoint
    return found


def end_of_link(link: str, lifetime: timedelta, environment: Mapping[str, str] | None = None) -> tuple[datetime, str | None]:
    """When a link that was signed now for `lifetime` stops working, and why that is sooner, where it is.

    A link that temporary credentials signed ends with them, whatever it says itself, and such a link carries their token.
    """
    environment = os.environ if environment is None else environment
    end = utc_now() + lifetime
    if "X-Amz-Security-Token=" not in link:
        return end, None
    with suppress(ValueError):
        # The variable of `aws configure export-credentials`.
        known = datetime.fromisoformat(environment.get("AWS_CREDENTIAL_EXPIRATION", ""))
        known = known.astimezone(UTC) if known.tzinfo else known.replace(tzinfo=UTC)
        if known >= end:
            return end, None
        return known, f"the links end at {known:{_CLOCK}}, with the temporary credentials that signed them"
    end = utc_now() + min(lifetime, _LONGEST_SESSION)
    return end, f"the links end with the temporary credentials that signed them: unknown when, and taken to be {end:{_CLOCK}} at the latest"


def _endpoint_of_files(environment: Mapping[str, str]) -> str:
    if any(environment.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")):
        return ""
    return _profile(environment, "config").get("endpoint_url", "")


def _profile(environment: Mapping[str, str], file: str) -> dict[str, str]:
    """The chosen profile's lines in ~/.aws/credentials or ~/.aws/config; nothing where there is no such file or profile."""
    variable = {"credentials": "AWS_SHARED_CREDENTIALS_FILE", "config": "AWS_CONFIG_FILE"}[file]
    path = Path(environment.get(variable) or Path(environment.get("HOME", "~")).expanduser() / ".aws" / file)
    name = environment.get("AWS_PROFILE") or "default"
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        parser.read_string(path.read_text())
        for section in (name, f"profile {name}"):
            if parser.has_section(section):
                return dict(parser[section])
    return {}
