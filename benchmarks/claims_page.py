"""The page of `kasoku reproduce`: a document's claims in a table, and its figures with published points and ours."""

from collections.abc import Sequence
from dataclasses import astuple, fields, replace

from claims import LEGEND, ClaimRow, Document, Results, counts, panels
from kasoku.report.html import RunRecord, figures
from kasoku.report.html.page import render, view


def document_page(
    document: Document, rows: Sequence[ClaimRow], here: Results, long: Results, runs: Sequence[RunRecord]
) -> str:
    """The page as HTML: what holds, the parts and their images, the claims, the figures, runs of profile and tune."""
    *head, _ = (each.name.replace("_", " ") for each in fields(ClaimRow))  # but whether it is kasoku's own
    parts = [f"--part {part['name']}: {part['title']}; {part['set']}." for part in document["parts"] if "set" in part]
    charts = []
    for i, (title, panel, x_label, x_log) in enumerate(panels(document, here, long)):
        [chart] = figures.panels([panel], x_label, x_log=x_log)
        charts.append(replace(chart, key=f"figure-{i}", title=title))
    return render(
        title=document["title"],
        comparisons=[f"{document['source']}. Claims: {counts(rows)}. {LEGEND}.", *parts],
        summary=(head, [list(astuple(row)[: len(head)]) for row in rows]),
        prose=True,
        curves=charts,
        runs=[view(run) for run in runs],
        named=True,
    )
