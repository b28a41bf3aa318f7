"""The page of `kasoku reproduce`: a document's claims in a table, and its figures with published points and ours."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace

from kasoku.report.documents import VERDICTS, ClaimRow, Document, Results, panels
from kasoku.report.html import figures
from kasoku.report.html.page import render

_HEAD = ["section", "claim", "published", "here", "recorded", "verdict", "why it differs", "command"]


def document_page(document: Document, rows: Sequence[ClaimRow], here: Results, long: Results) -> str:
    """The page as HTML: what holds, the parts and their images, the claims, the figures."""
    verdicts = Counter(row.verdict for row in rows)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = [f"{part['title']}: {part['set']}." for part in document["parts"] if "set" in part]
    charts = []
    for i, (title, panel, x_label, x_log) in enumerate(panels(document, here, long)):
        [chart] = figures.panels([panel], x_label, x_log=x_log)
        charts.append(replace(chart, key=f"figure-{i}", title=title))
    return render(
        title=document["title"],
        comparisons=[f"{document['source']}. Claims: {counts}.", *parts],
        summary=(_HEAD, [list(astuple(row)) for row in rows]),
        curves=charts,
    )
