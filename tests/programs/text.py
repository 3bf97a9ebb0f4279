"""A program as text, much like the Python it stands for: what a failure shows."""

import textwrap

from tests.programs.steps import Block, Chunks, Draw, Op, Program, Region, Step, Write


def format_program(program: Program) -> str:
    """A program as text."""
    return (
        f"inputs {', '.join(program.inputs)}; "
        f"parameters {'learn' if program.learns else 'frozen'}\n"
        f"{_body(program.body)}\n"
        f"outputs {', '.join(program.seen)}; "
        f"not in the loss: {', '.join(program.unseen) or 'none'}\n"
        f"between forward and backward: {program.meanwhile}\n"
        f"backward: {program.backward}"
    )


def _body(body: tuple[Step, ...]) -> str:
    return "\n".join(map(_step, body)) or "pass"


def _indented(body: tuple[Step, ...]) -> str:
    return textwrap.indent(_body(body), "    ")


def _step(step: Step) -> str:
    match step:
        case Op(out, name, operands, k):
            return f"{out} = {name}({', '.join(operands)}, k={k})"
        case Write(name, operands, k):
            return f"{name}({', '.join(operands)}, k={k})"
        case Chunks(outs, name, operand, k):
            return f"{', '.join(outs)} = {name}({operand}, k={k})"
        case Draw(out, operand):
            return f"{out} = {operand} + rand(generator)"
        case Block(context, body):
            return f"with {context}:\n{_indented(body)}"
        case Region():
            return _region(step)


def _region(region: Region) -> str:
    """The function, and the line that runs it."""
    sees = f"  # sees {', '.join(region.captured)}" if region.captured else ""
    given = ", ".join((*region.arguments, *(("generator",) if region.generator else ())))
    return (
        f"def {region.name}({given}):{sees}\n{_indented(region.body)}\n"
        f"    return {', '.join(region.results)}\n"
        f"{', '.join(region.outs)} = run({region.name}, {given})"
        f"  # {region.mode}; a {region.form}, takes {region.calling}, gives {region.giving}"
    )
