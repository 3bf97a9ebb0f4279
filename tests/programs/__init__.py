"""Random programs: drawn as plain values, printed as text, run with regions or without.

`programs()` draws one (`drawing`), a tree of frozen steps (`steps`), and `program_of(seed)` draws
the one of a seed; `format_program(program)` shows it (`text`); `run(program, plain=...)` runs it
from a fixed seed and returns everything a training step leaves behind, and `differences` compares
two such outcomes (`running`). What a program may do is a line in a table: `OPS`, `WRITES` and
`CHUNKS` (`ops`), `BLOCKS` (`contexts`), `BACKWARDS`, `MEANWHILE`, and for the ways to run a region
`MODES` (`modes`). `python -m tests.programs.hunt` runs many.
"""

from tests.programs.drawing import program_of, programs
from tests.programs.modes import MODES, Mode
from tests.programs.running import differences, run
from tests.programs.steps import Block, Chunks, Op, Program, Region, Write
from tests.programs.text import format_program

__all__ = [
    "MODES",
    "Block",
    "Chunks",
    "Mode",
    "Op",
    "Program",
    "Region",
    "Write",
    "differences",
    "format_program",
    "program_of",
    "programs",
    "run",
]
