"""What `helm test` runs: wait for the service, then have one chat with it.

TETRIS_URL is where it is, TETRIS_MODEL the name to ask for, TETRIS_API_KEY the key if
one is needed, and TETRIS_WAIT_S how many seconds it may take to start. Exits with 0
once an answer has come.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

_POLL_S = 5.0


def ask(url: str, path: str, body: object = None, timeout_s: float = 120) -> bytes:
    """Return what the service answers; HTTP errors and silence raise OSError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    # A Secret made of a file ends as the file does.
    if key := os.environ.get("TETRIS_API_KEY", "").strip():
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return bytes(response.read())


def wait(url: str, until_s: float) -> None:
    """Return once an engine replica runs; raise the last OSError when time is up."""
    while True:
        try:
            ask(url, "/health", timeout_s=_POLL_S)
            return
        except OSError as error:
            if time.monotonic() >= until_s:
                raise
            print(f"waiting for {url}: {error}", flush=True)
        time.sleep(_POLL_S)


def main() -> int:
    """Return the exit code."""
    url, model = os.environ["TETRIS_URL"], os.environ["TETRIS_MODEL"]
    wait(url, time.monotonic() + float(os.environ["TETRIS_WAIT_S"]))
    question = {"role": "user", "content": "Count from 1 to 5."}
    body = {"model": model, "messages": [question], "max_tokens": 16}
    try:
        answer = json.loads(ask(url, "/v1/chat/completions", body))
    except urllib.error.HTTPError as error:
        print(f"{error}: {error.read().decode(errors='replace')}")
        return 1
    print(json.dumps(answer, indent=1))
    return 0 if answer["usage"]["completion_tokens"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
