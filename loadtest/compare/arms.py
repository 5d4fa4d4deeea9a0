"""What is compared: deployments that we start, commands, endpoints that run already."""

from dataclasses import dataclass

from loadtest.arms import PLAIN_POLICIES, to_file_name
from loadtest.arms import Arm as Policy
from loadtest.arms import parse_arm as parse_policy


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: a policy that we serve, or have vLLM alone serve.

    Or the root of an endpoint that runs already, or a command that starts a server in a
    shell, in which `{port}` stands for its port.
    """

    name: str
    policy: Policy | None = None
    url: str | None = None
    command: str | None = None
    is_plain_vllm: bool = False

    @property
    def file_name(self) -> str:
        """The name, fit for a file."""
        return to_file_name(self.name)

    def up_arguments(self) -> list[str]:
        """Return the options of `tetris-serve up` or `vllm` that make it this arm."""
        assert self.policy is not None  # It is served by us or by vLLM alone.
        # An audit would hold back what loses, and cost what is compared.
        numbers = self.policy.settings() | {"audit": 0}
        arguments = ["--policy", numbers.pop("name")]
        for name, number in numbers.items():
            arguments += ["--set", f"policy.{name}={number}"]
        return arguments


def parse_arm(text: str) -> Arm:
    """Read `tetris:2+2`, `NAME=http://host:port`, `NAME=cmd:COMMAND --port {port}`.

    A policy may have a name too, `ours=goodput:8`, and `NAME=vllm:fixed:2` has vLLM
    alone serve it.

    Raises:
        ValueError: If it is none of these.
    """
    name, separator, what = text.partition("=")
    if not separator:
        policy = parse_policy(text)
        return Arm(policy.name, policy=policy)
    if not name or not what:
        raise ValueError(f"{text!r}: write NAME=URL, NAME=cmd:COMMAND or NAME=POLICY")
    if what.startswith(("http://", "https://")):
        return Arm(name, url=what.rstrip("/").removesuffix("/v1"))
    if what.startswith("cmd:"):
        command = what.removeprefix("cmd:").strip()
        if "{port}" not in command:
            raise ValueError(f"{text!r}: the command must hold {{port}}")
        return Arm(name, command=command)
    plain = what.removeprefix("vllm:")
    policy = parse_policy(plain)
    if plain != what and policy.policy not in PLAIN_POLICIES:
        raise ValueError(
            f"{text!r}: vLLM alone has no policy {policy.policy}; write "
            f"{name}=vllm:none or {name}=vllm:fixed:2"
        )
    return Arm(name, policy=policy, is_plain_vllm=plain != what)
