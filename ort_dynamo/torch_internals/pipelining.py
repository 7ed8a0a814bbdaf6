"""What a stage that torch's pipeline tracer made expects to be sent."""

from __future__ import annotations

from typing import Any

__all__ = ["expect_only_what_stages_send"]


def expect_only_what_stages_send(stage: Any) -> None:
    """Make a stage after the first expect values of other stages alone; its caller gives it the model's own inputs.

    Every tested version describes a model's input that such a stage reads as one that it has been given, and then
    raises for it, as schedules give inputs to the first stage alone.

    Args:
        stage: what `Pipe.build_stage` made, before its first step.
    """
    describe = stage._create_act_recv_info

    def describe_sent() -> tuple[Any, ...]:
        described = zip(describe(), stage.node.args, strict=True)
        return tuple(value for value, node in described if node.op != "placeholder")

    stage._create_act_recv_info = describe_sent
