"""Convert between plans of decoders (:class:`hil.core.steps.StepsPlan`) and messages."""

from __future__ import annotations

from hil.core.steps import StepsPlan
from hil.protocol.v1 import agent_pb2 as pb


def encode_steps(plan: StepsPlan) -> pb.Steps:
    """Convert a plan to a message."""
    return pb.Steps(
        rules=[pb.InputRule(input=place, rule=rule.value) for place, rule in plan.rules],
        feedback=[
            pb.Feedback(input=place, output=output, shape=shape)
            for (place, output), shape in zip(plan.feedback, plan.shapes, strict=True)
        ],
        logits=plan.logits,
        steps=plan.steps,
        chunk=plan.chunk,
        stop=plan.stop,
        bound=plan.bound,
        prompts=[pb.PromptFunction(**vars(one)) for one in plan.prompts],
    )


def decode_steps(message: pb.Steps) -> StepsPlan:
    """Convert a message to a plan. Raises UsageError for an unknown rule."""
    return StepsPlan.from_json(
        {
            "rules": [(one.input, one.rule) for one in message.rules],
            "feedback": [(one.input, one.output) for one in message.feedback],
            "shapes": [tuple(one.shape) for one in message.feedback],
            "stop": list(message.stop),
            "prompts": [
                {"name": one.name, "inputs": list(one.inputs), "outputs": list(one.outputs)} for one in message.prompts
            ],
            **{name: getattr(message, name) for name in ("logits", "steps", "chunk", "bound")},
        }
    )
