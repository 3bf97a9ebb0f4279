"""HTML of the largest batch or sequence, which notebooks show: the table of its text."""

from html import escape

from rekindle.planner.as_html import as_html
from rekindle.planner.largest import Largest
from rekindle.report.largest_text import format_answer, table_rows


@as_html.register
def largest_to_html(found: Largest) -> str:
    """The HTML of the largest size that fits: a table of the sizes that were tried."""
    head, *rows = table_rows(found)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<p>{escape(format_answer(found))}</p><table><tr>{cells}</tr>{body}</table>"
